"""Low-precision recipes: settings, results, and the rules that make a call illegal.

Words and defaults come from transformer_engine/common/recipe (2.20.2). One class covers all
scalings: an option that a scaling does not have is None, and giving it is an error. Differs:
docs/differences.md#quantization.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config.rules import check_choice, is_count, is_number, require, require_dtype, require_shape

SCALINGS = ("delayed", "current", "block", "mxfp8", "nvfp4")
FP8_FORMATS = ("e4m3", "hybrid")  # hybrid: gradients in E5M2
AMAX_ALGORITHMS = ("max", "most_recent")
SCOPES = ("none", "weights", "activations", "all")
ERRORS = ("mae", "mse")
OVERRIDES = ("high_precision", "dequantized")
ROLES = ("input", "weight", "grad_output")
GEMMS = ("fprop", "dgrad", "wgrad")
SCALE_LAYOUTS = ("compact", "gemm")

DEFAULTS: dict[str, dict[str, Any]] = {
    "delayed": {  # DelayedScaling
        "fp8_format": "hybrid",
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    },
    "current": {  # Float8CurrentScaling
        "fp8_format": "hybrid",
        "power_of_two_scales": False,
        "amax_epsilon": 0.0,
        "backward_override": None,
    },
    "block": {  # Float8BlockScaling
        "fp8_format": "e4m3",
        "power_of_two_scales": True,
        "two_dimensional_weights": True,
        "amax_epsilon": 0.0,
        "backward_override": None,
    },
    "mxfp8": {"fp8_format": "e4m3", "two_dimensional_weights": False, "backward_override": None},  # MXFP8BlockScaling
    "nvfp4": {  # NVFP4BlockScaling
        "backward_override": None,
        "two_dimensional_weights": True,
        "hadamard": True,
        "stochastic_rounding": True,
        "row_scaled_activation": False,
        "four_over_six": "none",
        "four_over_six_bound_256": "all",
        "four_over_six_error": "mae",
    },
}
BLOCK = {"block": 128, "mxfp8": 32, "nvfp4": 16}  # elements that share a scale, along the contraction
WHOLE_BLOCKS = ("mxfp8", "nvfp4")  # both dimensions, and each group's rows, must be multiples of the block
MAX_MARGIN = 64  # 448 · 2^-64 is far from float32's edges


@dataclass(frozen=True)
class Recipe:
    """A scaling and its options; None means the default of that scaling in DEFAULTS.

    Raises:
        ValueError: naming the option, its value and what would be right.
    """

    scaling: str
    fp8_format: str | None = None
    margin: int | None = None  # delayed: scales are 2^-margin of what would just fit
    amax_history_len: int | None = None  # L, steps that are remembered
    amax_compute_algo: str | None = None
    power_of_two_scales: bool | None = None
    amax_epsilon: float | None = None  # the least amax
    two_dimensional_weights: bool | None = None  # square blocks for weights: the same values in both directions
    hadamard: bool | None = None  # 16-point transform along tokens of columnwise inputs and gradients
    stochastic_rounding: bool | None = None  # of gradients
    row_scaled_activation: bool | None = None  # inputs: a global amax for each row
    four_over_six: str | None = None  # scope in which a block's largest value becomes 4 or 6, whichever errs less
    four_over_six_bound_256: str | None = None  # scope in which its block scales are bounded by 256, not by 448
    four_over_six_error: str | None = None
    backward_override: str | None = None  # operands of the backward instead of codes: see `recipes.operands`

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, SCALINGS)
        defaults = DEFAULTS[self.scaling]
        for option in OPTIONS:
            if getattr(self, option) is None:
                object.__setattr__(self, option, defaults.get(option))
            else:
                owners = ", ".join(scaling for scaling in SCALINGS if option in DEFAULTS[scaling])
                legal = option in defaults
                requirement = f"left out: it belongs to {owners}"
                require(legal, option, f"{getattr(self, option)!r} with scaling {self.scaling!r}", requirement)
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        """Each option by itself."""
        words: dict[str, tuple[str, ...]] = {
            "fp8_format": FP8_FORMATS,
            "amax_compute_algo": AMAX_ALGORITHMS,
            "four_over_six_error": ERRORS,
        }
        words |= dict.fromkeys(("four_over_six", "four_over_six_bound_256"), SCOPES)
        words["backward_override"] = OVERRIDES
        for option, choices in words.items():
            value = getattr(self, option)
            require(value is None or value in choices, option, repr(value), f"one of {', '.join(choices)}")
        for option in (
            "power_of_two_scales",
            "two_dimensional_weights",
            "hadamard",
            "stochastic_rounding",
            "row_scaled_activation",
        ):
            value = getattr(self, option)
            require(value is None or isinstance(value, bool), option, repr(value), "True or False")
        margin, length, epsilon = self.margin, self.amax_history_len, self.amax_epsilon
        requirement = f"an integer from 0 to {MAX_MARGIN}"
        require(margin is None or (is_count(margin) and 0 <= margin <= MAX_MARGIN), "margin", margin, requirement)
        require(length is None or (is_count(length) and length >= 1), "amax_history_len", length, "a positive integer")
        require(epsilon is None or (is_number(epsilon) and epsilon >= 0), "amax_epsilon", epsilon, "a number ≥ 0")

    def _check_combinations(self) -> None:
        """What NVFP4's kernels cannot do at once."""
        activations = self.four_over_six in ("activations", "all")
        value = f"{self.four_over_six!r} with hadamard True"
        requirement = "none or weights, or hadamard False: activations are not transformed"
        require(not (activations and self.hadamard), "four_over_six", value, requirement)
        value = "True with hadamard True"
        requirement = "False, or hadamard False"
        require(not (self.row_scaled_activation and self.hadamard), "row_scaled_activation", value, requirement)

    @property
    def alignment(self) -> int:
        """The multiple to which each expert's rows are padded. Source: TE
        get_align_size_for_quantization.
        """
        return {"mxfp8": 32, "nvfp4": 128}.get(self.scaling, 16)


