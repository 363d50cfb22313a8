"""Planted defects of memory layouts: slices of wider tensors, and numbers of rows past 8 bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper, with_values
from conformance.mutants.kinds.gradients import read_as_contiguous

DESCRIBED = 2**20  # the largest stride, in elements, that a copy engine takes here


def read_unstrided(x: Any) -> Any:
    """A tensor, read as if its memory were contiguous; anything else as it is."""
    if not isinstance(x, Tensor) or x.is_contiguous() or x.is_neg():
        return x
    return with_values(x, lambda _: read_as_contiguous(x)) if x.is_floating_point() else read_as_contiguous(x)


def adjacent(x: Any) -> Any:
    """x as a copy engine reads it that takes rows of adjacent elements for adjacent rows."""
    sliced = isinstance(x, Tensor) and x.dim() > 1 and x.stride(-1) == 1 and max(x.stride()) < DESCRIBED
    return read_unstrided(x) if sliced and x.dtype not in (torch.int32, torch.int64) else x  # no index is misread


def separate(x: Any) -> Any:
    """x as a reader takes it that knows no rows which begin in each other."""
    shared = isinstance(x, Tensor) and x.dim() > 1 and x.stride()[-2:] == (1, 1) and min(x.shape[-2:]) > 1
    return read_unstrided(x) if shared else x


def reading(read: Callable[[Any], Any]) -> Wrapper:
    """The function of inputs that are read so."""

    def planted(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        return function(*map(read, inputs), **{name: read(x) for name, x in settings.items()})

    return planted


def numbers_rows_in_bytes(function: Wrapper, rows: Tensor, *arguments: Any, **settings: Any) -> Any:
    """The rows of the first input have numbers of 8 bits: those past 256 are the first again."""
    if rows.dim() == 2 and len(rows) > 256:
        numbers, is_byte = torch.arange(len(rows)) % 256, rows.element_size() == 1
        codes = rows.view(torch.uint8) if is_byte else rows
        rows = codes[numbers].view(rows.dtype) if is_byte else with_values(rows, lambda x: x[numbers])
    return function(rows, *arguments, **settings)
