"""Recipes of `moe_ref` as recipes of Transformer Engine, and the sides that its FP8 GEMMs take.

`transformer_engine.common.recipe`, entered by `autocast`, or by `fp8_autocast` before 2.9. Options
that no constructor has are set where the quantisers read them: powers of two and the least amax in
the recipe's QParams, scales of delayed scaling in the module's `fp8_meta`.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.peers.te.features import Features, found
from conformance.peers.te.trace import Trace
from moe_ref.config import LinearState, Recipe, check_state, require
from moe_ref.config.quantization import BLOCK, WHOLE_BLOCKS

CLASS = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
SIDES = 16  # columns and rows of an FP8 GEMM are multiples of it
PARAMETERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")  # of a recipe


def lacking(features: Features, recipe: Recipe) -> str | None:
    """The feature without which the release cannot run this recipe, or None."""
    wanted = {
        recipe.scaling: True,
        "grouped_recipes": recipe.scaling != "delayed",
        "quantizer_parameters": recipe.scaling in ("current", "block"),
        "backward_override": recipe.backward_override is not None,
        "mxfp8_square": recipe.scaling == "mxfp8" and bool(recipe.two_dimensional_weights),
        "nvfp4_row_scaled": bool(recipe.row_scaled_activation),
        "nvfp4_four_over_six": recipe.four_over_six not in (None, "none"),
    }
    return next((name for name, needed in wanted.items() if needed and not features[name]), None)


def theirs(features: Features, trace: Trace, recipe: Recipe) -> Any:
    """The recipe of Transformer Engine."""
    words: dict[str, Any] = {}
    if recipe.scaling != "nvfp4":
        words["fp8_format"] = getattr(found(features.te, "common.recipe.Format"), str(recipe.fp8_format).upper())
    if recipe.scaling == "delayed":
        words |= {"margin": recipe.margin, "amax_history_len": recipe.amax_history_len, "reduce_amax": False}
        words["amax_compute_algo"] = recipe.amax_compute_algo
    if recipe.scaling == "block":
        words["w_block_scaling_dim"] = 2 if recipe.two_dimensional_weights else 1
    if recipe.scaling == "mxfp8" and recipe.two_dimensional_weights:
        words["enable_2d_quantization"] = True
    if recipe.scaling == "nvfp4":
        words |= _nvfp4(recipe)
    if recipe.backward_override is not None:
        words["backward_override"] = recipe.backward_override
    trace.step(CLASS[recipe.scaling])
    te_recipe = features.get(recipe.scaling)(**words)
    if recipe.scaling in ("current", "block"):
        trace.step("QParams")
        parameters = features.get("quantizer_parameters")(
            power_2_scale=recipe.power_of_two_scales, amax_epsilon=recipe.amax_epsilon
        )
        for name in PARAMETERS:
            setattr(te_recipe, name, parameters)
    return te_recipe


def _nvfp4(recipe: Recipe) -> dict[str, Any]:
    words: dict[str, Any] = {
        "disable_rht": not recipe.hadamard,
        "disable_stochastic_rounding": not recipe.stochastic_rounding,
        "disable_2d_quantization": not recipe.two_dimensional_weights,
    }
    if recipe.row_scaled_activation:
        words["row_scaled_activation"] = True
    if recipe.four_over_six != "none":
        words["nvfp4_4over6"] = recipe.four_over_six
        words["nvfp4_4over6_e4m3_use_256"] = recipe.four_over_six_bound_256
        words["nvfp4_4over6_err_mode"] = str(recipe.four_over_six_error).upper()
    return words


def autocast(features: Features, trace: Trace, recipe: Any) -> AbstractContextManager[Any]:
    """The context in which modules quantise by a recipe of Transformer Engine."""
    name, word = ("autocast", "recipe") if features["autocast"] else ("fp8_autocast", "fp8_recipe")
    trace.step(name)
    entered: AbstractContextManager[Any] = features.get(name)(enabled=True, **{word: recipe})
    return entered


def check_blocks(recipe: Recipe, weight: Tensor, counts: list[int]) -> None:
    """Whole blocks of MXFP8 and NVFP4, in both directions."""
    if recipe.scaling not in WHOLE_BLOCKS:
        return
    block, expected = BLOCK[recipe.scaling], f"multiples of {BLOCK[recipe.scaling]} for {recipe.scaling}"
    require(all(n % block == 0 for n in weight.shape[1:]), "weight", f"of shape {tuple(weight.shape)}", expected)
    require(all(n % block == 0 for n in counts), "tokens_per_expert", counts, expected)


def check_states(recipe: Recipe, state: LinearState | None, num_experts: int) -> None:
    """A state of delayed scaling for each of the three tensors, a row per expert."""
    for quantizer_state in state or (None,):
        check_state(recipe, quantizer_state, num_experts)


def set_scales(module: Any, state: LinearState) -> None:
    """Delayed scaling's scales, where the module's quantisers read them; inside `autocast`."""
    num_experts = len(state.input.scale)
    module.init_fp8_metadata(num_gemms=num_experts)
    for key, quantizer_states in {
        "scaling_fwd": (state.input, state.weight),
        "scaling_bwd": (state.grad_output,),
    }.items():
        meta = module.fp8_meta[key]
        for index, quantizer_state in enumerate(quantizer_states):
            meta.scale.view(num_experts, -1)[:, index].copy_(quantizer_state.scale)
        if hasattr(meta, "scale_inv"):  # before 2.0 modules read both
            meta.scale_inv.copy_(1 / meta.scale)


def in_sides(x: Tensor, *axes: int) -> Tensor:
    """Zeros after the ends of these axes, up to multiples of SIDES: they change no amax, no sum."""
    missing = [-x.shape[axis] % SIDES if axis in axes else 0 for axis in range(x.dim())]
    return pad(x, [n for axis in reversed(range(x.dim())) for n in (0, missing[axis])]) if any(missing) else x


def differs(rows: Tensor, settings: dict[str, Any]) -> str | None:
    """Why a call with a recipe is not the one that Transformer Engine would make, or None."""
    recipe: Recipe = settings["recipe"]
    if rows.dtype == torch.float32 and settings.get("bias") is not None:
        return f"grouped_linear of float32 with a bias under {recipe.scaling}: it rounds the bias to bfloat16"
    return None
