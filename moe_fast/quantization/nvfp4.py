"""NVFP4: first the amax of each group, then the codes and scales of both forms in one pass."""

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import casts_in_hardware, strided
from moe_fast.launch.operators import launch, operator
from moe_fast.launch.tuning import ceil_div
from moe_fast.quantization import _group_scales as group_scales
from moe_fast.quantization import _nvfp4 as nvfp4
from moe_fast.quantization.group_scales import group_amax
from moe_fast.quantization.quantized import Form, grid_of, is_ragged, splits_arguments
from moe_ref.config import Recipe
from moe_ref.config.quantization import BLOCK

SIZE = BLOCK["nvfp4"]
SCOPES: dict[str, tuple[str, ...]] = {
    "input": ("activations", "all"),
    "weight": ("weights", "all"),
    "grad_output": (),
}  # that a role is in


@operator
def quantize_two_levels(
    x: Tensor, recipe: Recipe, role: str, splits: Tensor | None, rowwise: bool, columnwise: bool, noise: Tensor | None
) -> tuple[Form | None, Form | None]:
    """(form by rows, form by columns) of x, [M,N]; see
    `moe_ref.quantization.recipes.by_two_levels`.

    Square blocks are the same in both forms, unless a sum of errors decides, because the sum has
    another order by columns.
    """
    square = role == "weight" and bool(recipe.two_dimensional_weights)
    transformed = bool(recipe.hadamard) and role != "weight" and columnwise
    row_scaled = bool(recipe.row_scaled_activation) and role == "input"
    error = recipe.four_over_six_error if recipe.four_over_six in SCOPES[role] else None
    largest = 256.0 if error and recipe.four_over_six_bound_256 in SCOPES[role] else 448.0
    once = square and error is None
    rowwise, columnwise = rowwise or once, columnwise and not once
    if row_scaled or transformed:
        row_amax, column_amax = _amax_of_forms(x, splits, rowwise, columnwise, row_scaled)
    else:
        row_amax = column_amax = group_amax(x, splits).view(torch.float32)

    def blank(amax: Tensor | None, block: tuple[int, int], per: str) -> Form:
        """A form whose codes and scales are all written by quantize_two_levels_kernel."""
        assert amax is not None
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty(ceil_div(x.shape[0], block[0]), x.shape[1] // block[1], dtype=torch.uint8, device=x.device)
        return Form(codes, scale, amax, block, per if row_scaled else "group", largest, transformed and per == "column")

    by_rows = blank(row_amax, (SIZE if square else 1, SIZE), "row") if rowwise else None
    by_columns = blank(column_amax, (SIZE, SIZE if square else 1), "column") if columnwise else None
    sizes = tuning.for_device(x.device).quantize
    walk = sizes.transformed if transformed else sizes.columns if square or columnwise else sizes.rows
    least = (SIZE if square or columnwise else 1, SIZE)
    grid = grid_of(x.shape, splits, walk, True, least, ragged=is_ragged(x.stride(0)))
    launch(nvfp4.quantize_two_levels_kernel, (grid.programs,), x)(
        *strided(x),
        *splits_arguments(splits),
        row_amax,
        column_amax,
        *strided(noise, 3),
        *((None, None) if by_rows is None else (by_rows.codes_MN, by_rows.scale)),
        *((None, None) if by_columns is None else (by_columns.codes_MN, by_columns.scale)),
        *x.shape,
        *grid.sizes,
        largest,
        ROW_SCALED=row_scaled,
        TRANSFORMED=transformed,
        ERROR=error,
        SQUARE=square,
        HARDWARE=casts_in_hardware(x.device),
        **grid.settings,
        **NO_FP_FUSION,
    )
    return by_rows, by_rows if once else by_columns


def _amax_of_forms(
    x: Tensor, splits: Tensor | None, rowwise: bool, columnwise: bool, row_scaled: bool
) -> tuple[Tensor | None, Tensor | None]:
    """max |x| per group, and per group of the transform; with scales per row, [M] for rows and
    [G,N] for the columns of groups.
    """
    sizes = tuning.for_device(x.device).quantize
    walk, least = sizes.groups if row_scaled else sizes.transformed, (1 if row_scaled else SIZE, 1)
    grid = grid_of(x.shape, splits, walk, True, least, ragged=is_ragged(x.stride(0)))
    row_shape, column_shape = (
        ((x.shape[0],), (grid.groups, x.shape[1])) if row_scaled else ((grid.groups,), (grid.groups,))
    )
    row_amax = torch.zeros(row_shape, dtype=torch.int32, device=x.device) if rowwise else None
    column_amax = torch.zeros(column_shape, dtype=torch.int32, device=x.device) if columnwise else None
    launch(group_scales.two_levels_amax_kernel, (grid.programs,), x)(
        *strided(x),
        *splits_arguments(splits),
        row_amax,
        column_amax,
        *x.shape,
        *grid.sizes,
        ROW_SCALED=row_scaled,
        **grid.settings,
        **NO_FP_FUSION,
    )
    rows, columns = (None if amax is None else amax.view(torch.float32) for amax in (row_amax, column_amax))
    return rows, columns
