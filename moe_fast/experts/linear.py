"""grouped_linear and its gradients: each expert's rows times its own weight, without a wait of the
host.

A small kernel turns the counts into a table of tiles. The number of programs of a product does not
depend on the counts, so that one captured graph serves every routing.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_fast.experts import _linear as kernels
from moe_fast.experts import hopper
from moe_fast.experts.delayed import Later, waiting_for
from moe_fast.experts.factors import (
    Precision,
    Product,
    quantized_rows,
    quantized_weight,
    tensors_of,
    with_tensors,
    without_tensors,
)
from moe_fast.experts.scaled_linear import (
    ScaledLinear,
    multiple_of,
    scaled_dgrad,
    scaled_fprop,
    scaled_plan,
    scaled_wgrad,
)
from moe_fast.experts.segments import Plan, expert_slices, have_descriptors, plan_of, programs, segment_sums
from moe_fast.launch import tuning
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import check_device, is_hopper, strided, strided_or_empty
from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import as_operators, has_memory, launch, operator, traceable
from moe_fast.launch.tuning import GroupedTile, ceil_div
from moe_fast.quantization.quantized import Quantized, dequantize
from moe_ref.config import (
    LinearState,
    Recipe,
    check_grouped_dgrad,
    check_grouped_linear,
    check_grouped_wgrad,
    check_linear,
    check_precision,
    check_splits,
    require,
)


@traceable
def grouped_linear(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, bias: Tensor | None = None, recipe: Recipe | None = None, state: LinearState | None = None,
    noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """Multiply each expert's rows by its own weight: one launch plans the tiles, one multiplies.

    The host never waits; if the counts are illegal, the result is NaN. With a recipe's
    backward_override the gradients are products in high precision, of the stored tensors or of the
    values of the saved codes.

    Raises:
        ValueError: also for what `check_product` refuses.
    """
    _check(rows_PN, weight_LMN, tokens_per_expert_L, bias, recipe, state, noise, accumulator)
    product = Product(None if recipe is None else Precision(recipe, state, noise))
    return linear_of(rows_PN, weight_LMN, tokens_per_expert_L, product, bias=bias)


@unless_known
def _check(rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, bias: Any, *precision: Any) -> None:
    check_grouped_linear(rows_PN, weight_LMN, tokens_per_expert_L, bias)
    check_precision(*precision)
    check_product(rows_PN, precision[0], precision[-1])
    check_device("rows", rows_PN)


def linear_of(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, product: Product, *, bias: Tensor | None = None
) -> Tensor:
    """`grouped_linear` of arguments that have been checked, for any product."""
    waiting, precision = waiting_for(weight_LMN), product.precision
    if waiting is not None:
        out = linear_of(rows_PN, weight_LMN.detach(), tokens_per_expert_L, product, bias=bias)
        anchor = out.new_empty(0, requires_grad=True)
        wgrad = partial(_wgrad_of, precision=precision)
        return Later.apply(out, anchor, rows_PN, tokens_per_expert_L, waiting, wgrad)
    if precision is None:
        return _GroupedLinear.apply(rows_PN, weight_LMN, bias, tokens_per_expert_L, product.filled)
    if precision.recipe.backward_override is not None:
        return _OverriddenLinear.apply(rows_PN, weight_LMN, bias, tokens_per_expert_L, precision)
    return ScaledLinear.apply(rows_PN, weight_LMN, bias, tokens_per_expert_L, product)


@traceable
def latent_projection(
    x_TN: Tensor, weight_MN: Tensor, *, bias: Tensor | None = None, recipe: Recipe | None = None,
    state: LinearState | None = None, noise: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b, by `grouped_linear` with one expert."""
    check_linear("weight", x_TN, weight_MN, bias)
    return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)


def linear(x_TN: Tensor, weight_MN: Tensor, *, bias: Tensor | None = None, **precision: Any) -> Tensor:
    """`grouped_linear` of one expert that has all rows. The number of rows is checked here."""
    if isinstance(precision.get("recipe"), Recipe):
        check_splits([x_TN.shape[0]], x_TN.shape[0], precision["recipe"])
    count = torch.full((1,), x_TN.shape[0], dtype=torch.int64, device=x_TN.device)
    return grouped_linear(x_TN, weight_MN[None], count, bias=None if bias is None else bias[None], **precision)


