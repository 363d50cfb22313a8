"""A gated activation, quantised by blocks where it is computed: on NVIDIA's Hopper."""

import torch
from torch import Tensor

from moe_fast.experts.activations import CURVES, Settings
from moe_fast.fused._hopper_activated import SIZE, quantize_activated_tiles_kernel
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import is_hopper, launch_on, strided
from moe_fast.launch.descriptors import described, have_descriptors
from moe_fast.launch.operators import has_memory, launch
from moe_fast.quantization.hopper import MOST_ROWS, WALK
from moe_fast.quantization.quantize import empty_form, form_arguments
from moe_fast.quantization.quantized import KERNEL_OF, Quantized, format_of, grid_of, scale_limits
from moe_ref.config import Recipe


def halves(h: Tensor) -> Tensor:
    """[2, rows, width]: gates and values."""
    return h.unflatten(1, (2, h.shape[1] // 2)).transpose(0, 1)


def can_activate(h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe) -> bool:
    """Whether `quantize_activated` takes it: whole lines of two-byte gates, then values."""
    if not (has_memory() and is_hopper(h.device)) or KERNEL_OF[recipe.scaling] != "amax" or h.itemsize != 2:
        return False
    if CURVES[settings.kind][0] != "sigmoid" or settings.layout(h) != "halves" or max(h.shape) >= MOST_ROWS:
        return False
    return (probs is None or probs.dtype != torch.float64) and have_descriptors(halves(h))


def quantize_activated(
    h: Tensor, probs: Tensor | None, settings: Settings, recipe: Recipe, splits: Tensor | None, rowwise: bool,
    columnwise: bool, *, for_products: bool,
) -> Quantized:  # fmt: skip
    """`quantize` of the rounded activation, or `quantize_for_products`, bit by bit."""
    h, size, rule = h.detach().resolve_neg(), SIZE.value, KERNEL_OF[recipe.scaling]
    shape, format = torch.Size((h.shape[0], settings.width(h))), format_of(recipe, "input")
    like = h.new_empty(()).expand(shape)
    grid = grid_of(shape, splits, WALK, True, (size, size), size)
    by_rows = by_columns = None
    if rowwise:
        by_rows = empty_form(like, rule, (1, size), grid, amax=not for_products)
    if columnwise:
        parts = {"codes": not for_products, "turned": for_products, "amax": not for_products}
        by_columns = empty_form(like, rule, (size, 1), grid, **parts)
    constants = {name: value for name, value in grid.settings.items() if name not in ("BLOCK_M", "BLOCK_N", "STAGES")}
    with launch_on(h):
        launch(quantize_activated_tiles_kernel, (grid.programs,))(
            described(halves(h), [1, size, size]),
            *strided(None if probs is None else probs.detach(), 1),
            *settings.numbers(),
            *strided(splits, 1),
            *form_arguments(by_rows),
            *form_arguments(by_columns),
            *shape,
            *grid.sizes,
            *scale_limits(recipe, h.dtype),
            SCALED=settings.slope != 1.0,
            CLAMPED=settings.clamp is not None,
            ROUND_FIRST=settings.round_first and probs is not None,
            FORMAT=format,
            POWER_OF_TWO=bool(recipe.power_of_two_scales),
            WHOLE=not for_products,
            **constants,
            **NO_FP_FUSION,
        )
    return Quantized(recipe, format, h.dtype, splits, None, by_rows, by_columns)
