"""moe_fast's dispatchers, each call under several block sizes at once: an error where the bits tell which."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_fast
from conformance.families.dispatch.cases import FUNCTIONS
from conformance.judge.exact import bits
from moe_fast.dispatch import symmetric
from moe_fast.launch import tuning
from tests.honest.sizes import LARGE, SMALL

TUNINGS = (SMALL, LARGE)


class Handles(tuple):
    """The handle that each tuning has made."""


def under(sizes: tuning.Tuning, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """The call with these sizes of blocks."""
    before = tuning.INTERPRETER, tuning.GPU
    tuning.INTERPRETER = tuning.GPU = sizes
    try:
        return function(*arguments, **settings)
    finally:
        tuning.INTERPRETER, tuning.GPU = before


def tensors_of(result: Any) -> dict[str, Tensor]:
    """Its tensors by name."""
    named = {"tokens": result} if isinstance(result, Tensor) else result._asdict()
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def with_gradients(function: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """The result, and its tensors with the gradients of the inputs that require one, for a cotangent of 1, 2, 3 …"""
    result = function(*arguments, **settings)
    tensors = tensors_of(result)
    inputs = [x for x in (*arguments, *settings.values()) if isinstance(x, Tensor) and x.requires_grad]
    made = [x for x in tensors.values() if x.requires_grad]
    if made:
        cotangents = [torch.arange(1, x.numel() + 1, device=x.device).reshape(x.shape).to(x.dtype) for x in made]
        gradients = torch.autograd.grad(made, inputs, cotangents, allow_unused=True, retain_graph=True)
        tensors |= {f"gradient {i}": x for i, x in enumerate(gradients) if x is not None}
    return result, tensors


def every_way(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under each tuning: the first result, if all of them have the same bits."""

    def call(*arguments: Any, **settings: Any) -> Any:
        results = []
        for i, sizes in enumerate(TUNINGS):
            own = [x[i] if isinstance(x, Handles) else x for x in arguments]
            results.append(under(sizes, with_gradients, function, *own, **settings))
        (first, right), *others = results
        for _, tensors in others:
            for key, x in right.items():
                if x.shape != tensors[key].shape or (bits(x.detach().cpu()) != bits(tensors[key].detach().cpu())).any():
                    raise AssertionError(f"{key} of {name} tells its sizes of blocks")
        handles = Handles(getattr(result, "handle", None) for result, _ in results)
        return first._replace(handle=handles) if hasattr(first, "handle") else first

    return call


def retuned(base: Any) -> SimpleNamespace:
    """The dispatchers of a namespace of moe_fast."""
    functions = {name: every_way(name, getattr(base, name)) for name in FUNCTIONS if hasattr(base, name)}
    return SimpleNamespace(**functions, supports=base.supports, declares=base.declares)


COLLECTIVES = retuned(moe_fast)
SYMMETRIC = retuned(symmetric)
