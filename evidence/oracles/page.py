"""docs/oracles.md: what was compared, what agrees, and what is behind each difference."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from evidence.oracles.compare import Comparison, Difference

HEAD = """# Evidence for the reference

Why trust `moe_ref`? Code that others wrote, independently, gives the same values. `make oracles`
installs each package in an environment of its own, reads the references of other repositories from
their source, compares them with `moe_ref`, and writes this page. Nothing of theirs is copied.

*Equal* means bit by bit (of NaN one bit pattern is as good as another), or within the bound named
in the row where the same formula may be rounded in another order. Each difference has a cause that
was examined, the side that is right, and the smallest case that shows it; one without a cause makes
`make oracles` fail. Where Python code and a kernel of the same library differ, the kernel is the
fact.
"""
DECIDED = """## Two differences that were decided

Both were faults of the reference, which now does as the kernels do; `moe_fast` was changed with it,
and a golden case keeps each.

- `update_scales` with `amax_compute_algo="max"`: a NaN in the history froze the scale. The maximum
  of Transformer Engine's kernel (`delayed_scaling.cu`, by `fmaxf`) passes over NaN, and so does
  ours.
- The FP8 rows of `deepep_low_latency_dispatch`: one NaN made a whole block of 128 NaN, scale
  included. DeepEP's kernel (`internode_ll.cu`, by `fmaxf`) loses the one value, and so do we. The
  cast in DeepEP's tests still loses the block: see its table.
"""
SECOND = """## A second formulation

`evidence/formulations` computes each of the functions once more, in float64 and from their
docstrings: by loops where the reference is vectorised, all at once where it loops, dense where it
moves rows, and with autograd's gradients where it derives them by hand. It shares settings and
results with `moe_ref`, no code. For cases drawn as the gate draws them, widened to float64, all
results and gradients agree: to 36 bits, or as far as terms of a row cancel. `make test` runs 16
cases of each function, and with each a mistake that must show.

    python -m evidence.formulations --cases 1000     # of each function; also --function NAME

| family | the second formulation |
|---|---|
| router | a token, an expert after another; softmax by differences; plans by exactly rounded sums |
| permutation | `moe_ref.permutation.second_oracle`: places by running sums, moves by loops |
| quantisers, fused | codes searched in a list of values, a block after another, in numpy's float32 |
| experts | a weight per row; MLPs row by row; curves with autograd's gradients |
| dispatch | for each row its source, token and expert, by walking; sums one after another |
| layer | every token through every expert; with a recipe, rows through the formulations above |
| parameters | keys by patterns, values by axes and one after another |

Not compared, because the interface leaves them open or one rounding decides: rows of logits with a
NaN; gradients where a row has a NaN or an infinity; the choice between keys of float64 that are
nearer than its rounding, or that a plan makes equal; the sign of a code of 0 after an activation.
The Hadamard transform is compared in `quantize` alone, and dtypes below float64 in `quantize`
alone: roundings are the suite's to judge. Large cases are left out.

One fault of the reference was found: the mean length of padded sequences was a float32 in the
balancing losses of float64 logits. The case of `route` that shows it stays.
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
    """The page of all results."""
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, CPU"
    lines = [HEAD, f"{versions}.\n", "| peer | judged | values | equal | explained | not explained |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for result in results:
        explained = result.values - result.equal - result.unexplained
        counts = [f"{number:,}".replace(",", " ") for number in (result.values, result.equal, explained)]
        cells = (result.peer, result.against, *counts, result.unexplained)
        row = (result.peer, result.against, "not run", "", "", "") if result.reason else cells
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines.append("")
    lines += [wrapped(f"{result.peer}: not run. {result.reason}.") + "\n" for result in results if result.reason]
    lines += [SECOND, DECIDED]
    lines += [section(result) for result in results if result.comparisons]
    return "\n".join(lines).rstrip() + "\n"


def section(result: Result) -> str:
    """The tables of one peer."""
    lines = [f"## {result.peer}\n", f"{result.against}.\n"]
    lines += ["| compared | rule | values | equal |", "|---|---|--:|--:|"]
    lines += [
        f"| {comparison.subject} | {comparison.rule} | {comparison.values} | {comparison.equal} |"
        for comparison in result.comparisons
    ]
    causes = list(by_cause(result.comparisons))
    lines += ["", "Differences:\n" if causes else "No difference."]
    for subject, difference in causes:
        count = f"{difference.values} value{'s' * (difference.values != 1)}"
        text = (
            f"- {difference.cause or 'not explained'}. Right: {difference.right}. {count}; smallest case ({subject}): "
        )
        lines.append(
            textwrap.fill(text + f"{difference.smallest}.", 100, subsequent_indent="  ", break_long_words=False)
        )
    return "\n".join(lines) + "\n"


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
