"""Grouped products of quantised operands: recipes, their states and their operands.

A product is judged by the dequantised codes of the reference (`analysis.factors`). Where other
codes are allowed, the bound covers them, and the row is not compared with the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.core.tensors import hashed, payload, row_scales
from conformance.families.quantization.cases import (
    RECIPES,
    ROLES,
    TRANSFORMED,
    VALUES,
    QuantizeCase,
    noise_of,
    x_of,
)
from conformance.interface import named_outputs
from moe_ref.config import LinearState, QuantizerState, Recipe
from moe_ref.config.quantization import BLOCK, OVERRIDES
from moe_ref.quantization.recipes import (
    scheme,
)

LOW_VALUES = (
    "columns",
    "patches",
    "bounds",
    "midpoints",
    "zeros",
)  # styles of `factor_of`: ties and limits of a quantiser
PATCH, PATCH_SPREAD = (
    32,
    6,
)  # side of a patch without block scales; exponents of its scale are at most this
# earlier amaxes lie in [1, this]; payloads reach 2, so that some groups saturate and others lose a
# bit
MOST_SEEN = 3.0
OUTGROWN = (
    2.0**64
)  # with these scales all codes are 0; the product of two of them is finite, because kernels may take it first


# ---- cases


def recipe_of(case: Any) -> Recipe | None:
    if not case.scaling:
        return None
    recipe = RECIPES[case.scaling][case.variant]
    return replace(recipe, backward_override=case.override) if case.override and may_override(case.scaling) else recipe


def may_override(scaling: str) -> bool:
    """Whether recipes of this scaling take a backward_override."""
    return scaling not in ("", "delayed")


def other_override(override: str) -> str:
    """Another override, if one is set."""
    return override and next(word for word in OVERRIDES if word != override)


def transforms_rows(recipe: Recipe | None) -> bool:
    """Whether the weight gradient Hadamard-transforms the rows."""
    return recipe is not None and bool(recipe.hadamard) and recipe.backward_override is None


def rounds_gradients(recipe: Recipe | None) -> bool:
    """Whether a backward takes noise."""
    return recipe is not None and bool(recipe.stochastic_rounding) and recipe.backward_override is None


def fits(case: Any) -> bool:
    """Whether the reference accepts the call, and whether it quantises alike for every order of
    summation.
    """
    if case.values == "bounds" and case.dtype == "float64":
        return False  # neighbours in float64 are equal in float32
    transformed = transforms_rows(recipe_of(case)) and (
        case.function == "grouped_wgrad" or "weight" in case.grads.split("+")
    )
    return not transformed or (case.dtype == "bfloat16" and case.values in (*TRANSFORMED, "columns"))


def quantized_like(case: Any, role: str, columns: int) -> QuantizeCase:
    """The quantisation case of an operand; sizes are in units."""
    rows = {"tokens": case.tokens, "counts": case.counts, "tail": case.tail}
    sized: dict[str, Any] = rows if role != "weight" else {"tokens": case.experts * case.width}
    common = {name: getattr(case, name) for name in ("scaling", "variant", "experts", "dtype")}
    common["values"] = case.values if case.values in VALUES else "dyadic"  # `factor_of` makes the others
    seed = 3 * case.seed  # other seeds have a band of zeros, which often covers the whole tensor
    return QuantizeCase(function="quantize", role=role, hidden=columns, seed=seed, **common, **sized)


def factor_of(case: Any, name: str) -> Tensor:
    """[P,N] rows, [P,M] cotangents, or [L,M,N] weights.

    rows, columns  dyadic, times a power of two per row or column: a scale across them is wrong
    patches        dyadic, times a power of two per patch, which has the size of a square block
    others         as in `x_of`
    """
    role, columns = {
        "rows": ("input", case.hidden),
        "weight": ("weight", case.hidden),
        "d_out": ("grad_output", case.width),
    }[name]
    like = quantized_like(case, role, columns)
    x = _spread_out(case, like, name) if case.values in ("rows", "columns", "patches") else x_of(like, name)
    return x.reshape(case.experts, case.unit * case.width, x.shape[1]) if name == "weight" else x


def _spread_out(case: Any, like: QuantizeCase, name: str) -> Tensor:
    shape = like.tokens * case.unit + like.tail, like.hidden * case.unit
    x = payload(case.seed, name, shape, case.dtype)
    if case.values != "patches":
        power = row_scales(case.seed, shape[0]) if case.values == "rows" else row_scales(case.seed, shape[1]).T
    else:
        side = BLOCK.get(case.scaling, PATCH)
        patch_rows, patch_columns = (-(-n // side) for n in shape)
        powers = torch.from_numpy(
            np.exp2(
                hashed(case.seed, f"{name} patches", patch_rows * patch_columns) % (2 * PATCH_SPREAD + 1)
                - float(PATCH_SPREAD)
            )
        )
        power = (
            powers.reshape(patch_rows, patch_columns)
            .repeat_interleave(side, 0)
            .repeat_interleave(side, 1)[: shape[0], : shape[1]]
        )
    return (x.double() * power).to(x.dtype)


def recipe_settings(case: Any) -> dict[str, Any]:
    """The recipe, and noise if gradients are rounded stochastically."""
    recipe = recipe_of(case)
    if recipe is None:
        return {}
    random = rounds_gradients(recipe) and (case.function in ("grouped_dgrad", "grouped_wgrad") or case.grads)
    return {"recipe": recipe} | ({"noise": noise_of(quantized_like(case, "grad_output", case.width))} if random else {})


def state_tensors(case: Any, prefix: str = "state") -> dict[str, Tensor]:
    """The state of delayed scaling per role and expert, by name; empty for other scalings."""
    recipe = recipe_of(case)
    if recipe is None or recipe.scaling != "delayed":
        return {}
    tensors: dict[str, Tensor] = {}
    for role in ROLES:
        largest = scheme(recipe, role).format.max
        noise = hashed(
            case.seed, f"{role} seen{prefix.removeprefix('state')}", case.experts * (recipe.amax_history_len or 1)
        ).reshape(case.experts, -1)
        amax_history = torch.from_numpy(1 + (MOST_SEEN - 1) * (noise % 1000 / 1000)).float()
        last_amax = {"midpoints": largest, "outgrown": OUTGROWN}.get(case.values)
        last = amax_history[:, -1] if last_amax is None else torch.full((case.experts,), last_amax)
        tensors |= {
            f"{prefix}.{role}.amax_history": amax_history,
            f"{prefix}.{role}.scale": torch.full_like(last, largest * 2.0 ** -(recipe.margin or 0)) / last,
        }
    return tensors


def state_from(tensors: Mapping[str, Any], prefix: str = "state") -> LinearState | None:
    """The state of these tensors; None without them."""
    if f"{prefix}.input.scale" not in tensors:
        return None
    return LinearState(
        *(QuantizerState(tensors[f"{prefix}.{role}.amax_history"], tensors[f"{prefix}.{role}.scale"]) for role in ROLES)
    )


def script_of(
    function: str, arguments: tuple[str, ...], settings: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """The call, with the state built from its tensors."""

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        keywords = {name: tensors[name] for name in settings if name in tensors} | {"state": state_from(tensors)}
        return named_outputs(implementation.call(function, *(tensors[name] for name in arguments), **keywords), outputs)

    return script
