"""quantize: the codes and scales of every group, by rows and by columns, from one pass over x.

Current scaling and NVFP4 take two passes, because their scales need the maximum of the whole group.
"""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import check_device, strided
from moe_fast.launch.operators import has_memory, launch, operator, traceable
from moe_fast.launch.tuning import ceil_div
from moe_fast.quantization import _quantize as kernels
from moe_fast.quantization import hopper
from moe_fast.quantization._quantize import FormPointers
from moe_fast.quantization.group_scales import cast_groups
from moe_fast.quantization.nvfp4 import quantize_two_levels
from moe_fast.quantization.quantized import (
    KERNEL_OF,
    LEAST_GROUPS_OF_BLOCKS,
    Form,
    Grid,
    Quantized,
    encoding,
    format_of,
    grid_of,
    is_ragged,
    scale_limits,
    splits_arguments,
)
from moe_ref.config import Quantization, QuantizerState, Recipe, check_quantize, check_splits
from moe_ref.config.quantization import BLOCK


@traceable
def quantize(
    x_MN: Tensor, recipe: Recipe,
    *, role: str = "input", splits: Tensor | None = None, rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None, noise: Tensor | None = None,
) -> Quantization:  # fmt: skip
    """Quantise each group of rows separately, bit by bit as the reference.

    One launch per call; for current scaling and NVFP4 another one before it computes the maximum of
    each group. The host never waits: if the values of `splits` are illegal, `dequantize` returns
    NaN, and `scales` and `amax` raise an error, or return NaN if they need no wait of the host.
    float64 is rounded to float32 first.
    """
    return _quantize(x_MN, recipe, role, splits, rowwise, columnwise, state, noise, for_products=False)