@traceable
def grouped_dgrad(
    d_out_PM: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, recipe: Recipe | None = None, state: LinearState | None = None, noise: Tensor | None = None,
    accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """The gradient of `grouped_linear` in its rows: one launch after the plan.

    Raises:
        ValueError: also for what `check_product` refuses.
    """
    check_grouped_dgrad(d_out_PM, weight_LMN, tokens_per_expert_L)
    check_precision(recipe, state, noise, accumulator)
    check_product(d_out_PM, recipe, accumulator)
    check_device("d_out", d_out_PM)
    return _dgrad(
        d_out_PM, weight_LMN, tokens_per_expert_L, None if recipe is None else Precision(recipe, state, noise)
    )


@operator
def _dgrad(d_out_PM: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, precision: Precision | None) -> Tensor:
    if precision is not None and precision.recipe.backward_override is None:
        d = quantized_rows(d_out_PM, "grad_output", tokens_per_expert_L, precision, True, False)
        return scaled_dgrad(
            d,
            quantized_weight(weight_LMN.detach(), precision, False, True),
            scaled_plan(tokens_per_expert_L, d_out_PM.shape[0], precision.recipe),
        )
    d_out, weight = d_out_PM.detach(), weight_LMN.detach()
    if precision is not None and precision.recipe.backward_override == "dequantized":
        weight = dequantize(quantized_weight(weight, precision, True, False)).view(weight.shape)
    return _multiply(d_out, weight, None, plan_of(tokens_per_expert_L, d_out))


@traceable
def grouped_wgrad(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor,
    *, accumulate_into: Tensor | None = None, recipe: Recipe | None = None,
    state: LinearState | None = None, noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """The gradient of `grouped_linear` in its weight, added to `accumulate_into` if given: one
    launch after the plan.

    Raises:
        ValueError: also for what `check_product` refuses.
    """
    check_precision(recipe, state, noise, accumulator)
    check_product(rows_PN, recipe, accumulator)
    check_device("rows", rows_PN)
    precision = None if recipe is None else Precision(recipe, state, noise)
    return _wgrad_of(d_out_PM, rows_PN, tokens_per_expert_L, precision=precision, accumulate_into=accumulate_into)


def _wgrad_of(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor,
    *, precision: Precision | None, accumulate_into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    check_grouped_wgrad(d_out_PM, rows_PN, tokens_per_expert_L, accumulate_into)
    addend = None if accumulate_into is None else accumulate_into.detach()
    return _wgrad(d_out_PM, rows_PN, tokens_per_expert_L, addend, precision)


@operator
def _wgrad(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor, addend: Tensor | None, precision: Precision | None
) -> Tensor:
    if precision is not None and precision.recipe.backward_override is None:
        d = quantized_rows(d_out_PM, "grad_output", tokens_per_expert_L, precision, False, True)
        x = quantized_rows(rows_PN, "input", tokens_per_expert_L, precision, False, True)
        plan = scaled_plan(tokens_per_expert_L, rows_PN.shape[0], precision.recipe)
        return scaled_wgrad(d, x, plan, accumulate_into=addend)
    rows, multiple = rows_PN.detach(), 1
    if precision is not None and precision.recipe.backward_override == "dequantized":
        rows = dequantize(quantized_rows(rows, "input", tokens_per_expert_L, precision, True, False))
        multiple = multiple_of(precision.recipe)
    return _outer_products(d_out_PM.detach(), rows, addend, plan_of(tokens_per_expert_L, rows, multiple))


def check_product(rows: Tensor, recipe: Recipe | None, accumulator: str) -> None:
    """Raise `ValueError` for float64 sums of narrower numbers, and with a recipe for rows or sums
    in float64.
    """
    if recipe is not None:
        expected = "bfloat16, float16 or float32: sums are taken in float32"
        require(rows.dtype != torch.float64, "rows", f"of dtype {rows.dtype} with a recipe", expected)
        require(accumulator == "float32", "accumulator", f"{accumulator!r} with a recipe", "'float32'")
        return
    is_wide = accumulator == "float32" or rows.dtype == torch.float64
    received = f"{accumulator!r} with rows of dtype {rows.dtype}"
    require(is_wide, "accumulator", received, "'float32', unless the rows are float64")


@as_operators
class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear`; one plan serves the forward and the gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor,
        filled: tuple[bool, bool],
    ) -> Tensor:  # fmt: skip
        plan = plan_of(tokens_per_expert, rows)
        ctx.plan, ctx.filled = plan.without_tensors(), filled
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.turned = weight.stride(2) != 1 and weight.stride(1) == 1
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if wants_weight else None, weight if wants_rows else None, *plan.tensors)
        return _multiply(rows, weight.transpose(1, 2), bias, plan, filled[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, weight, *tensors = ctx.saved_tensors
        plan = ctx.plan.with_tensors(tensors)
        d_rows = None if weight is None else _multiply(d_out, weight, None, plan, ctx.filled[1])
        d_weight = None
        if rows is not None and ctx.turned:  # a gradient in the weight's layout is not copied into it
            d_weight = _outer_products(rows, d_out, None, plan).transpose(1, 2)
        elif rows is not None:
            d_weight = _outer_products(d_out, rows, None, plan)
        d_bias = segment_sums(d_out, ctx.bias_dtype, plan) if ctx.needs_input_grad[2] else None
        return d_rows, d_weight, d_bias, None, None


@as_operators
class _OverriddenLinear(torch.autograd.Function):
    """`grouped_linear` with a backward_override: gradients in high precision."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor, precision: Precision
    ) -> Tensor:
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        # the caller may change them before the backward
        counts = tokens_per_expert.clone() if any(ctx.needs_input_grad) else tokens_per_expert
        x, matrices = (
            quantized_rows(rows, "input", counts, precision, True, False),
            quantized_weight(weight, precision, True, False),
        )
        ctx.bias_dtype, ctx.shape = None if bias is None else bias.dtype, weight.shape
        ctx.x = ctx.weight = None
        if precision.recipe.backward_override == "high_precision":
            ctx.save_for_backward(counts, rows if wants_weight else None, weight if wants_rows else None)
        else:
            ctx.x, ctx.weight = without_tensors(x, False), without_tensors(matrices, False)
            nothing = (None, None, None)
            kept_rows = tensors_of(x, False) if wants_weight else nothing
            kept_weight = tensors_of(matrices, False) if wants_rows else nothing
            ctx.save_for_backward(counts, *kept_rows, *kept_weight, matrices.splits)
        return scaled_fprop(x, matrices, scaled_plan(counts, rows.shape[0], precision.recipe), bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        counts, *tensors = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        plan, d_rows, d_weight = plan_of(counts, d_out), None, None
        if wants_rows:
            weight = (
                tensors[1] if ctx.weight is None else _dequantized(ctx.weight, tensors[3:6], tensors[6]).view(ctx.shape)
            )
            d_rows = _multiply(d_out, weight, None, plan)
        if wants_weight:
            rows = tensors[0] if ctx.x is None else _dequantized(ctx.x, tensors[:3], counts)
            d_weight = _outer_products(d_out, rows, None, plan)
        d_bias = segment_sums(d_out, ctx.bias_dtype, plan) if wants_bias else None
        return d_rows, d_weight, d_bias, None, None


def _dequantized(quantized: Quantized, tensors: list[Tensor], splits: Tensor) -> Tensor:
    """The values of saved codes by rows, in the dtype of the tensor that was quantised."""
    return dequantize(replace(with_tensors(quantized, tensors, False), splits=splits))


def _multiply(x_PD: Tensor, weight_LDC: Tensor, bias_LC: Tensor | None, plan: Plan, filled: bool = True) -> Tensor:
    """out[p] = x[p] · weight[e] + bias[e] for each expert's rows p; past them 0 if `filled`,
    otherwise nothing is written.
    """
    x, weight = x_PD.resolve_neg(), weight_LDC.resolve_neg()
    num_rows, depth, num_columns = *x.shape, weight.shape[2]
    # by grouped_matmul_kernel: the tiles, and the rows past them
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or not has_memory():
        return out
    turned = weight.stride(2) != 1
    matrices = weight.transpose(1, 2) if turned else weight
    described, sizes = have_descriptors(x, matrices, out), tuning.for_device(x.device).grouped
    tile = plan.tile if described else plan.tile.within(sizes.pointer_columns)
    if described and tile.rows == hopper.MATMUL_ROWS and is_hopper(x.device):
        hopper.matmul(x, matrices, turned, strided(bias_LC, 2), plan, out, filled)
        return out
    is_float64 = x.dtype == torch.float64
    launch(
        kernels.grouped_matmul_kernel,
        (programs(plan.capacity * ceil_div(num_columns, tile.columns), x.device),),
        x,
    )(
        *strided(x, 2),
        *strided(matrices, 3),
        # with a branch, the loop over tiles and depth would not be one pipeline
        *((*strided(bias_LC, 2), None) if described else strided_or_empty(bias_LC, 2)),
        out,
        *(_matmul_descriptors(x, matrices, out, tile, turned) if described else (None, None, None)),
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        num_rows if filled else 0,
        num_columns,
        depth,
        ACCUMULATOR=tl.float64 if is_float64 else tl.float32,
        BIAS_AS=tl.float64 if is_float64 and bias_LC is not None and bias_LC.dtype == torch.float64 else tl.float32,
        TURNED=turned,
        FLATTEN=described and sizes.flatten,
        **tile.blocks("P", "C", "D"),
    )
    return out


def _outer_products(d_out_PM: Tensor, rows_PN: Tensor, addend_LMN: Tensor | None, plan: Plan) -> Tensor:
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · rows[p], plus addend[e] if there is one."""
    d_out, rows = d_out_PM.resolve_neg(), rows_PN.resolve_neg()
    doubles = addend_LMN is not None and addend_LMN.dtype == torch.float64  # there is no room for a large tile of them
    described = have_descriptors(d_out, rows)
    sizes = tuning.for_device(rows.device).grouped
    tile = sizes.wgrad_tile(8 if doubles else rows.dtype.itemsize)
    tile = tile if described else tile.within(sizes.pointer_columns)
    shape = (plan.num_experts, d_out.shape[1], rows.shape[1])
    # grouped_wgrad_kernel writes all of it
    out = torch.empty(shape, dtype=(rows if addend_LMN is None else addend_LMN).dtype, device=rows.device)
    if out.numel() == 0 or not has_memory():
        return out
    if described and addend_LMN is None and have_descriptors(out) and is_hopper(rows.device):
        hopper.outer_products(d_out, rows, plan, out)
        return out
    # beside a sum in float32 there is no room for a tile of it
    out_described = described and addend_LMN is None and have_descriptors(out)
    pieces = plan.num_experts * ceil_div(shape[1], tile.rows) * ceil_div(shape[2], tile.columns)
    launch(kernels.grouped_wgrad_kernel, (programs(pieces, rows.device),), rows)(
        *strided(d_out, 2),
        *strided(rows, 2),
        *strided(addend_LMN, 3),
        out,
        expert_slices(d_out, [tile.depth, tile.rows]) if described else None,
        expert_slices(rows, [tile.depth, tile.columns]) if described else None,
        TensorDescriptor.from_tensor(out, [1, tile.rows, tile.columns]) if out_described else None,
        plan.segment_3L,
        *shape,
        ACCUMULATOR=tl.float64 if rows.dtype == torch.float64 else tl.float32,
        **tile.blocks("M", "N", "P"),
    )
    return out


def _matmul_descriptors(
    x: Tensor, matrices: Tensor, out: Tensor, tile: GroupedTile, turned: bool
) -> tuple[TensorDescriptor, ...]:
    block = (tile.columns, tile.depth) if turned else (tile.depth, tile.columns)
    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(matrices, [1, *block]),
        expert_slices(out, [tile.rows, tile.columns]),
    )
