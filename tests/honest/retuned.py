"""moe_fast's dispatchers, each call under several block sizes; an error if the bits differ."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_fast
from conformance.families.dispatch.cases import FUNCTIONS
from conformance.judge.exact import bits
from moe_fast.dispatch import symmetric
from moe_fast.launch import tuning
from moe_fast.launch.backend import INTERPRETED
from tests.honest.sizes import LARGE, SMALL, with_one_tactic

TUNINGS = (SMALL, LARGE)


class Handles(tuple):
    """One handle per tuning."""


def under(sizes: tuning.Tuning, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """The call with these block sizes."""
    previous = tuning.INTERPRETER, tuning.GPU
    tuning.INTERPRETER = tuning.GPU = sizes
    try:
        return function(*arguments, **settings)
    finally:
        tuning.INTERPRETER, tuning.GPU = previous


def tensors_of(result: Any) -> dict[str, Tensor]:
    """The result's tensors by name."""
    named = {"tokens": result} if isinstance(result, Tensor) else result._asdict()
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def with_gradients(function: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """The result, its tensors, and the inputs' gradients for the cotangent 1, 2, 3 …"""
    result = function(*arguments, **settings)
    tensors = tensors_of(result)
    inputs = [x for x in (*arguments, *settings.values()) if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in tensors.values() if x.requires_grad]
    if outputs:
        cotangents = [torch.arange(1, x.numel() + 1, device=x.device).reshape(x.shape).to(x.dtype) for x in outputs]
        gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, retain_graph=True)
        tensors |= {f"gradient {i}": x for i, x in enumerate(gradients) if x is not None}
    return result, tensors


def every_way(
    name: str, function: Callable[..., Any], tunings: Iterable[tuning.Tuning] = TUNINGS
) -> Callable[..., Any]:
    """The function under each tuning; returns the first result if all are bitwise equal."""

    def call(*arguments: Any, **settings: Any) -> Any:
        results = []
        for i, sizes in enumerate(tunings):
            chosen = [x[i] if isinstance(x, Handles) else x for x in arguments]
            results.append(under(sizes, with_gradients, function, *chosen, **settings))
        (first, expected), *remaining = results
        for _, tensors in remaining:
            for key, x in expected.items():
                if x.shape != tensors[key].shape or (bits(x.detach().cpu()) != bits(tensors[key].detach().cpu())).any():
                    raise AssertionError(f"{key} of {name} depends on the block sizes")
        handles = Handles(getattr(result, "handle", None) for result, _ in results)
        return first._replace(handle=handles) if hasattr(first, "handle") else first

    return call


def with_each_tactic(*names: str) -> SimpleNamespace:
    """Functions of `moe_fast`, each call with each tactic of the tuning tables.

    On a GPU the last bits of a sum may depend on the tactic; in a ring, under --sanitize fpsan, no
    bit does.
    """
    table = tuning.INTERPRETER if INTERPRETED else tuning.GPU
    sizes = [with_one_tactic(table, index) for index in range(len(table.grouped.by_rows))]
    functions = {name: every_way(name, getattr(moe_fast, name), sizes) for name in names}
    return SimpleNamespace(**functions, supports=moe_fast.supports, declares=moe_fast.declares)


def retuned(base: Any) -> SimpleNamespace:
    """A moe_fast namespace's dispatchers under every tuning."""
    functions = {name: every_way(name, getattr(base, name)) for name in FUNCTIONS if hasattr(base, name)}
    return SimpleNamespace(**functions, supports=base.supports, declares=base.declares)


COLLECTIVES = retuned(moe_fast)
SYMMETRIC = retuned(symmetric)
PRODUCTS = with_each_tactic("grouped_linear", "grouped_dgrad")
