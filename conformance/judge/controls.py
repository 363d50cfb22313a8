"""Corrupted outputs that the judge must reject: a check that cannot fail checks nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.judge import Resolved, rejection

ELEMENTS = 2**15  # larger outputs are cropped to their first rows


class BlindJudge(Exception):
    """The judge accepted an output corrupted on purpose: the harness is wrong."""


def check(output: str, expected: Resolved) -> int:
    """Judge every corruption beyond the bound; returns their number.

    Raises:
        BlindJudge: a corruption was accepted.
    """
    shown, size = 0, expected.value.numel()
    if size > ELEMENTS and expected.value.dim():
        expected = expected.first(max(ELEMENTS * len(expected.value) // size, 4))
    for name, corrupt in corruptions(expected.honest):
        if not expected.moved(corrupt):
            continue
        shown += 1
        if rejection(expected, corrupt) is None:
            raise BlindJudge(f"the judge of {output} accepts {name}")
    return shown


def corruptions(honest: Tensor) -> Iterator[tuple[str, Tensor]]:
    """All zeros; two rows swapped; one row zero; one row 5 % larger."""
    if honest.numel() == 0:
        return
    yield "all zeros", torch.zeros_like(honest)
    if honest.dim() == 0:
        return
    last = honest.shape[0] - 1
    swapped = honest.clone()
    swapped[0], swapped[last] = honest[last], honest[0]
    yield "the first and last row swapped", swapped
    middle = last // 2
    zeroed = honest.clone()
    zeroed[middle] = 0
    yield "one row zero", zeroed
    if honest.is_floating_point() and honest.element_size() > 1:
        scaled = honest.clone()
        scaled[middle] = honest[middle] * 1.05
        yield "one row 5 % larger", scaled
