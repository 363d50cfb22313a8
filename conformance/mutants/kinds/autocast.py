"""Defects under `torch.autocast` alone, which any function may have: families plant them."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper, with_values
from conformance.mutants.kinds.conditions import Mistake, only
from conformance.mutants.kinds.gradients import rounded_to, with_gradient


def _entered(*inputs: Any, **settings: Any) -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _under_autocast(mistake: Mistake) -> Wrapper:
    return only(_entered, mistake)


@_under_autocast
def backward_in_bfloat16(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """The backward is computed in bfloat16, whatever the inputs are."""
    return function(with_gradient(x, rounded_to(torch.bfloat16)), *arguments, **settings)


@_under_autocast
def inputs_in_bfloat16(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """The inputs are cast to bfloat16, whatever they are."""
    return function(x.to(torch.bfloat16).to(x.dtype), *arguments, **settings)


@_under_autocast
def widened(function: Wrapper, result: Any, *inputs: Any, **settings: Any) -> Any:
    """The results have float32, as torch's own softmax under autocast."""
    return result.float() if isinstance(result, Tensor) else result._replace(probs=result.probs.float())


def first_of_a_shape() -> Wrapper:
    """The input's cast is kept for later calls of its shape, whatever it holds then."""
    cached_inputs: dict[Any, Tensor] = {}

    def mistake(function: Wrapper, result: Any, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        first = cached_inputs.setdefault((tuple(x.shape), x.dtype), x.detach().clone())
        return function(with_values(x, lambda _: first), *arguments, **settings)

    return only(_entered, mistake)
