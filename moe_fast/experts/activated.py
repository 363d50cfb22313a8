"""A gated activation that is quantised by blocks where it is computed: on NVIDIA's Hopper."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts._hopper_activated import SIZE, quantize_activated_kernel
from moe_fast.experts.activations import CURVES, Settings
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import is_hopper, strided
from moe_fast.launch.descriptors import described, have_descriptors
from moe_fast.launch.operators import has_memory
from moe_fast.launch.prepared import launch
from moe_fast.quantization import hopper
from moe_fast.quantization.quantize import empty_form, form_arguments
from moe_fast.quantization.quantized import (
    KERNEL_OF,
    LEAST_GROUPS_OF_BLOCKS,
    Quantized,
    encoding,
    format_of,
    grid_of,
    scale_limits,
    splits_arguments,
)
from moe_ref.config import Recipe

# Measured on an H200 (docs/results/fused.json). Two programs share a multiprocessor.
WALK = replace(hopper.WALK, steps=4)


@dataclass(frozen=True)
class Activated:
    """The rounded activation of h as a value that is not written to memory."""

    h_PF2: Tensor
    probs: Tensor | None
    settings: Settings

    @property
    def halves(self) -> Tensor:
        """[2, rows, width]: gates and values."""
        return self.h_PF2.unflatten(1, (2, self.h_PF2.shape[1] // 2)).transpose(0, 1)

    @property
    def like(self) -> Tensor:
        """A tensor of the activation's shape and dtype, without memory."""
        return self.h_PF2.new_empty(()).expand(self.h_PF2.shape[0], self.settings.width(self.h_PF2))


def can_quantize_activated(rows: Activated, recipe: Recipe) -> bool:
    """Whether `quantize_activated` can compute it: h has two-byte numbers in whole lines, the gates
    before the values.
    """
    h, probs, settings = rows.h_PF2, rows.probs, rows.settings
    if not (has_memory() and is_hopper(h.device)) or KERNEL_OF[recipe.scaling] != "amax" or h.itemsize != 2:
        return False
    if settings.offset < 0:  # zeros in place of rows, times a negative number, would be -0
        return False
    if CURVES[settings.kind][0] != "sigmoid" or settings.layout(h) != "halves" or max(h.shape) >= hopper.MOST_ROWS:
        return False
    return (probs is None or probs.dtype != torch.float64) and have_descriptors(rows.halves)


def quantize_activated(
    rows: Activated, recipe: Recipe, splits: Tensor | None, rowwise: bool, columnwise: bool, *, for_products: bool
) -> Quantized:
    """`quantize` of the activation, or with `for_products` `quantize_for_products`, bit by bit,
    without writing the activation.
    """
    rows = replace(rows, h_PF2=rows.h_PF2.resolve_neg())
    like, probs, settings, size = rows.like, rows.probs, rows.settings, SIZE.value
    format = format_of(recipe, "input")
    grid = grid_of(like.shape, splits, WALK, True, (size, size), size, least_groups=LEAST_GROUPS_OF_BLOCKS)
    by_rows = by_columns = None
    if rowwise:
        by_rows = empty_form(like, "amax", (1, size), grid, amax=not for_products)
    if columnwise:
        tensors = {"codes": not for_products, "turned": for_products, "amax": not for_products}
        by_columns = empty_form(like, "amax", (size, 1), grid, **tensors)
    sizes: dict[str, Any] = {k: v for k, v in grid.settings.items() if k not in ("BLOCK_M", "BLOCK_N", "STAGES")}
    constants = encoding(recipe, format, like.device)
    del constants["HARDWARE"]
    launch(quantize_activated_kernel, (grid.programs,))(
        described(rows.halves, [1, size, size]),
        *strided(probs, 1),
        *settings.numbers(),
        *splits_arguments(splits),
        *form_arguments(by_rows),
        *form_arguments(by_columns),
        *like.shape,
        *grid.sizes,
        *scale_limits(recipe, like.dtype),
        SCALED=settings.effective_alpha != 1.0,
        CLAMPED=settings.clamp is not None,
        ROUND_FIRST=settings.round_first and probs is not None,
        **constants,
        WHOLE=not for_products,
        **sizes,
        **NO_FP_FUSION,
    )
    return Quantized(recipe, format, like.dtype, splits, None, by_rows, by_columns)


def kept_rows(
    ctx: Any, rows: Tensor, activation: Activated | None, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The tensors that autograd saves because the backward quantises the rows again: (rows, None),
    or (h, probs) of an activation that is not written, or (None, None) unless `wanted`.
    """
    ctx.settings = None if activation is None else activation.settings
    if not wanted:
        return None, None
    return (rows, None) if activation is None else (activation.h_PF2, activation.probs)


def rows_of_kept(ctx: Any, saved_rows: Tensor | None, probs: Tensor | None) -> Tensor | Activated | None:
    """The inverse of `kept_rows`."""
    return saved_rows if saved_rows is None or ctx.settings is None else Activated(saved_rows, probs, ctx.settings)
