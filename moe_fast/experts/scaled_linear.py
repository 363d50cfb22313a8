"""grouped_linear and its gradients in low precision: products of codes, scaled where it costs
least.

FP8 codes are multiplied by the GPU's matrix unit from NVIDIA's Ada on, and on older GPUs in
bfloat16, which is exact. Blocks of MXFP8 and NVFP4 have a matrix unit from Blackwell on. On other
GPUs they are emulated: codes times scales in bfloat16, which is exact for rows of bfloat16 and
float16; rows of float32 are multiplied in float32. (The native path compiles, but it has not run on
a Blackwell.)
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_fast.experts import _scaled_linear as kernels
from moe_fast.experts import hopper
from moe_fast.experts._factors import TILE_ROWS
from moe_fast.experts.activated import kept_rows, rows_of_kept
from moe_fast.experts.factors import (
    Precision,
    Product,
    quantized_rows,
    quantized_weight,
    tensors_of,
    with_tensors,
    without_tensors,
)
from moe_fast.experts.segments import Plan, copy_of, expert_slices, have_descriptors, make_plan, programs, segment_sums
from moe_fast.launch import tuning
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import INTERPRETED, casts_in_hardware, is_hopper, strided, strided_or_empty
from moe_fast.launch.descriptors import have_lines
from moe_fast.launch.operators import as_operators, has_memory, launch
from moe_fast.launch.tuning import Grouped, GroupedTile, ceil_div
from moe_fast.quantization.quantized import KERNEL_OF, Form, Quantized
from moe_ref.config import Recipe
from moe_ref.config.quantization import BLOCK, WHOLE_BLOCKS

HOPPER_BLOCKS = (((1, 128), (128, 128)), ((128, 1), (128, 1)))  # rows times matrices; the weight's gradient
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


# --- the products of quantised tensors


def scaled_plan(tokens_per_expert_L: Tensor, num_rows: int, recipe: Recipe) -> Plan:
    """The plan of the tiles of these products."""
    return make_plan(tokens_per_expert_L, num_rows, scaled_tile(tokens_per_expert_L), multiple_of(recipe))


def scaled_tile(like: Tensor) -> GroupedTile:
    """The tile of these products on the device of `like`."""
    return tuning.for_device(like.device).grouped.scaled


def multiple_of(recipe: Recipe) -> int:
    """The number of which each expert's number of rows must be a multiple, to be quantised."""
    return BLOCK[recipe.scaling] if recipe.scaling in WHOLE_BLOCKS else 1


