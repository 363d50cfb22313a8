"""Kernels that compute addresses in 32 bits."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper
from conformance.mutants.kinds.gradients import read_at


def int32_view(x: Tensor) -> Tensor:
    """x as a kernel reads it by 32-bit offsets Σ index·stride: wrapped, or 0 out of bounds."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        offsets = offsets + (torch.arange(size) * stride).reshape([size if d == dim else 1 for d in range(x.dim())])
    wrapped = (offsets + 2**31) % 2**32 - 2**31
    if x.numel() == 0 or torch.equal(wrapped, offsets):
        return x
    return read_at(x, wrapped.add(x.storage_offset()).to(x.device)).requires_grad_(x.requires_grad)


def in_32_bits(argument: str = "0") -> Wrapper:
    """The input at that place, or the setting of that name, is read by 32-bit offsets."""

    def wrapper(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        arguments = {str(position): x for position, x in enumerate(inputs)} | settings
        if isinstance(arguments.get(argument), Tensor):
            arguments[argument] = int32_view(arguments[argument])
        return function(
            *(arguments[str(position)] for position in range(len(inputs))),
            **{name: arguments[name] for name in settings},
        )

    return wrapper
