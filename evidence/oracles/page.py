"""What was compared, what agrees, and what is behind each difference: a section and a record."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evidence.oracles.compare import Comparison, Difference

HEAD = """## Other code, value by value

`make oracles` installs each package in an environment of its own, reads the references of other
repositories from their source, compares them with `moe_ref`, and writes this section and [the
counts of each comparison](results/index.md#oracles). Nothing of theirs is copied.

*Equal* means bit by bit (of NaN one bit pattern is as good as another), or within a bound where the
same formula may be rounded in another order. Each difference has a cause that was examined, the
side that is right, and the smallest case that shows it; one without a cause makes `make oracles`
fail. Where Python code and a kernel of the same library differ, the kernel is the fact.
"""


@dataclass(frozen=True)
class Result:
    """One peer's comparisons; without any, the reason."""

    peer: str
    against: str
    comparisons: list[Comparison]
    reason: str = ""

    @property
    def values(self) -> int:
        """The number of compared values."""
        return sum(comparison.values for comparison in self.comparisons)

    @property
    def equal(self) -> int:
        """The number of equal values."""
        return sum(comparison.equal for comparison in self.comparisons)

    @property
    def unexplained(self) -> int:
        """The number of different values without a known cause."""
        return sum(comparison.unexplained for comparison in self.comparisons)

    @property
    def line(self) -> str:
        """The result as a line for the terminal."""
        if self.reason:
            return f"{self.peer}: not run, {self.reason}"
        return f"{self.peer}: {self.values} values, {self.equal} equal, {self.unexplained} differ without a cause"


def page(results: Sequence[Result]) -> str:
    """The section of docs/second-opinions.md: totals of each peer, and causes of differences."""
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, CPU"
    lines = [HEAD, f"{versions}.\n", "| peer | judged | values | equal | explained | not explained |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for result in results:
        explained = result.values - result.equal - result.unexplained
        counts = [f"{number:,}" for number in (result.values, result.equal, explained)]
        cells = (result.peer, result.against, *counts, result.unexplained)
        row = (result.peer, result.against, "not run", "", "", "") if result.reason else cells
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines.append("")
    lines += [wrapped(f"{result.peer}: not run. {result.reason}.") + "\n" for result in results if result.reason]
    lines += [line for result in results for line in differences(result)]
    return "\n".join(lines).rstrip() + "\n"


def differences(result: Result) -> Iterator[str]:
    """The causes of one peer's differences, an item of a list each, below its name."""
    causes = list(by_cause(result.comparisons))
    if causes:
        yield f"**{result.peer}**\n"
    for subject, difference in causes:
        count = f"{difference.values:,} value{'s' * (difference.values != 1)}"
        text = f"- {difference.cause or 'not explained'}. Right: {difference.right}. {count}"
        text += f"; smallest case ({subject}): {difference.smallest}."
        yield textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False)
    if causes:
        yield ""


def record(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of docs/results/oracles.json: the counts of each comparison."""
    values, equal = (f"{sum(getattr(result, name) for result in results):,}" for name in ("values", "equal"))
    rows = [
        [result.peer, one.subject, one.rule, f"{one.values:,}", f"{one.equal:,}"]
        for result in results
        for one in result.comparisons
    ]
    return {
        "title": "The reference beside other code",
        "meaning": f"{values} values of `moe_ref` were compared with those of {len(results)} peers, and {equal} are "
        "equal. Second opinions names the cause of each difference.",
        "tables": [],
        "details": [
            {"title": "", "columns": ["peer", "compared", "rule", "values", "equal"], "rows": rows},
        ],
    }


def by_cause(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, Difference]]:
    """The differences of one peer, each cause once, with the first subject that shows it."""
    by_cause_name: dict[str, tuple[str, Difference]] = {}
    for comparison in comparisons:
        for new in comparison.differences:
            subject, old = by_cause_name.get(
                new.cause, (comparison.subject, Difference(new.cause, new.right, 0, new.smallest))
            )
            by_cause_name[new.cause] = (
                subject,
                Difference(old.cause, old.right, old.values + new.values, old.smallest),
            )
    yield from by_cause_name.values()


def wrapped(text: str) -> str:
    """Lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
