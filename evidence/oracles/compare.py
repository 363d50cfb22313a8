"""Compares two tensors value by value: how many values there are, how many agree, and why the
others differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS, THEIRS, EITHER = "moe_ref", "the peer", "either"


@dataclass(frozen=True)
class Known:
    """A difference that was examined: where it is, which side is right, and why."""

    cause: str
    right: str
    where: Tensor  # of the compared values, which of them it explains; broadcast


@dataclass(frozen=True)
class Difference:
    """Values that differ by one cause, which is "" if it is unknown."""

    cause: str
    right: str
    values: int
    smallest: str


@dataclass(frozen=True)
class Comparison:
    """One subject: its values and the differences among them."""

    subject: str
    rule: str  # "bit-equal", or the bound
    values: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> int:
        """How many values agree."""
        return self.values - sum(difference.values for difference in self.differences)

    @property
    def unexplained(self) -> int:
        """How many differ without a known cause."""
        return sum(difference.values for difference in self.differences if not difference.cause)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Comparison":
        """From plain data."""
        return cls(**record | {"differences": [Difference(**difference) for difference in record["differences"]]})


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of x; every NaN has the same."""
    if x.dtype == torch.bool or not x.is_floating_point():
        return x.to(torch.int64)
    integers = x.contiguous().view(BITS[x.element_size()])
    return torch.where(
        torch.isnan(x.float() if x.element_size() == 1 else x), -1 if x.element_size() > 1 else 255, integers
    )


def compare(
    subject: str,
    ours: Tensor,
    theirs: Tensor,
    *,
    case: Callable[[tuple[int, ...], str], str],
    known_causes: Sequence[Known] = (),
    bound: Tensor | None = None,
    rule: str = "bit-equal",
) -> Comparison:
    """Compare bit by bit, or within a bound.

    Args:
        case: describes the smallest case that shows the value at an index and differs by the cause.
        known: differences that were examined; the first that covers a value explains it.
        bound: how far a value of a computation with other roundings may lie; None for bit-equal.
        rule: the bound in words.

    Raises:
        ValueError: the shapes or dtypes are not the same.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(
            f"{subject}: {tuple(ours.shape)} of {ours.dtype} against {tuple(theirs.shape)} of {theirs.dtype}"
        )
    ours, theirs = ours.detach(), theirs.detach()
    differs = bits(ours) != bits(theirs)
    if bound is not None:
        differs &= ~((ours - theirs).abs() <= bound)  # NaN is never within a bound
    differences = []
    for cause in known_causes:
        here = differs & cause.where
        if here.any():
            differences.append(Difference(cause.cause, cause.right, int(here.sum()), case(_first(here), cause.cause)))
            differs = differs & ~here
    if differs.any():
        index = _first(differs)
        shown = f"{case(index, '')}: moe_ref {ours[index].item()}, the peer {theirs[index].item()}"
        differences.append(Difference("", "not decided", int(differs.sum()), shown))
    return Comparison(subject, rule, ours.numel(), differences)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def merged(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """One comparison per subject; of equal causes the first case, which is the smallest."""
    together: dict[tuple[str, str], Comparison] = {}
    for comparison in comparisons:
        earlier = together.get(
            (comparison.subject, comparison.rule), Comparison(comparison.subject, comparison.rule, 0)
        )
        causes = {difference.cause: difference for difference in earlier.differences}
        for new in comparison.differences:
            old = causes.get(new.cause, Difference(new.cause, new.right, 0, new.smallest))
            causes[new.cause] = Difference(old.cause, old.right, old.values + new.values, old.smallest)
        together[comparison.subject, comparison.rule] = Comparison(
            comparison.subject, comparison.rule, earlier.values + comparison.values, list(causes.values())
        )
    return list(together.values())


def shrunk(x: Tensor, differs: Callable[[Tensor], bool]) -> str:
    """A description of the elements of x [M,N] that the difference needs.

    All others can be 0: whole columns are removed first, then whole rows.
    """
    x = x.clone()
    for turned in (x.T, x):
        for line in turned:
            saved = line.clone()
            line.zero_()
            if not differs(x):
                line.copy_(saved)
    nonzero = [f"[{i}, {j}] = {x[i, j].item():.9g}" for i, j in (bits(x) != 0).nonzero().tolist()]
    shape = "×".join(map(str, x.shape))
    remainder = f" and {len(nonzero) - SHOWN} more" if len(nonzero) > SHOWN else ""
    return f"{shape} of {str(x.dtype).removeprefix('torch.')}, 0 but {', '.join(nonzero[:SHOWN]) or 'none'}{remainder}"


SHOWN = 6  # elements of a smallest case
