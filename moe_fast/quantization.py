"""quantize, fused: codes and scales of every group from one pass over x, without asking the device how long the groups are.

Current scaling and NVFP4 take two: their scales need the maximum of the whole group. Both directions are made from the same load.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_fast import tuning
from moe_fast.backend import INTERPRETED, check_device, launch_on
from moe_fast.kernels import group_scales
from moe_fast.kernels import quantization as kernels
from moe_fast.quantized import RULES, Form, Grid, Quantized, grid_of, strided
from moe_fast.routing import EXACT, number_bits
from moe_fast.tuning import ceil_div, power_of_two
from moe_ref.config import Quantization, QuantizerState, Recipe, check_quantize, check_role, check_splits, check_state, is_count, require
from moe_ref.config.recipes import BLOCK

FLOAT32_MAX = torch.finfo(torch.float32).max
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}  # OCP OFP8 1.0


def quantize(
    x_MN: Tensor,
    recipe: Recipe,
    *,
    role: str = "input",
    splits: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
    noise: Tensor | None = None,
) -> Quantization:
    """Quantise each group of rows by itself.

        for each group, direction and block:  scale = rule(max |x| over the block),  code = encode(x · scale)

    Rules, blocks and every corner are those of `moe_ref.quantization.quantize`, and so is every bit. The splits are read by the kernels
    alone: the device is never waited for, and where their values are illegal the result is unspecified.

    Args:
        x_MN: float64, float32, bfloat16 or float16, of any strides. float64 is rounded to float32 first.
        splits: [G] integers, rows of each group; None: all rows are one group.
        state: delayed scaling's, of G groups; it stays as it was, and what is returned is new.
        noise: None: nothing is rounded stochastically here.

    Returns:
        `Quantization`. The gradient of `dequantize(quantize(x))` is straight through; 0 for rows behind the last group.

    Rounding: that of the reference, each operation once in float32.

    Raises:
        ValueError: see `moe_ref.config.check_quantize`; also for what `check_recipe` refuses.

    Source: `tex.quantize`, `tex.split_quantize` and `tex.group_quantize`.
    """
    check_quantize(x_MN, recipe, role, splits, rowwise, columnwise, state, noise)
    check_recipe(recipe, role, columnwise)
    check_device("x", x_MN)
    if splits is None:
        check_splits([len(x_MN)], len(x_MN), recipe)
    else:
        splits = splits.to(x_MN.device, non_blocking=True)
    x = x_MN.detach().resolve_neg()  # a kernel sees memory, not a pending minus
    square = recipe.scaling in BLOCK and role == "weight" and bool(recipe.two_dimensional_weights)
    format = "e2m1" if recipe.scaling == "nvfp4" else "e5m2" if recipe.fp8_format == "hybrid" and role == "grad_output" else "e4m3"
    if recipe.scaling in BLOCK:
        by_rows, by_columns = _quantize_blocks(x, recipe, format, splits, square, rowwise or square, columnwise and not square)
        by_columns = by_rows if square else by_columns
    else:
        by_rows, state = _cast_groups(x, recipe, format, splits, state)
        by_columns = by_rows
    source = _Place.apply(x_MN, splits) if x_MN.requires_grad else None
    quantized = Quantized(recipe, format, x.dtype, splits, source, by_rows if rowwise else None, by_columns if columnwise else None)
    return Quantization(quantized, state)


def check_recipe(recipe: Recipe, role: str, columnwise: bool) -> None:
    """Whether these kernels quantise by it.

    Raises:
        ValueError: NVFP4 with a Hadamard transform, stochastic rounding, row scaling or four-over-six, where the role takes part in it.
    """
    transformed = bool(recipe.hadamard) and role != "weight" and columnwise
    require(not transformed, "recipe", "with hadamard, columnwise", "without: these kernels do not transform")
    stochastic = bool(recipe.stochastic_rounding) and role == "grad_output"
    require(not stochastic, "recipe", "with stochastic_rounding, of gradients", "without: these kernels round to nearest")
    require(not (recipe.row_scaled_activation and role == "input"), "recipe", "with row_scaled_activation", "without: these kernels scale groups")
    scopes = {"input": ("activations", "all"), "weight": ("weights", "all")}.get(role, ())
    require(recipe.four_over_six not in scopes, "recipe", f"with four_over_six {recipe.four_over_six!r}", "without: these kernels map to 6")


def _quantize_blocks(
    x: Tensor, recipe: Recipe, format: str, splits: Tensor | None, square: bool, rowwise: bool, columnwise: bool
) -> tuple[Form | None, Form | None]:
    """A scale for each block, by rows (or of squares) and by columns."""
    size, rule = BLOCK[recipe.scaling], RULES[recipe.scaling]
    sizes = tuning.for_device(x.device).quantize
    tall = square or columnwise  # blocks span rows
    walk = sizes.columns if tall else sizes.rows
    aligned = rule == "nvfp4" or (rule == "amax" and tall)  # whole groups of MXFP8 consist of whole blocks, wherever x is cut
    grid = grid_of(x.shape, splits, walk, aligned, (size if tall else 1, size), size if rule == "amax" and tall else None)
    group_amax = _group_amax(x, splits).view(torch.float32) if rule == "nvfp4" else None
    by_rows = _blank(x, rule, (size if square else 1, size), grid, group_amax) if rowwise else None
    by_columns = _blank(x, rule, (size, 1), grid, group_amax) if columnwise else None
    infinity = torch.finfo(x.dtype).max if x.dtype != torch.float64 else FLOAT32_MAX
    if grid.programs:
        with launch_on(x):
            kernels.quantize_blocks_kernel[(grid.programs,)](
                x,
                *x.stride(),
                *strided(splits),
                group_amax,
                *_results(by_rows, group_amax is None),
                *_results(by_columns, group_amax is None),
                *x.shape,
                *grid.sizes,
                number_bits(recipe.amax_epsilon or 0.0),
                number_bits(infinity),
                RULE=rule,
                FORMAT=format,
                POWER_OF_TWO=bool(recipe.power_of_two_scales),
                HARDWARE=casts_in_hardware(x.device),
                ALIGNED=aligned,
                BLOCK=size,
                SQUARE=square,
                **grid.settings,
                **EXACT,
            )
    return by_rows, by_columns


def _blank(x: Tensor, rule: str, block: tuple[int, int], grid: Grid, group_amax: Tensor | None) -> Form:
    """A form whose codes are all written by quantize_blocks_kernel, and whose scales are as far as there are blocks."""
    rows = grid.tiles if rule == "amax" and block[0] > 1 else ceil_div(len(x), block[0])
    columns = ceil_div(x.shape[1], block[1])
    turned = rule == "amax" and block[0] == 1  # neighbouring rows beside each other, as matrix products read them

    def blocks(dtype: torch.dtype) -> Tensor:
        return torch.empty((columns, rows), dtype=dtype, device=x.device).T if turned else torch.empty((rows, columns), dtype=dtype, device=x.device)

    scale = blocks(torch.float32 if rule == "amax" else torch.uint8)
    amax = blocks(torch.float32 if x.dtype == torch.float64 else x.dtype) if group_amax is None else group_amax
    return Form(torch.empty(x.shape, dtype=torch.uint8, device=x.device), scale, amax, block)


def _results(form: Form | None, with_amax: bool) -> tuple[Any, ...]:
    """A form as the kernel takes it."""
    return (None, None, None, 0, 0) if form is None else (form.codes_MN, form.scale, form.amax if with_amax else None, *form.scale.stride())


def _group_amax(x: Tensor, splits: Tensor | None) -> Tensor:
    """[G] max |x|, as the bits of float32."""
    grid = grid_of(x.shape, splits, tuning.for_device(x.device).quantize.groups, True)
    amax = torch.zeros(grid.groups, dtype=torch.int32, device=x.device)
    if grid.programs:
        with launch_on(x):
            group_scales.group_amax_kernel[(grid.programs,)](x, *x.stride(), *strided(splits), amax, *x.shape, *grid.sizes, **grid.settings)
    return amax


def _cast_groups(x: Tensor, recipe: Recipe, format: str, splits: Tensor | None, state: QuantizerState | None) -> tuple[Form, QuantizerState | None]:
    """A scale for each group: of earlier steps if there is a state, which learns this one's amax, else from the amax."""
    grid = grid_of(x.shape, splits, tuning.for_device(x.device).quantize.groups, True)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)  # all by cast_groups_kernel
    inverse = torch.empty(grid.groups, device=x.device)  # likewise, by its first program
    given = history = None
    if state is None:
        amax = _group_amax(x, splits)
    else:
        given, history = state.scale, state.amax_history.clone()
        amax = torch.zeros(grid.groups, dtype=torch.int32, device=x.device)
        state = QuantizerState(history, given)
    with launch_on(x):
        group_scales.cast_groups_kernel[(max(grid.programs, 1),)](
            x,
            *x.stride(),
            *strided(splits),
            *strided(given),
            amax,
            None if history is None else history.view(torch.int32),
            0 if history is None else history.stride(0),
            codes,
            inverse,
            *x.shape,
            *grid.sizes,
            number_bits(recipe.amax_epsilon or 0.0),
            FORMAT=format,
            POWER_OF_TWO=bool(recipe.power_of_two_scales),
            HARDWARE=casts_in_hardware(x.device),
            **grid.settings,
            **EXACT,
        )
    return Form(codes, inverse, amax.view(torch.float32), None), state


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device's own conversions make the codes: rounded, saturated and with NaN as here, from NVIDIA's Ada on."""
    return not INTERPRETED and device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


class _Place(torch.autograd.Function):
    """Where x stands in the graph: a tensor of its shape that is never read. Rows behind the last group have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor | None) -> Tensor:
        ctx.splits = splits  # not saved: both directions may be gone through, one after the other
        return x.new_empty(()).expand(x.shape)  # by nobody: it has no values

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        if ctx.splits is None:
            return d_x, None
        owned = torch.arange(len(d_x), device=d_x.device) < ctx.splits.sum()
        return torch.where(owned[:, None], d_x, 0), None