OPTIONS = tuple(field.name for field in fields(Recipe) if field.name != "scaling")


class QuantizerState(NamedTuple):
    """What delayed scaling remembers of one tensor. Column 0 of the history is the step that is
    running.
    """

    amax_history: Tensor  # [G,L] float32
    scale: Tensor  # [G] float32, what values are multiplied by


class Quantization(NamedTuple):
    """What `quantize` returns."""

    quantized: Any  # opaque: for `codes`, `scales`, `amax` and `dequantize` of the same implementation
    state: QuantizerState | None  # the next state; None but for delayed scaling


class Operand(NamedTuple):
    """One factor of a matrix product: which tensor, and which of its quantised forms, if any."""

    role: str
    columnwise: bool
    kept: str = "codes"  # or "dequantized": the codes' values in the tensor's dtype; or "stored": the tensor


def check_role(role: str) -> None:
    """One of ROLES."""
    check_choice("role", role, ROLES)


def check_quantize(
    x: Tensor, recipe: Recipe, role: str, splits: Tensor | None, rowwise: bool, columnwise: bool,
    state: QuantizerState | None, noise: Tensor | None,
) -> None:  # fmt: skip
    """The rules of `quantize` that do not read the device."""
    require(isinstance(recipe, Recipe), "recipe", repr(recipe), "a Recipe")
    check_role(role)
    require_shape(x.dim() == 2, "x", x, "[rows, columns]")
    legal = x.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    require_dtype(legal, "x", x, "float64, float32, bfloat16 or float16")
    require(rowwise or columnwise, "rowwise", "False with columnwise False", "True, or columnwise True")
    if splits is not None:
        require_shape(splits.dim() == 1 and len(splits) > 0, "splits", splits, "[groups], at least one")
        require_dtype(splits.dtype in (torch.int32, torch.int64), "splits", splits, "int32 or int64")
    groups = 1 if splits is None else len(splits)
    if recipe.scaling in WHOLE_BLOCKS:
        block = BLOCK[recipe.scaling]
        require_shape(x.shape[1] % block == 0, "x", x, f"of a multiple of {block} columns for {recipe.scaling}")
    check_state(recipe, state, groups)
    _check_nvfp4(x, recipe, role, columnwise, noise)


def check_state(recipe: Recipe, state: QuantizerState | None, groups: int) -> None:
    """Delayed scaling has a state, a row per group; no other scaling has one."""
    if recipe.scaling != "delayed":
        require(state is None, "state", "given", f"None for {recipe.scaling}: it remembers nothing")
        return
    require(state is not None, "state", None, "given for delayed scaling: see new_quantizer_state")
    assert state is not None
    history, scale = tuple(state.amax_history.shape), tuple(state.scale.shape)
    shape = (groups, recipe.amax_history_len)
    requirement = f"of shape {shape}: groups, amax_history_len"
    require(history == shape, "state", f"with amax_history of shape {history}", requirement)
    require(scale == shape[:1], "state", f"with scale of shape {scale}", f"of shape {shape[:1]}")
    legal = state.amax_history.dtype == state.scale.dtype == torch.float32
    require(legal, "state", f"of dtypes {state.amax_history.dtype}, {state.scale.dtype}", "float32")


def _check_nvfp4(x: Tensor, recipe: Recipe, role: str, columnwise: bool, noise: Tensor | None) -> None:
    """Where the Hadamard transform, row scaling and stochastic rounding may be."""
    transformed = bool(recipe.hadamard) and role != "weight" and columnwise
    requirement = "bfloat16 where the Hadamard transform is taken: columnwise"
    require_dtype(not transformed or x.dtype == torch.bfloat16, "x", x, requirement)
    both = recipe.row_scaled_activation and recipe.four_over_six in ("activations", "all") and role == "input"
    require(not (both and columnwise), "columnwise", "True for a row-scaled input with four_over_six", "False")
    wanted = bool(recipe.stochastic_rounding) and role == "grad_output"
    if not wanted:
        require(noise is None, "noise", "given", f"None: {role} with {recipe.scaling} is not rounded stochastically")
        return
    if noise is None:
        return  # `quantize` draws it
    shape = (2, *x.shape)
    require_shape(tuple(noise.shape) == shape, "noise", noise, f"of shape {shape}: rowwise, columnwise")
    require_dtype(noise.is_floating_point(), "noise", noise, "floating point")


def check_splits(sizes: list[int], rows: int, recipe: Recipe) -> None:
    """The rules of `splits` that need its values."""
    require(all(size >= 0 for size in sizes), "splits", sizes, "all ≥ 0")
    require(sum(sizes) <= rows, "splits", f"{sizes}, together {sum(sizes)}", f"at most the {rows} rows together")
    if recipe.scaling in WHOLE_BLOCKS:
        block = BLOCK[recipe.scaling]
        requirement = f"multiples of {block} for {recipe.scaling} (without splits: x's rows)"
        require(all(size % block == 0 for size in sizes), "splits", sizes, requirement)