def scaled_fprop(
    x: Quantized, weight: Quantized, plan: Plan, *, bias: Tensor | None = None, filled: bool = True
) -> Tensor:
    """x Wᵀ + b of each expert's rows, [P,M], in the dtype that x had before quantisation; past the
    last expert's rows 0, if `filled`.

    x has its form by rows, split by the plan's counts; weight, [L·M,N], has its form by rows, split
    into experts. Products of codes, times scales, are summed in float32 (on Hopper the matrix unit
    sums 128 products of FP8 codes with 14 bits first).
    """
    form = weight.form(False)
    matrices_LMN = form.codes_MN.unflatten(0, (plan.num_experts, form.codes_MN.shape[0] // plan.num_experts))
    return _multiply(x, Matrices(weight, form, matrices_LMN, False), bias, plan, filled)


def scaled_dgrad(d_out: Quantized, weight: Quantized, plan: Plan, *, filled: bool = True) -> Tensor:
    """d_out W of each expert's rows, [P,N], filled like the result of `scaled_fprop`. d_out has its
    form by rows, weight its form by columns.
    """
    form, experts = weight.form(True), plan.num_experts
    height, turned = d_out.form(False).codes_MN.shape[1], form.turned_NT
    if turned is None:
        counts = torch.full((experts,), height, device=form.codes_MN.device)
        turned = _turned(form, make_plan(counts, experts * height, plan.tile))
    width, length = turned.shape[0], turned.stride(0)
    matrices_LNM = turned.as_strided((experts, width, height), (ceil_div(height, TILE_ROWS) * TILE_ROWS, length, 1))
    return _multiply(d_out, Matrices(weight, form, matrices_LNM, True), None, plan, filled)


def scaled_wgrad(d_out: Quantized, x: Quantized, plan: Plan, *, accumulate_into: Tensor | None = None) -> Tensor:
    """d_outᵀ x of each expert's rows, [L,M,N], plus `accumulate_into`. Both factors have their
    forms by columns.
    """
    device, sizes = plan.total_2.device, tuning.for_device(plan.total_2.device).grouped
    d_out_form, x_form = d_out.form(True), x.form(True)
    turned = [_turned(form, plan) for form in (d_out_form, x_form)]
    shape = (plan.num_experts, turned[0].shape[0], turned[1].shape[0])
    # scaled_wgrad_kernel writes all of it
    out = torch.empty(shape, dtype=x.dtype if accumulate_into is None else accumulate_into.dtype, device=device)
    if out.numel() == 0 or not has_memory():
        return out
    unit = _unit(x, device)
    tile = unit.tile(sizes)
    codes = [
        _as_factor(turned_codes, quantized, unit) for turned_codes, quantized in zip(turned, (d_out, x), strict=True)
    ]
    described = have_descriptors(*codes)
    on_hopper = _on_hopper(unit, device, (d_out_form.block, x_form.block)) and have_lines(
        d_out_form.scale, x_form.scale
    )
    if described and accumulate_into is None and have_descriptors(out) and on_hopper:
        hopper.scaled_wgrad(codes[0], d_out_form.scale, codes[1], x_form.scale, plan, out)
        return out
    pieces = plan.num_experts * ceil_div(shape[1], tile.rows) * ceil_div(shape[2], tile.columns)
    launch(kernels.scaled_wgrad_kernel, (programs(pieces, device),), out)(
        codes[0],
        codes[0].stride(0),
        *_blocks(d_out_form),
        *_outer(d_out, d_out_form),
        codes[1],
        codes[1].stride(0),
        *_blocks(x_form),
        *_outer(x, x_form),
        *strided(accumulate_into, 3),
        out,
        *((TensorDescriptor.from_tensor(codes[0], [tile.rows, tile.depth]) if described else None),),
        *((TensorDescriptor.from_tensor(codes[1], [tile.columns, tile.depth]) if described else None),),
        plan.segment_3L,
        *shape,
        RULE=unit.rule,
        D_OUT_FORMAT=d_out.format,
        X_FORMAT=x.format,
        FACTOR=unit.factor,
        SCALED_BY_HARDWARE=unit.scales,
        SHARED_P=1 if x_form.block is None else x_form.block[0],
        **tile.blocks("M", "N", "P"),
    )
    return out


@dataclass(frozen=True)
class Matrices:
    """A quantised weight as a product reads it: its codes are contiguous along the depth."""

    quantized: Quantized
    form: Form
    codes_LCD: Tensor
    turned: bool  # the depth lies along the weight's outputs

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The scales, and their strides along experts, columns and depth."""
        if self.form.block is None:
            return None, 0, 0, 0
        height = self.codes_LCD.shape[2 if self.turned else 1]
        stride_m, stride_n = self.form.scale.stride()
        along = (stride_n, stride_m) if self.turned else (stride_m, stride_n)
        return self.form.scale, ceil_div(height, self.form.block[0]) * stride_m, *along

    @property
    def shared(self) -> tuple[int, int]:
        """(columns, depth) that share a scale."""
        block = self.form.block or (1, 1)
        return block[::-1] if self.turned else block


def _multiply(x: Quantized, weight: Matrices, bias_LC: Tensor | None, plan: Plan, filled: bool) -> Tensor:
    """out[p] = x[p] · weight[e] + bias[e] for each expert's rows p; past them 0 if filled."""
    form = x.form(False)
    device, sizes = form.codes_MN.device, tuning.for_device(form.codes_MN.device).grouped
    num_rows, depth, num_columns = *form.codes_MN.shape, weight.codes_LCD.shape[1]
    # by scaled_matmul_kernel: the tiles, and the rows past them
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=device)
    if out.numel() == 0 or not has_memory():
        return out
    unit = _unit(x, device)
    codes, matrices = _as_factor(form.codes_MN, x, unit), _as_factor(weight.codes_LCD, weight.quantized, unit)
    described = have_descriptors(codes, matrices)
    tile = unit.tile(sizes) if described else unit.tile(sizes).within(sizes.pointer_codes)
    if described and have_descriptors(out) and _on_hopper(unit, device, (form.block, weight.form.block)):
        assert x.splits is not None
        cut = plan.cut(hopper.rows_of_tile(num_rows, plan.num_experts), x.splits)
        hopper.scaled_matmul(codes, _blocks(form), matrices, weight.blocks, strided(bias_LC, 2), cut, out, filled)
        return out
    launch(kernels.scaled_matmul_kernel, (programs(plan.capacity * ceil_div(num_columns, tile.columns), device),), out)(
        codes,
        codes.stride(0),
        *_blocks(form),
        *_outer(x, form),
        matrices,
        *matrices.stride()[:2],
        *weight.blocks,
        *_weight_outer(weight),
        *((*strided(bias_LC, 2), None) if described else strided_or_empty(bias_LC, 2)),  # as in `linear`
        out,
        *((TensorDescriptor.from_tensor(codes, [tile.rows, tile.depth]) if described else None),),
        *((TensorDescriptor.from_tensor(matrices, [1, tile.columns, tile.depth]) if described else None),),
        expert_slices(out, [tile.rows, tile.columns]) if have_descriptors(out) else None,
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        num_rows if filled else 0,
        num_columns,
        depth,
        *weight.shared,
        RULE=unit.rule,
        X_FORMAT=x.format,
        WEIGHT_FORMAT=weight.quantized.format,
        FACTOR=unit.factor,
        SCALED_BY_HARDWARE=unit.scales,
        BIAS_AS=tl.float64 if bias_LC is not None and bias_LC.dtype == torch.float64 else tl.float32,
        **tile.blocks("P", "C", "D"),
    )
    return out


def _turned(form: Form, plan: Plan) -> Tensor:
    """Transposed codes, in which each expert's rows begin at a tile: the matrix unit reads FP8
    codes in no other layout.
    """
    if form.turned_NT is not None:
        return form.turned_NT
    codes_RC = form.codes_MN
    num_columns = codes_RC.shape[1]
    # turn_kernel writes as much of it as is read
    out = torch.empty((num_columns, plan.capacity * TILE_ROWS), dtype=torch.uint8, device=codes_RC.device)
    block = tuning.for_device(codes_RC.device).grouped.turn_columns
    launch(kernels.turn_kernel, (plan.capacity * ceil_div(num_columns, block),), out)(
        codes_RC,
        out,
        out.stride(0),
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        num_columns,
        BLOCK_C=block,
        num_warps=4,
    )
    return out


# --- what a form is for a kernel


class Unit(NamedTuple):
    """The arithmetic of a product."""

    rule: str
    factor: Any  # the dtype that codes are multiplied in; None: as they are
    scales: bool  # the matrix unit multiplies blocks by their scales

    def tile(self, sizes: Grouped) -> GroupedTile:
        """The tile of a product in this arithmetic."""
        if self.rule in ("group", "amax"):
            return sizes.scaled
        return sizes.decoded_wide if self.factor == tl.float32 and not self.scales else sizes.decoded


def _unit(x: Quantized, device: torch.device) -> Unit:
    rule = KERNEL_OF[x.recipe.scaling]
    if INTERPRETED:
        return Unit(rule, tl.float32, False)
    if rule in ("group", "amax"):
        return Unit(rule, None if casts_in_hardware(device) else tl.bfloat16, False)
    return Unit(rule, tl.float32 if x.dtype == torch.float32 else tl.bfloat16, scales_in_hardware(device))


def _on_hopper(unit: Unit, device: torch.device, blocks: tuple[Any, Any]) -> bool:
    """Whether `hopper` multiplies FP8 codes with scales of these blocks."""
    return is_hopper(device) and unit.rule == "amax" and unit.factor is None and blocks in HOPPER_BLOCKS


@cache
def scales_in_hardware(device: torch.device) -> bool:
    """Whether the matrix unit takes block scales: on NVIDIA's Blackwell for data centres."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 10


def _as_factor(codes: Tensor, quantized: Quantized, unit: Unit) -> Tensor:
    """Codes as float8 tensors where the matrix unit multiplies them."""
    return codes.view(FLOAT8[quantized.format]) if unit.factor is None else codes


def _blocks(form: Form) -> tuple[Any, ...]:
    """The scales of blocks and their strides, or placeholders if the scales belong to
    whole groups.
    """
    return (None, 0, 0) if form.block is None else (form.scale, *form.scale.stride())


def _outer(quantized: Quantized, form: Form) -> tuple[Any, ...]:
    """The factor of the sum as a kernel takes it: the scale or the amax, its strides by expert and
    row, and the share of the amax.
    """
    if form.block is None:
        return form.scale, form.scale.stride(0), 0, 1.0
    if quantized.recipe.scaling != "nvfp4":
        return None, 0, 0, 1.0
    strides = (0, *form.amax.stride()) if form.per == "row" else (*form.amax.stride(), 0)[:2]
    return form.amax, *strides, 1 / (6 * form.largest)  # E2M1's largest number times the largest scale


def _weight_outer(weight: Matrices) -> tuple[Any, ...]:
    """`_outer` of a weight, without the stride of a row."""
    scale, stride, _, share = _outer(weight.quantized, weight.form)
    return scale, stride, share


# --- the function of `moe_fast.experts.linear`, with a recipe


@as_operators
class ScaledLinear(torch.autograd.Function):
    """`grouped_linear` with a recipe. The forward quantises both forms at once, and each gradient
    reads one of them. If the rows are computed again in the backward, the rows are saved in place
    of their codes by columns; if they are an activation, its gates, values and probs.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor, product: Product
    ) -> Tensor:
        precision, filled, rows_again, activation = product
        assert precision is not None
        wants_weight = ctx.needs_input_grad[1]
        counts = copy_of(tokens_per_expert) if any(ctx.needs_input_grad) else tokens_per_expert
        columns = wants_weight and not rows_again and _has_columns(precision.recipe, rows.dtype)
        x = quantized_rows(rows if activation is None else activation, "input", counts, precision, True, columns)
        out, saved = multiplied(ctx, x, weight, bias, counts, precision, filled)
        ctx.save_for_backward(*kept_rows(ctx, rows, activation, rows_again and wants_weight), *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        saved_rows, probs, counts, *tensors = ctx.saved_tensors
        rows = rows_of_kept(ctx, saved_rows, probs)
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        d = x = None
        if wants_rows or wants_weight:
            d = quantized_rows(d_out, "grad_output", counts, ctx.precision, wants_rows, wants_weight)
        if wants_weight and rows is not None:
            x = quantized_rows(rows, "input", counts, ctx.precision, False, True)
        return *gradients(ctx, d, x, d_out, tensors), None, None


def multiplied(
    ctx: Any, x: Quantized, weight: Tensor, bias: Tensor | None, counts: Tensor, precision: Precision,
    filled: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    """(x Wᵀ + b, the tensors that `gradients` takes). The first of these are the counts."""
    matrices = quantized_weight(weight, precision, True, ctx.needs_input_grad[0])
    plan = scaled_plan(counts, x.form(False).codes_MN.shape[0], precision.recipe)
    out = scaled_fprop(x, matrices, plan, bias=bias, filled=filled[0])
    ctx.filled, ctx.plan, ctx.precision = filled, plan.without_tensors(), precision
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.x, ctx.weight = without_tensors(x, True), without_tensors(matrices, True)
    return out, (counts, *tensors_of(x, True), *tensors_of(matrices, True), *plan.tensors)


def gradients(
    ctx: Any, d: Quantized | None, x: Quantized | None, d_out: Tensor | None, tensors: list[Any]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of rows, weight and bias, each None unless wanted. If `x` is given, it replaces
    the saved codes of the rows.
    """
    wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    plan, d_rows, d_weight = ctx.plan.with_tensors(tensors[6:]), None, None
    if wants_rows and d is not None:
        d_rows = scaled_dgrad(d, with_tensors(ctx.weight, tensors[3:6], True), plan, filled=ctx.filled[1])
    if wants_weight and d is not None:
        d_weight = scaled_wgrad(d, with_tensors(ctx.x, tensors[:3], True) if x is None else x, plan)
    d_bias = segment_sums(d_out, ctx.bias_dtype, plan) if wants_bias and d_out is not None else None
    return d_rows, d_weight, d_bias


def _has_columns(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether the rows have a form for the gradient of the weight; otherwise the backward raises an
    error.
    """
    impossible = recipe.row_scaled_activation and recipe.four_over_six in ("activations", "all")
    return not impossible and (dtype == torch.bfloat16 or not recipe.hadamard)
