"""Text from an implementation, which may be of any length, on one line of a report."""

from collections.abc import Mapping
from typing import Any

LONGEST = 200  # characters


def one_line(text: str, most: int = LONGEST) -> str:
    """The text on one line of at most `most` printable characters."""
    text = " ".join(str.__str__(text)[: 10 * most].split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) < most else text[: most - 3] + "…"


def shown(value: Any) -> str:
    """The value's repr on one line, or its type if it has none."""
    try:
        return one_line(repr(value), 60)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def failure_text(finding: Mapping[str, Any] | None, reason: str) -> str:
    """What a finding says, or the reason why a case without a finding has failed."""
    return f"{finding['output']} [{finding['check']}] {finding['message']}" if finding else reason


def described(error: BaseException) -> str:
    """The error's class and message, on one line."""
    text = message(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def message(error: BaseException, most: int = LONGEST) -> str:
    """The error's message on one line of at most `most` characters, even if its `str` raises."""
    try:
        return one_line(str(error), most)
    except Exception as other:
        return f"(its message cannot be read: str raised {type(other).__name__})"
