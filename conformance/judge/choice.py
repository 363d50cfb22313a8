"""Level 1: a top-k choice is right if some honest rounding of the keys leads to it.

A set S is admissible if min_{e∈S} (key + δ) ≥ max_{e∉S} (key - δ). If the K-th and the next key
differ by more than 2δ, exactly one set is admissible. Under group limits, S is admissible if it
lies in an admissible set of groups. If `tie_rule` is "lowest_index", experts with identical inputs
must be chosen in that order, and groups too.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.bound import ROUNDOFF
from conformance.judge.exact import INTEGERS
from conformance.judge.expectation import Resolved

GROUP_SETS = 4096  # sets of near-equal groups tried; beyond, every set is admissible


@dataclass(frozen=True)
class Chosen(Resolved):
    """The columns chosen per row: `value` is a map, [N,E] bool, or indices, [N,K]."""

    keys: Tensor  # [N,E] float64
    error: Tensor  # [N,E] float64, δ
    counts: Tensor  # [N] number of columns chosen per row
    # [N,E] each: columns equal in all inputs have equal keys in any arithmetic
    inputs: tuple[Tensor, ...] = ()
    lowest: bool = False  # whether ties are declared to go to the lowest index
    unspecified: Tensor | None = None  # [N] rows in which any K distinct columns are right
    groups: int = 0
    group_topk: int = 0
    dtype: torch.dtype = torch.float32  # of the sums of group scores
    dim: int = 1  # 0: the rows above are the columns of the output
    indices: bool = False

    check: ClassVar[str] = "choice"
    by_row: ClassVar[tuple[str, ...]] = ()  # few elements: never cropped

    @property
    def map(self) -> Tensor:
        """The reference's choice as a map, [N,E] bool."""
        return self.as_map(self.value)

    def as_map(self, observed: Tensor) -> Tensor:
        """An observed output as a map [N,E]; indices out of range are ignored."""
        if not self.indices:
            return (observed != 0).T if self.dim == 0 else observed != 0
        in_range = (observed >= 0) & (observed < self.keys.shape[1])
        out = torch.zeros(self.keys.shape, dtype=torch.int64)
        return out.scatter_add(1, torch.where(in_range, observed.long(), 0), in_range.long()) > 0

    def dtype_error(self, observed: Tensor) -> str | None:
        if self.indices and observed.dtype == torch.bool:
            return "has dtype torch.bool; it must be integer"
        return None if observed.dtype in INTEGERS else f"has dtype {observed.dtype}; it must be bool or integer"

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """True for rows with an inadmissible choice."""
        chosen, reference_map = self.as_map(observed), self.map
        mismatches = chosen.sum(1) != self.counts
        unspecified = torch.zeros_like(mismatches) if self.unspecified is None else self.unspecified
        for row in ((chosen != reference_map).any(1) & ~mismatches & ~unspecified).nonzero().flatten().tolist():
            mismatches[row] = not _admissible(self, row, chosen[row])
        return mismatches.numpy() if bool(mismatches.any()) else None

    def moved(self, corrupt: Tensor) -> bool:
        """Whether a row of a map has another count, or a row of indices a duplicate."""
        if not self.indices:
            return bool((self.map.sum(1) != self.as_map(corrupt).sum(1)).any())
        twice = (corrupt.sort(dim=1).values.diff(dim=1) == 0).any(1)
        return bool(((corrupt != self.value).any(1) & twice).any())

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong row's choice, the reference's, and their keys."""
        row = index[0]
        got = observed[row].tolist() if self.indices else self.as_map(observed)[row].nonzero().flatten().tolist()
        expected_choice = self.map[row].nonzero().flatten().tolist()
        what = ("column", "row") if self.dim == 0 else ("row", "columns")
        keys = ", ".join(
            f"{e}: {self.keys[row, e]:.6g}" for e in sorted({*got, *expected_choice})[:6] if 0 <= e < self.keys.shape[1]
        )
        count = f"{int(mismatches.sum())} of {len(mismatches)} wrong"
        choices = f"chooses {_first_items(got)}; the reference chooses {_first_items(expected_choice)}"
        return f"{what[0]} {row} {choices} (keys {keys}; {count})"


def _first_items(items: list[int]) -> str:
    return f"[{', '.join(map(str, items[:8]))}{', …' if len(items) > 8 else ''}]"


def _admissible(expected: Chosen, row: int, chosen: Tensor) -> bool:
    high, low = expected.keys[row] + expected.error[row], expected.keys[row] - expected.error[row]
    if expected.lowest and _jumps(expected, row, chosen):
        return False
    if not expected.groups:
        return _best(high, low, chosen, torch.ones_like(chosen))
    return any(_best(high, low, chosen, allowed) for allowed in _group_sets(expected, row, chosen))


def _best(high: Tensor, low: Tensor, chosen: Tensor, allowed: Tensor) -> bool:
    """Whether `chosen` may be the best of the allowed columns."""
    unchosen = allowed & ~chosen
    if bool((chosen & ~allowed).any()):
        return False
    return not bool(unchosen.any()) or not bool(chosen.any()) or bool(high[chosen].min() >= low[unchosen].max())


def _jumps(expected: Chosen, row: int, chosen: Tensor) -> bool:
    """Whether a later expert with the same input was chosen over an earlier one of its group, or
    over the one at its place in a group of all the same inputs.
    """
    size = len(chosen) // expected.groups if expected.groups else len(chosen)
    taken = chosen.tolist()
    places: dict[tuple[tuple[float, ...], ...], set[int]] = {}  # those chosen in the last group of such inputs
    for start in range(0, len(chosen), size):
        keys = tuple(tuple(float(x[row, e]) for x in expected.inputs) for e in range(start, start + size))
        is_chosen_by_key: dict[tuple[float, ...], bool] = {}
        for key, is_chosen in zip(keys, taken[start : start + size], strict=True):
            if is_chosen_by_key.get(key, True) is False and is_chosen:
                return True
            is_chosen_by_key[key] = is_chosen and is_chosen_by_key.get(key, True)
        here = {column for column in range(size) if taken[start + column]}
        if not here <= places.get(keys, here):
            return True
        places[keys] = here
    return False


def _group_sets(expected: Chosen, row: int, chosen: Tensor) -> Iterator[Tensor]:
    """The columns of every admissible set of groups that contains the chosen columns."""
    groups, group_topk = expected.groups, expected.group_topk
    keys, error = expected.keys[row].reshape(groups, -1), expected.error[row].reshape(groups, -1)
    counted = int(expected.counts[row]) // group_topk
    top = keys.sort(dim=1, descending=True).values[:, :counted]
    score = top.sum(1)
    slack = counted * (
        error.max(1).values + torch.where(top.isfinite(), top.abs(), 0.0).sum(1) * ROUNDOFF[expected.dtype]
    )
    touched = chosen.reshape(groups, -1).any(1)
    better = [int(((score - slack) > (score[g] + slack[g])).sum()) for g in range(groups)]
    worse = [int(((score + slack) < (score[g] - slack[g])).sum()) for g in range(groups)]
    sure = {g for g in range(groups) if worse[g] >= groups - group_topk}
    never = {g for g in range(groups) if better[g] >= group_topk}
    must = sure | set(touched.nonzero().flatten().tolist())
    if len(must) > group_topk or must & never:
        return
    undecided = [g for g in range(groups) if g not in must and g not in never]
    for tried, extra in enumerate(itertools.combinations(undecided, group_topk - len(must))):
        if tried == GROUP_SETS:
            yield chosen
            return
        held = must | set(extra)
        unheld = [g for g in range(groups) if g not in held]
        if unheld and bool((score + slack)[sorted(held)].min() < (score - slack)[unheld].max()):
            continue
        allowed = torch.zeros(groups, dtype=torch.bool)
        allowed[sorted(held)] = True
        yield allowed.repeat_interleave(keys.shape[1])
