"""Recipes of expert MLPs: units of a case, states and noise, and the layers.

Columns are in UNITs, and each expert's rows too unless `align` pads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.mlp_layers import LowLayer
from conformance.core.contract import Opaque, Problem
from conformance.core.tensors import hashed
from conformance.families.experts.linear import precision_of
from conformance.families.experts.precision import (
    recipe_of,
    rounds_gradients,
    state_from,
    state_tensors,
)
from conformance.interface import named_outputs

LAYERS = (0, 1)


def rows_unit(case: Any) -> int:
    """The unit of an expert's rows."""
    return 1 if case.align else case.unit


def of_experts(case: Any, weight: Tensor) -> Tensor:
    """The weights.

    With a recipe they are multiplied by a power of two per expert, so that no two experts share a
    scale.
    """
    power = 2.0 ** ((torch.arange(len(weight)) + case.seed) % 3 - 1)
    return (weight.double() * power[:, None, None]).to(weight.dtype) if case.scaling else weight


def noise_rows(case: Any, counts: tuple[int, ...]) -> int:
    """The rows of the buffer, including padding and the tail."""
    return sum(-(-count // (case.align or 1)) * (case.align or 1) for count in counts) + case.tail


def beside_recipe(
    case: Any, counts: tuple[int, ...], columns: tuple[int, int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of both layers' states and noises, and the settings that take their place."""
    recipe = recipe_of(case)
    if recipe is None:
        return {}, {}
    tensors = {name: x for layer in LAYERS for name, x in state_tensors(case, f"state.{layer}").items()}
    settings: dict[str, Any] = {"recipe": recipe} | ({"state": Opaque("state")} if tensors else {})
    if rounds_gradients(recipe) and case.grads:
        settings["noise"] = Opaque("noise")
        for layer, width in zip(LAYERS, columns, strict=True):
            shape = (2, noise_rows(case, counts), width)
            bits = hashed(case.seed, f"noise {layer}", 2 * shape[1] * width) >> 9
            tensors[f"noise.{layer}"] = torch.from_numpy((2.0 * bits + 1) / 2**24).to(torch.float32).reshape(shape)
    return tensors, settings


def pairs_from(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The pairs of these tensors."""
    states = tuple(state_from(tensors, f"state.{layer}") for layer in LAYERS)
    keywords: dict[str, Any] = {} if states[0] is None else {"state": states}
    return keywords | ({"noise": tuple(tensors[f"noise.{layer}"] for layer in LAYERS)} if "noise.0" in tensors else {})


def script_of_pairs(
    function: str, arguments: tuple[str, ...], settings: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """The call, with pairs built from their tensors."""

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        keywords = {
            name: tensors[name] for name in settings if name in tensors and not isinstance(tensors[name], Opaque)
        }
        return named_outputs(
            implementation.call(function, *(tensors[name] for name in arguments), **keywords, **pairs_from(tensors)),
            outputs,
        )

    return script


def with_pairs(problem: Problem, outputs: tuple[str, ...], tensors: dict[str, Tensor]) -> Problem:
    """The call; if a recipe needs pairs, a script builds them from these tensors."""
    if not tensors:
        return problem
    script = script_of_pairs(problem.function, tuple(problem.required), tuple(problem.settings), outputs)
    return replace(problem, required=problem.required | tensors, script=script, first=problem.required)


def settings_of(problem: Problem) -> dict[str, Any]:
    """The settings of the reference's function."""
    return {name: x for name, x in problem.settings.items() if not isinstance(x, Opaque)} | pairs_from(problem.required)


def layers_of(
    problem: Problem, declared: Mapping[str, Any], rows: Tensor, counts: Tensor
) -> tuple[LowLayer, LowLayer] | None:
    """Both layers' recipe, state and noise; rows include padding. None in high precision."""
    recipe = problem.settings.get("recipe")
    if recipe is None:
        return None
    common, pairs = precision_of(problem, declared, rows), pairs_from(problem.required)
    if "noise" in pairs:
        pairs["noise"] = tuple(layer_noise[:, : int(counts.sum())] for layer_noise in pairs["noise"])
    settings = ({"recipe": recipe} | {name: pair[layer] for name, pair in pairs.items()} for layer in LAYERS)
    first, second = (
        LowLayer(counts, replace(common, settings=layer_settings), rows.dtype) for layer_settings in settings
    )
    return first, second
