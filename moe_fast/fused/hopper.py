"""A gated activation and its gradient, quantised by blocks where they are computed: on NVIDIA's
Hopper.
"""

from typing import Any

import torch
from torch import Tensor

from moe_fast.experts.activations import CURVES, Settings
from moe_fast.fused._hopper_activated import (
    SIZE,
    quantize_activated_tiles_kernel,
    quantize_gradient_tiles_kernel,
)
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import is_hopper, launch_on, strided
from moe_fast.launch.descriptors import described, have_descriptors
from moe_fast.launch.operators import has_memory, launch
from moe_fast.quantization.hopper import MOST_ROWS, WALK
from moe_fast.quantization.quantize import empty_form, form_arguments
from moe_fast.quantization.quantized import KERNEL_OF, Form, Grid, Quantized, format_of, grid_of, scale_limits
from moe_ref.config import Recipe


def halves(h: Tensor) -> Tensor:
    """[2, rows, width]: gates and values."""
    return h.unflatten(1, (2, h.shape[1] // 2)).transpose(0, 1)


def can_activate(h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe) -> bool:
    """Whether `quantize_activated` takes it: whole lines of two-byte gates, then values."""
    if not (has_memory() and is_hopper(h.device)) or KERNEL_OF[recipe.scaling] != "amax" or h.itemsize != 2:
        return False
    if settings.offset < 0:  # rows that fill a tile would be -0
        return False
    if CURVES[settings.kind][0] != "sigmoid" or settings.layout(h) != "halves" or max(h.shape) >= MOST_ROWS:
        return False
    return (probs is None or probs.dtype != torch.float64) and have_descriptors(halves(h))


def quantize_activated(
    h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe, splits: Tensor | None, rowwise: bool,
    columnwise: bool, *, for_products: bool,
) -> Quantized:  # fmt: skip
    """`quantize` of the rounded activation, or `quantize_for_products`, bit by bit."""
    h = h.detach().resolve_neg()
    shape = torch.Size((h.shape[0], settings.width(h)))
    grid = grid_of(shape, splits, WALK, True, (SIZE.value,) * 2, SIZE.value)
    by_rows, by_columns = _forms(h, shape, grid, rowwise, columnwise, for_products)
    with launch_on(h):
        launch(quantize_activated_tiles_kernel, (grid.programs,))(
            described(halves(h), [1, SIZE.value, SIZE.value]),
            *strided(None if probs is None else probs.detach(), 1),
            *settings.numbers(),
            *strided(splits, 1),
            *form_arguments(by_rows),
            *form_arguments(by_columns),
            *shape,
            *grid.sizes,
            *scale_limits(recipe, h.dtype),
            **_constants(settings, probs, recipe, format_of(recipe, "input"), for_products, grid),
        )
    return Quantized(recipe, format_of(recipe, "input"), h.dtype, splits, None, by_rows, by_columns)


def can_differentiate(d_out: Tensor, h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe) -> bool:
    """Whether `quantize_gradient` takes them: gates and values in whole tiles."""
    whole = h.shape[1] % (2 * SIZE.value) == 0 and d_out.dtype == h.dtype and have_descriptors(d_out)
    return whole and can_activate(h, probs, settings, recipe)


def quantize_gradient(
    d_out: Tensor, h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe, splits: Tensor | None,
    rowwise: bool, columnwise: bool, *, for_products: bool, needs_probs: bool,
) -> tuple[Quantized, Tensor | None]:  # fmt: skip
    """(`quantize` of the rounded gradient of h, or `quantize_for_products`, bit by bit; d_probs, a
    sum of sums of 128 columns each).
    """
    d_out, h = d_out.detach().resolve_neg(), h.detach().resolve_neg()
    rows, width = h.shape[0], settings.width(h)
    grid = grid_of(torch.Size((rows, width)), splits, WALK, True, (SIZE.value,) * 2, SIZE.value)
    by_rows, by_columns = _forms(h, h.shape, grid, rowwise, columnwise, for_products)
    parts = None
    if probs is not None and needs_probs:
        parts = torch.zeros((width // SIZE.value, rows), device=h.device)
    with launch_on(h):
        launch(quantize_gradient_tiles_kernel, (grid.programs,))(
            described(d_out[None], [1, SIZE.value, SIZE.value]),
            described(halves(h), [1, SIZE.value, SIZE.value]),
            *strided(None if probs is None else probs.detach(), 1),
            *settings.numbers(),
            *strided(splits, 1),
            *form_arguments(by_rows),
            *form_arguments(by_columns),
            parts,
            rows,
            width,
            *grid.sizes,
            *scale_limits(recipe, h.dtype),
            **_constants(settings, probs, recipe, format_of(recipe, "grad_output"), for_products, grid),
        )
    quantized = Quantized(recipe, format_of(recipe, "grad_output"), h.dtype, splits, None, by_rows, by_columns)
    return quantized, None if parts is None or probs is None else parts.sum(0).to(probs.dtype)


def _forms(
    h: Tensor, shape: torch.Size, grid: Grid, rowwise: bool, columnwise: bool, for_products: bool
) -> tuple[Form | None, Form | None]:
    like, by_rows, by_columns = h.new_empty(()).expand(shape), None, None
    if rowwise:
        by_rows = empty_form(like, "amax", (1, SIZE.value), grid, amax=not for_products)
    if columnwise:
        parts = {"codes": not for_products, "turned": for_products, "amax": not for_products}
        by_columns = empty_form(like, "amax", (SIZE.value, 1), grid, **parts)
    return by_rows, by_columns


def _constants(
    settings: Settings, probs: Tensor | None, recipe: Recipe, format: str, for_products: bool, grid: Grid
) -> dict[str, Any]:
    """What a kernel is compiled for."""
    sizes = {name: value for name, value in grid.settings.items() if name not in ("BLOCK_M", "BLOCK_N", "STAGES")}
    return {
        "SCALED": settings.slope != 1.0,
        "CLAMPED": settings.clamp is not None,
        "ROUND_FIRST": settings.round_first and probs is not None,
        "FORMAT": format,
        "POWER_OF_TWO": bool(recipe.power_of_two_scales),
        "WHOLE": not for_products,
        **sizes,
        **NO_FP_FUSION,
    }