# --- the memory of delayed scaling


def new_quantizer_state(recipe: Recipe, *, num_groups: int = 1, device: torch.device | str | None = None) -> QuantizerState | None:
    """The state before the first step: no amax seen, scales of 1; None for a recipe without memory.

    Source: DelayedScalingRecipeState.
    """
    require(is_count(num_groups) and num_groups >= 1, "num_groups", num_groups, "a positive integer")
    if recipe.scaling != "delayed":
        return None
    assert recipe.amax_history_len is not None
    return QuantizerState(torch.zeros(num_groups, recipe.amax_history_len, device=device), torch.ones(num_groups, device=device))


def update_scales(state: QuantizerState, recipe: Recipe, *, role: str = "input", reduced_amax: Tensor | None = None) -> QuantizerState:
    """The state of the next step, for each group:

        last = reduced_amax if that was given and is not 0, else history[0]
        A = max(last, history[1:]), or last for "most_recent"
        scale = FMAX · 2^-margin / A if A is finite and above 0, the largest float32 where that overflows; else as it was
        history = [0, history[2], …, history[L-1], last]        if last is not 0; else as it was, and A = 0

    Args:
        role: of the tensor; grad_output has another FMAX under hybrid.
        reduced_amax: [G], the maximum over the ranks that share the scale.

    Rounding: the division, once.

    Raises:
        ValueError: a state that is not this recipe's, or a reduced_amax of another shape.

    Source: kernel_bulk of delayed_scaling.cu.
    """
    require(recipe.scaling == "delayed", "recipe", f"of scaling {recipe.scaling!r}", "delayed: only that has a state")
    check_state(recipe, state, len(state.scale))
    if reduced_amax is not None:
        shape = tuple(reduced_amax.shape)
        require(shape == tuple(state.scale.shape), "reduced_amax", f"of shape {shape}", f"of shape {tuple(state.scale.shape)}")
    check_role(role)
    check_device("state", state.scale)
    assert recipe.margin is not None
    groups, length = state.amax_history.shape
    history = torch.empty((groups, length), device=state.scale.device)  # all by update_scales_kernel
    scale = torch.empty(groups, device=state.scale.device)  # likewise
    largest = FORMAT_MAX["e5m2" if recipe.fp8_format == "hybrid" and role == "grad_output" else "e4m3"] * 2.0**-recipe.margin
    if groups:
        with launch_on(scale):
            group_scales.update_scales_kernel[(groups,)](
                state.amax_history,
                *state.amax_history.stride(),
                *strided(state.scale),
                *strided(reduced_amax),
                history,
                scale,
                length,
                number_bits(largest),
                MOST_RECENT=recipe.amax_compute_algo == "most_recent",
                BLOCK_L=power_of_two(length),
                **EXACT,
            )
    return QuantizerState(history, scale)
