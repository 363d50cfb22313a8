"""docs/second-opinions.md: programs write its sections, and leave the others as they are."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "second-opinions.md"


def with_section(page: str, text: str) -> str:
    """The page, with this section in place of the one that has its heading, or at the end."""
    preceding, heading, following = page.partition(text.partition("\n")[0] + "\n")
    _, next_heading, remainder = following.partition("\n## ") if heading else ("", "", "")
    return f"{preceding.rstrip()}\n\n{text}" + (f"\n## {remainder}" if next_heading else "")


def replace_section(text: str) -> None:
    """Write the section, which begins with its heading."""
    PAGE.write_text(with_section(PAGE.read_text(), text))
