"""Expectations as data: the rule and the arrays by which any program can judge an output.

bits      the same dtype and bytes
equal     the same dtype and numbers; every NaN is equal, and so is a zero of either sign
integers  the same integers, of any width; a bool is 0 or 1
interval  |y - value| ≤ bound in float64; where `value` is not finite, the same number or NaN
places    least ≤ places[y] ≤ most, y the code as an unsigned byte
choice    `counts` places are chosen along `axis`: min(keys + error) of the chosen ≥ max(keys -
          error) of the others; y is a map, or the indices [N,K] of the columns chosen in a row
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.judge.bound import Bounded
from conformance.judge.choice import Chosen
from conformance.judge.codes import Codes
from conformance.judge.exact import Exact, bits
from conformance.judge.expectation import Resolved
from conformance.judge.ranges import Ranged
from conformance.judge.ratios import RowWise

RULES = {"bits": "bits", "values": "equal", "integers": "integers"}  # by the kind of `Exact`


@dataclass(frozen=True)
class Stated:
    """A rule with its arrays, and what it leaves out of the expectation's own judgement."""

    rule: str  # empty: no rule states the expectation
    arrays: dict[str, Tensor]
    without: str = ""
    axis: int = -1  # of a choice in a map; -1: of any other rule, or of indices


def stated(expectation: Resolved) -> Stated:
    """The expectation as data; an unknown kind is not stated, never approximately."""
    kind = type(expectation)
    if kind is Exact:
        return Stated(RULES[expectation.kind], {"value": expectation.value})  # type: ignore[attr-defined]
    if isinstance(expectation, Bounded) and kind in (Bounded, RowWise):
        left_out = "the ratios to the error of the recipe's own rounding" if kind is RowWise else ""
        return Stated("interval", {"value": expectation.value, "bound": expectation.bound}, left_out)
    if isinstance(expectation, Codes) and kind is Codes:
        return _nearest(expectation)
    if isinstance(expectation, Ranged) and kind is Ranged:
        assert expectation.least is not None and expectation.most is not None and expectation.places is not None
        arrays = {"value": expectation.value, "least": expectation.least, "most": expectation.most}
        return Stated("places", arrays | {"places": expectation.places})
    if isinstance(expectation, Chosen):
        return _choice(expectation)
    return Stated("", {}, f"the check {expectation.check}")


def _nearest(codes: Codes) -> Stated:
    """The nearest code, and its neighbour where a midpoint is within the quantiser's roundings."""
    if codes.table is None or codes.scaled is None or codes.window == 0:
        return Stated("integers", {"value": torch.from_numpy(bits(codes.value))})
    nearest = torch.from_numpy(bits(codes.value)).long() & 0xFF
    allowed = [nearest, nearest]
    for end, step in enumerate((-1, 1)):
        neighbour = (nearest + step).clamp(0, len(codes.table) - 1)
        near = (
            codes.scaled - (codes.table[nearest] + codes.table[neighbour]) / 2
        ).abs() <= codes.window * codes.scaled.abs()
        allowed[end] = torch.where(near, neighbour, nearest)
    arrays = {"value": nearest, "least": allowed[0], "most": allowed[1], "places": torch.arange(256)}
    return Stated("places", arrays, "the share of values near a midpoint that may go the other way")


def _choice(chosen: Chosen) -> Stated:
    """In the orientation of the output."""
    if chosen.groups or chosen.lowest:
        return Stated("", {}, "a choice under group limits" if chosen.groups else "a declared tie rule")
    error = chosen.error
    if chosen.unspecified is not None:
        error = torch.where(chosen.unspecified[:, None], torch.inf, error)
    keys = {name: x.T if chosen.dim == 0 else x for name, x in (("keys", chosen.keys), ("error", error))}
    axis = -1 if chosen.indices else chosen.dim
    return Stated("choice", {"value": chosen.value} | keys | {"counts": chosen.counts}, axis=axis)
