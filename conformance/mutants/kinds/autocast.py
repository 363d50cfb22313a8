"""Defects under `torch.autocast` alone, which any function may have: families plant them."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper, with_values
from conformance.mutants.kinds.conditions import only
from conformance.mutants.kinds.gradients import rounded_to, with_gradient


def _entered(*inputs: Any, **settings: Any) -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _backward_in_bfloat16(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    return function(with_gradient(x, rounded_to(torch.bfloat16)), *arguments, **settings)


def _inputs_in_bfloat16(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    return function(x.to(torch.bfloat16).to(x.dtype), *arguments, **settings)


def _widened(function: Wrapper, result: Any, *inputs: Any, **settings: Any) -> Any:
    if isinstance(result, Tensor):
        return result.float()
    return result._replace(probs=result.probs.float())


def first_of_a_shape() -> Wrapper:
    """The input's cast is kept for later calls of its shape, whatever it holds then."""
    cached_inputs: dict[Any, Tensor] = {}

    def mistake(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        first = cached_inputs.setdefault((tuple(x.shape), x.dtype), x.detach().clone())
        return function(with_values(x, lambda _: first), *arguments, **settings)

    return only(_entered, mistake)


# the backward is computed in bfloat16, whatever the inputs are
backward_in_bfloat16 = only(_entered, _backward_in_bfloat16)
# the inputs are cast to bfloat16, whatever they are
inputs_in_bfloat16 = only(_entered, _inputs_in_bfloat16)
# the results have float32, as torch's own softmax under autocast
widened = only(_entered, _widened)