def quantize_for_products(
    x_MN: Tensor, recipe: Recipe,
    *, role: str = "input", splits: Tensor | None = None, rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None, noise: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """`quantize` for the products of `experts`: with block scaling, the form by columns is
    transposed in the same launch, has no amax, and nothing is written past the last group.
    """
    return _quantize(x_MN, recipe, role, splits, rowwise, columnwise, state, noise, for_products=True).quantized


def _quantize(
    x_MN: Tensor, recipe: Recipe, role: str, splits: Tensor | None, rowwise: bool, columnwise: bool,
    state: QuantizerState | None, noise: Tensor | None, for_products: bool,
) -> Quantization:  # fmt: skip
    check_quantize(x_MN, recipe, role, splits, rowwise, columnwise, state, noise)
    check_device("x", x_MN)
    if splits is None:
        check_splits([x_MN.shape[0]], x_MN.shape[0], recipe)
    else:
        # the result reads them later, when the caller may have others there; int64, as most are
        dtype = splits.dtype if for_products else torch.int64
        splits = splits.to(x_MN.device, dtype, non_blocking=True, copy=not for_products)
    x = x_MN.detach().resolve_neg()  # because a kernel reads memory, without the pending minus
    format = format_of(recipe, role)
    if recipe.stochastic_rounding and role == "grad_output" and noise is None:
        noise = torch.rand(2, *x.shape, device=x.device)
    if recipe.scaling == "nvfp4":
        by_rows, by_columns = quantize_two_levels(x, recipe, role, splits, rowwise, columnwise, noise)
    elif recipe.scaling in BLOCK:
        square = role == "weight" and bool(recipe.two_dimensional_weights)
        turned = for_products and recipe.scaling == "block"
        by_rows, by_columns = _quantize_blocks(x, recipe, format, splits, square, rowwise, columnwise, turned)
    else:
        by_rows, state = cast_groups(x, recipe, format, splits, state)
        by_columns = by_rows
    source = _Place.apply(x_MN, splits) if x_MN.requires_grad else None
    quantized = Quantized(
        recipe, format, x.dtype, splits, source, by_rows if rowwise else None, by_columns if columnwise else None
    )
    return Quantization(quantized, state)


@operator
def _quantize_blocks(
    x: Tensor, recipe: Recipe, format: str, splits: Tensor | None, square: bool, rowwise: bool, columnwise: bool,
    turned: bool,
) -> tuple[Form | None, Form | None]:  # fmt: skip
    """(form by rows, form by columns), with a scale for each block. With square blocks both are the
    same form.
    """
    size, rule = BLOCK[recipe.scaling], KERNEL_OF[recipe.scaling]
    sizes = tuning.for_device(x.device).quantize
    tall = square or columnwise  # whether blocks span rows
    aligned = rule == "amax" and tall  # whole groups of MXFP8 consist of whole blocks, wherever x is cut
    on_hopper = has_memory() and aligned and hopper.can_quantize(x)
    walk = hopper.WALK if on_hopper else sizes.tall if aligned else sizes.columns if tall else sizes.rows
    ragged = not on_hopper and is_ragged(x.stride(0), x.shape[1])
    least = (size if tall else 1, size)
    rows = size if aligned else None
    grid = grid_of(x.shape, splits, walk, aligned, least, rows, ragged=ragged, least_groups=LEAST_GROUPS_OF_BLOCKS)
    by_rows = by_columns = None
    if square or rowwise:
        tensors = {"codes": rowwise or not turned, "turned": square and turned and columnwise, "amax": not turned}
        by_rows = empty_form(x, rule, (size if square else 1, size), grid, **tensors)
    if columnwise and not square:
        by_columns = empty_form(x, rule, (size, 1), grid, codes=not turned, turned=turned, amax=not turned)
    if has_memory() and grid.programs:
        forms = *form_arguments(by_rows), *form_arguments(by_columns)
        arguments = *x.shape, *grid.sizes, *scale_limits(recipe, x.dtype)
        if on_hopper:
            hopper.quantize_tiles(x, splits, forms, arguments, recipe, format, square, not turned, grid)
        else:
            launch(kernels.quantize_blocks_kernel, (grid.programs,), x)(
                *strided(x),
                *splits_arguments(splits),
                *forms,
                *arguments,
                RULE=rule,
                **encoding(recipe, format, x.device),
                ALIGNED=aligned,
                BLOCK=size,
                SQUARE=square,
                WHOLE=not turned,
                **grid.settings,
                **NO_FP_FUSION,
            )
    return by_rows, by_rows if square else by_columns


def empty_form(
    x: Tensor, rule: str, block: tuple[int, int], grid: Grid,
    *, codes: bool = True, turned: bool = False, amax: bool = True,
) -> Form:  # fmt: skip
    """A form with room for all blocks. Kernels write all codes, and the scales of blocks that
    exist.
    """
    rows = grid.tiles if rule == "amax" and block[0] > 1 else ceil_div(x.shape[0], block[0])
    columns = ceil_div(x.shape[1], block[1])
    side_by_side = rule == "amax" and block[0] == 1  # scales of neighbouring rows, for matrix products

    def blocks(dtype: torch.dtype) -> Tensor:
        shape = (columns, rows) if side_by_side else (rows, columns)
        empty = torch.empty(shape, dtype=dtype, device=x.device)
        return empty.T if side_by_side else empty

    def bytes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=x.device)

    scale = blocks(torch.float32 if rule == "amax" else torch.uint8)
    return Form(
        bytes(x.shape[0] if codes else 0, x.shape[1]),
        scale,
        blocks(torch.float32 if x.dtype == torch.float64 else x.dtype) if amax else scale.new_empty(0),
        block,
        turned_NT=bytes(x.shape[1], grid.tiles * block[0]) if turned else None,
    )


def form_arguments(form: Form | None) -> tuple[FormPointers, int, int]:
    """A form as the kernels take it: its memory, and the strides of its scales."""
    if form is None:
        return FormPointers(None, None, None, None), 0, 0
    codes, amax = (x if x.numel() else None for x in (form.codes_MN, form.amax))
    pointers = FormPointers(codes, form.scale, amax, form.turned_NT)
    return pointers, form.scale.stride(0), form.scale.stride(1)


class _Place(torch.autograd.Function):
    """The node of x in autograd's graph, whose values are never read. Rows past the last group have
    no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor | None) -> Tensor:
        ctx.splits = splits  # not saved: both directions may be gone through, one after the other
        return x.new_empty(()).expand(x.shape)  # it takes no memory

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        if ctx.splits is None:
            return d_x, None
        owned = torch.arange(d_x.shape[0], device=d_x.device) < ctx.splits.sum()
        return torch.where(owned[:, None], d_x, 0), None
