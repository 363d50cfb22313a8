"""Decides whether an observed output is right: `exact` where rows are only moved, `bound` where numbers are added (`running` where more
is done to them), `rowwise` where matrices are multiplied, `selection` where the best are chosen, `codes` where values are quantised,
`ranges` where that is done to values that are known in part, `random` with `statistics` where it is done at random.

`controls` shows the judge corrupted outputs, which it must reject.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from conformance.judge.bound import Bounded, beyond
from conformance.judge.choice import Chosen, inadmissible
from conformance.judge.codes import Codes, miscoded
from conformance.judge.draws import Drawn, undrawn
from conformance.judge.exact import Exact, different
from conformance.judge.ranges import Ranged, outside
from conformance.judge.ratios import RowWise

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Given:
    """An output that is right or wrong given other outputs of the same call: weights, given which experts were chosen."""

    value: Tensor  # given the reference's own choice
    make: Callable[[Outputs], Exact | Bounded]


Settled = Exact | Bounded | Chosen  # Codes, Ranged and Drawn are Exact, RowWise a Bounded
Expectation = Settled | Given


def settled(expected: Expectation, outputs: Outputs) -> Settled:
    """What is right, given the outputs; those that it depends on have been judged."""
    return expected.make(outputs) if isinstance(expected, Given) else expected


@dataclass(frozen=True)
class Finding:
    """One way in which an implementation differs."""

    output: str  # the output, gradient or law that is wrong
    check: str  # exact, code, random, bound, ratio, choice, shape, dtype, missing, signature, error, raises …, input, memory or a law's name
    message: str
    index: tuple[int, ...] = ()  # the first wrong element


def judge(output: str, expected: Settled, observed: Any) -> Finding | None:
    """The first thing wrong with `observed`, or None."""
    if isinstance(expected, RowWise):
        return judge(output, expected.bounded, observed) or _judge_ratios(output, expected, observed)
    if observed is None:
        flag_down = (
            isinstance(expected, Exact) and expected.kind == "integers" and expected.flag and not expected.value.any()
        )
        return None if flag_down else Finding(output, "missing", "is None; the reference returns a tensor")
    if not isinstance(observed, Tensor):
        return Finding(output, "missing", f"is a {type(observed).__name__}, not a tensor")
    if tuple(observed.shape) != tuple(expected.value.shape):
        return Finding(
            output, "shape", f"has shape {tuple(observed.shape)}; the reference's is {tuple(expected.value.shape)}"
        )
    wrong_kind = expected.dtype_error(observed)
    if wrong_kind:
        return Finding(output, "dtype", wrong_kind)
    wrong = _wrong(expected, observed)
    if wrong is None:
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    message = expected.explain(observed, wrong, index)
    return Finding(output, CHECKS[type(expected)], message, index)


CHECKS = {Exact: "exact", Codes: "code", Ranged: "code", Drawn: "random", Bounded: "bound", Chosen: "choice"}


def _judge_ratios(output: str, expected: RowWise, observed: Tensor) -> Finding | None:
    worst = expected.excess(observed)
    return None if worst is None else Finding(output, "ratio", expected.explain_excess(worst), worst.index)


def _wrong(expected: Settled, observed: Tensor) -> np.ndarray | None:
    if isinstance(expected, Codes):
        return miscoded(expected, observed)
    if isinstance(expected, Ranged):
        return outside(expected, observed)
    if isinstance(expected, Drawn):
        return undrawn(expected, observed)
    if isinstance(expected, Exact):
        return different(expected, observed)
    return beyond(expected, observed) if isinstance(expected, Bounded) else inadmissible(expected, observed)
