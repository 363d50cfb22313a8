"""Pages describe what is: no dates, no history, no bars and goals. Those belong to CHANGELOG.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/results/index.md"}  # names the date of each measurement
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
HISTORY = re.compile(
    r"\b(20\d\d-\d\d-\d\d|[Nn]ow\b|[Tt]oday|[Ss]o far|no longer|missed|[Bb]efore (?:this|that),|"
    r"(?:[Tt]he|[Aa]|[Oo]ur) bars?\b|"
    r"(?:day|week|run|commit|section) before|(?:was|were|had been) (?:\w+ ){0,3}before(?=[.,;:)]))"
)
CODE = re.compile(r"```.*?```|^ {4}[^\n]*$|`[^`]*`", re.MULTILINE | re.DOTALL)


def history_in(text: str) -> list[str]:
    """Words of history outside code."""
    return [match[0] for match in HISTORY.finditer(CODE.sub("", text))]


@pytest.mark.parametrize("page", sorted(PAGES.keys() - GENERATED))
def test_a_page_tells_no_history(page):
    assert history_in(PAGES[page].read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "On 2026-11-26 it ran.",
        "    code\n\nIt is fast now.",
        "The bar is reached.",
        "So far none.",
        "It was slow before.",
    ],
)
def test_history_is_found(text):
    assert history_in(text)


@pytest.mark.parametrize(
    "text", ["    2026-11-26 in a command", "`now`", "Call it before the backward.", "The knowledge"]
)
def test_code_and_an_order_of_steps_are_no_history(text):
    assert history_in(text) == []
