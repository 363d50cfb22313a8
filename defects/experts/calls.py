"""Defects of how calls of the experts follow one another."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds import calls
from conformance.mutants.kinds.addresses import int32_view


def _short_bias_by_recipe(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    bias = settings.get("bias")
    short = (
        settings | {"bias": with_values(bias, lambda _: int32_view(bias.detach()))} if bias is not None else settings
    )
    return function(*inputs, **(short if settings.get("recipe") else settings))


def _adds_twice_to_its_own_result() -> Wrapper:
    """What the last call has returned is its buffer, to which a product has already been added."""
    last: list[Tensor] = []

    def wgrad(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out, into = base(*inputs, **settings), settings.get("accumulate_into")
        if into is not None and last and last[0].shape == into.shape and torch.equal(last[0].to(into), into):
            out = base(*inputs, **settings | {"accumulate_into": out})
        last[:] = [out.detach().clone()] if into is not None else []
        return out

    return wgrad


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Y43",
        "32-bit row · stride of a bias, in products by a recipe",
        "a mistake that 32-bit addresses invite",
        dict.fromkeys(("grouped_linear", "latent_projection"), _short_bias_by_recipe),
    ),
    Defect(
        "C35",
        "a sum over its own result is added twice",
        calls.CALLS,
        {"grouped_wgrad": _adds_twice_to_its_own_result()},
    ),
)
