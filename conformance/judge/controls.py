"""Corrupted copies of the expected output, which the judge must reject: a check that cannot fail checks nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.judge import Bounded, Chosen, Exact, Settled, judge
from conformance.judge.ranges import Ranged, visibly_moved

ELEMENTS = 2**15  # more than this are cropped
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool)


class BlindJudge(Exception):
    """The judge accepted an output that was corrupted on purpose: the harness is wrong, not the implementation."""


def check(output: str, expected: Settled) -> int:
    """Show the judge every corruption that moves some value beyond the bound; returns how many there were.

    Raises:
        BlindJudge: the judge accepted one.
    """
    shown = 0
    if not isinstance(expected, Chosen):
        expected = _cropped(expected)
    honest = expected.value if not isinstance(expected, Bounded) else expected.value.to(expected.dtype)
    for name, corrupt in corruptions(honest):
        if not _moved(expected, honest, corrupt):
            continue
        shown += 1
        if judge(output, expected, corrupt) is None:
            raise BlindJudge(f"the judge of {output} accepts {name}")
    return shown


def _cropped(expected: Exact | Bounded) -> Exact | Bounded:
    """The first rows of a large output: what the judge can see there, it can see everywhere."""
    if expected.value.numel() <= ELEMENTS or expected.value.dim() == 0:
        return expected
    rows = max(ELEMENTS // max(expected.value[0].numel(), 1), 4)
    fewer: dict[str, Any] = {"value": expected.value[:rows]} | (
        {"bound": expected.bound[:rows]} if isinstance(expected, Bounded) else {}
    )
    return replace(expected, **fewer)


def corruptions(honest: Tensor) -> Iterator[tuple[str, Tensor]]:
    """All zeros; two rows swapped; one row zero; one row 5 % larger."""
    if honest.numel() == 0:
        return
    yield "all zeros", torch.zeros_like(honest)
    if honest.dim() == 0:
        return
    last = honest.shape[0] - 1
    swapped = honest.clone()
    swapped[[0, last]] = (
        honest[[last, 0]] if honest.dtype not in ONE_BYTE else honest.view(torch.uint8)[[last, 0]].view(honest.dtype)
    )
    yield "the first and last row swapped", swapped
    middle = last // 2
    zeroed = honest.clone()
    zeroed[middle] = torch.zeros_like(honest[middle])
    yield "one row zero", zeroed
    if honest.is_floating_point() and honest.dtype not in ONE_BYTE:
        scaled = honest.clone()
        scaled[middle] = honest[middle] * 1.05
        yield "one row 5 % larger", scaled


def _moved(expected: Settled, honest: Tensor, corrupt: Tensor) -> bool:
    """Whether the corruption is visible at all, by plain arithmetic that shares nothing with the judge."""
    if isinstance(expected, Chosen):
        return _worse(expected, honest, corrupt)
    if isinstance(expected, Ranged):
        return visibly_moved(expected, honest, corrupt)
    if isinstance(expected, Exact) and expected.kind == "values":  # where -0 is 0
        before, after = honest.double().numpy(), corrupt.double().numpy()
        return bool(((before != after) & ~(np.isnan(before) & np.isnan(after))).any())
    if isinstance(expected, Exact):
        return bool((honest.contiguous().view(torch.uint8) != corrupt.contiguous().view(torch.uint8)).any())
    before, after = (x.double().numpy() for x in (honest, corrupt))
    margin = 4 * expected.bound.numpy()  # the honest copy itself is rounded, up to one bound away
    with np.errstate(invalid="ignore"):
        return bool((np.abs(after - before) > margin).any())


def _worse(expected: Chosen, honest: Tensor, corrupt: Tensor) -> bool:
    """Whether a row has too few columns, or ones whose keys add up to less than any rounding of the best could."""
    if expected.indices:
        return (
            bool(((corrupt != honest).any(1) & (corrupt.sort(dim=1).values.diff(dim=1) == 0).any(1)).any())
            if corrupt.shape[1:] > (1,)
            else False
        )
    before, after = expected.as_map(honest), expected.as_map(corrupt)
    return bool((before.sum(1) != after.sum(1)).any())
