"""A section of docs/second-opinions.md: the table of known defects, and what shows each."""

import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evidence.rediscovery.rows import Row

HEAD = """## Known defects, found again

`make rediscover` installs releases of other packages that are known to have a defect, and those
that mended it, each in an environment of its own which is kept; a release that the index lacks is
taken from its repository. It judges both by the same check: a contract of the suite through an
adapter, or a comparison: with the reference, between ranks, or between two ways of the release.
Ranks are processes joined by gloo, with stubs for CUDA streams. A defect is *found again* only if
the first release fails and the second passes. *Half*: the first fails, and there is no second to
compare with. *Not shown*: the first passes. Checks of compiled kernels ran on a GPU
(`python -m evidence.rediscovery.on_a_gpu`), and what they found is kept.
"""


@dataclass(frozen=True)
class Found:
    """The outcome of a row."""

    row: Row
    outcome: str  # found again, half, not shown, not run
    text: str  # the reason, or what the outcome leaves open
    finding: str = ""


def page(results: Sequence[Found], where: Sequence[str] = ()) -> str:
    """The section; `where` says what else was run, and on what."""
    counts = Counter(result.outcome for result in results)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("found again", "half", "not shown", "not run"))
    lines = [
        HEAD,
        textwrap.fill(
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, CPU. {''.join(f'{x}. ' for x in where)}"
            f"{len(results)} defects: {summary}.",
            100,
        )
        + "\n",
    ]
    lines += ["| package | defect | release | mended in | outcome |", "|---|---|---|---|---|"]
    for result in results:
        row = result.row
        mended = row.mended or "open"
        lines.append(f"| {row.package} | {row.bug}: {row.title} | {row.broken} | {mended} | {result.outcome} |")
    shown = [result for result in results if result.outcome in ("found again", "half")]
    lines += ["", "### What shows them\n", *map(_entry, shown)]
    by_reason: dict[str, list[Row]] = {}
    for result in results:
        if result not in shown:
            by_reason.setdefault(result.text, []).append(result.row)
    lines += ["", "### The others\n"]
    lines += [_wrapped(f"- {', '.join(row.bug for row in rows)}: {reason}") for reason, rows in by_reason.items()]
    return "\n".join(lines).rstrip() + "\n"


def _entry(result: Found) -> str:
    finding = f"{result.row.broken}: {result.finding}." if result.finding else ""
    return _wrapped(" ".join(filter(None, (f"- {result.row.bug}.", result.text, finding))))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
