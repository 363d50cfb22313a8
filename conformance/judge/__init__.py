"""Decides whether an observed output is right.

    exact    data movement
    bound    sums
    ratios   GEMMs
    choice   top-k selection
    codes    quantised values
    ranges   quantised values, the input bounded by an interval
    draws    stochastically rounded values (with `statistics`)

Each is an `expectation`, which judges one output. `controls` passes it corrupted outputs, which it
must reject.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from conformance.judge.bound import Bounded
from conformance.judge.choice import Chosen
from conformance.judge.codes import Codes
from conformance.judge.exact import Exact
from conformance.judge.expectation import Expectation, Given, Outputs, Resolved
from conformance.judge.ratios import RowWise

__all__ = [
    "Bounded",
    "Chosen",
    "Codes",
    "Exact",
    "Expectation",
    "Finding",
    "Given",
    "Outputs",
    "Resolved",
    "RowWise",
    "gives_nan",
    "judge",
    "rejection",
]


@dataclass(frozen=True)
class Finding:
    """One way in which an implementation differs."""

    output: str  # the output, gradient or law that is wrong
    # exact, code, random, bound, ratio, choice, shape, dtype, missing, tensor, signature, error,
    # raises …, input, memory, or a law's name
    check: str
    message: str
    index: tuple[int, ...] = ()  # the first wrong element
    nan: str = ""  # an output that is NaN where the reference has a number, without NaN in fresh memory


def gives_nan(expected: Expectation, observed: Any) -> bool:
    """Whether an output of the right shape is NaN where the reference has a number."""
    tensors = (observed, expected.value)
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors) or observed.shape != tensors[1].shape:
        return False
    return bool((observed.float().isnan() & ~expected.value.float().isnan()).any())


def judge(output: str, expected: Resolved, observed: Any) -> Finding | None:
    """The first thing wrong with `observed`, or None."""
    if observed is None:
        return None if expected.optional else Finding(output, "missing", "is None; the reference returns a tensor")
    if not isinstance(observed, Tensor):
        return Finding(output, "missing", f"is a {type(observed).__name__}, not a tensor")
    shape, expected_shape = tuple(observed.shape), tuple(expected.value.shape)
    if shape != expected_shape:
        return Finding(output, "shape", f"has shape {shape}; the reference's is {expected_shape}")
    wrong_dtype = expected.dtype_error(observed)
    if wrong_dtype:
        return Finding(output, "dtype", wrong_dtype)
    rejected = rejection(expected, observed)
    if rejected is None:
        return None
    stage, mismatches = rejected
    index = tuple(int(i) for i in np.argwhere(mismatches)[0])
    return Finding(output, stage.check, stage.explain(observed, mismatches, index), index)


def rejection(expected: Resolved, observed: Tensor) -> tuple[Resolved, np.ndarray] | None:
    """The first check that `observed`, of the right shape and dtype, fails, and where; or None."""
    for stage in expected.stages:
        mismatches = stage.wrong(observed)
        if mismatches is not None:
            return stage, mismatches
    return None
