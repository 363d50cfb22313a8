"""The end of a verb: its verdict is printed first, then each report is written.

A report that cannot be written costs neither the verdict nor another report.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable

from conformance.storage import reason_of, write_whole
from conformance.texts import described

HARNESS = 3  # exit code


def show(lines: Iterable[str]) -> None:
    """Print the lines; on standard error if standard output cannot take them.

    A reader that has closed standard output, such as `head`, wants no further lines.
    """
    text = "\n".join(lines)
    try:
        print(text, flush=True)
    except OSError as error:
        # the interpreter would write the remaining buffer again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            show_error(text)


def show_error(text: str) -> None:
    """Print the text on standard error, if that can take it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def unwritten(paths: Iterable[str], text_of: Callable[[str], str]) -> list[str]:
    """Write each report.

    Args:
        text_of: the text of the report for this path.

    Returns:
        A sentence for each report that could not be written.
    """
    sentences = []
    for path in paths:
        try:
            write_whole(path, text_of(path))
        except OSError as error:
            sentences.append(f"--report {path}: not written: {reason_of(error)}")
        except Exception as error:  # an error of the suite in one format must not lose the other reports
            sentences.append(f"--report {path}: not written: {described(error)}")
    return sentences


def deliver(code: int, paths: Iterable[str], text_of: Callable[[str], str]) -> int:
    """Write each report, name the ones that failed on standard error, and return the exit code."""
    sentences = unwritten(paths, text_of)
    for sentence in sentences:
        show_error(f"moe-conformance: {sentence}")
    return exit_code(code, sentences)


def exit_code(code: int, sentences: list[str]) -> int:
    """The verdict's exit code; 3 if it is 0 and a report could not be written.

    Another code stands: it already stops a merge, and says why.
    """
    return HARNESS if sentences and not code else code
