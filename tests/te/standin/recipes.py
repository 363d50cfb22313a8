"""Transformer Engine's recipes and the context that a grouped linear layer reads them from."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

from moe_ref.config import Recipe


class Format(Enum):
    """Formats by the largest values of the forward and of the backward."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)


class Recipes:
    """The recipes of one release, with the newest names of their options; and the one in use."""

    def __init__(self) -> None:
        self.entered: Any = None

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any) -> Iterator[None]:
        """Modules quantise by the recipe."""
        outer_recipe, self.entered = self.entered, recipe if enabled else None
        try:
            yield
        finally:
            self.entered = outer_recipe

    def fp8_autocast(self, enabled: bool, fp8_recipe: Any) -> Any:
        """The older name."""
        return self.autocast(enabled, fp8_recipe)

    def QParams(self, power_2_scale: bool, amax_epsilon: float) -> SimpleNamespace:
        """The rule of a quantiser's scales."""
        return SimpleNamespace(power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)

    def DelayedScaling(
        self, margin: int, fp8_format: Any, amax_history_len: int, amax_compute_algo: str
    ) -> SimpleNamespace:
        """Scales of earlier steps."""
        options = {"margin": margin, "amax_history_len": amax_history_len, "amax_compute_algo": amax_compute_algo}
        return SimpleNamespace(scaling="delayed", options=_formatted(fp8_format) | options)

    def Float8CurrentScaling(self, fp8_format: Any, backward_override: Any = None) -> SimpleNamespace:
        """A scale per tensor."""
        return self._scaled("current", False, _formatted(fp8_format), backward_override)

    def Float8BlockScaling(
        self, fp8_format: Any, w_block_scaling_dim: int, backward_override: Any = None
    ) -> SimpleNamespace:
        """A scale per 128, or per 128 by 128."""
        options = _formatted(fp8_format) | {"two_dimensional_weights": w_block_scaling_dim == 2}
        return self._scaled("block", True, options, backward_override)

    def _scaled(self, scaling: str, power_2: bool, options: dict[str, Any], override: Any) -> SimpleNamespace:
        rules = dict.fromkeys(
            ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), self.QParams(power_2, 0.0)
        )
        return SimpleNamespace(scaling=scaling, options=options | {"backward_override": override}, **rules)

    def MXFP8BlockScaling(
        self, fp8_format: Any, backward_override: Any = None, enable_2d_quantization: bool = False
    ) -> SimpleNamespace:
        """A power of two per 32."""
        options = {"backward_override": backward_override, "two_dimensional_weights": enable_2d_quantization}
        return SimpleNamespace(scaling="mxfp8", options=_formatted(fp8_format) | options)

    def NVFP4BlockScaling(
        self, disable_rht: bool, disable_stochastic_rounding: bool, disable_2d_quantization: bool,
        row_scaled_activation: bool = False, nvfp4_4over6: str = "none", nvfp4_4over6_e4m3_use_256: str = "all",
        nvfp4_4over6_err_mode: str = "MAE", backward_override: Any = None,
    ) -> SimpleNamespace:  # fmt: skip
        """A scale per 16 within a scale per tensor."""
        options = {
            "hadamard": not disable_rht,
            "stochastic_rounding": not disable_stochastic_rounding,
            "two_dimensional_weights": not disable_2d_quantization,
            "row_scaled_activation": row_scaled_activation,
            "four_over_six": nvfp4_4over6,
            "four_over_six_bound_256": nvfp4_4over6_e4m3_use_256,
            "four_over_six_error": nvfp4_4over6_err_mode.lower(),
            "backward_override": backward_override,
        }
        return SimpleNamespace(scaling="nvfp4", options=options)


def _formatted(fp8_format: Format | None) -> dict[str, Any]:
    return {} if fp8_format is None else {"fp8_format": fp8_format.name.lower()}


def ours(recipe: SimpleNamespace) -> Recipe:
    """The recipe in the reference's words."""
    options = dict(recipe.options)
    if hasattr(recipe, "fp8_quant_fwd_inp"):
        rules = [recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad]
        if any(vars(rule) != vars(rules[0]) for rule in rules):
            raise ValueError("the three tensors have different rules; the reference has one")
        options |= {"power_of_two_scales": rules[0].power_2_scale, "amax_epsilon": rules[0].amax_epsilon}
    return Recipe(recipe.scaling, **options)
