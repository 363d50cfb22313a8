"""Rows that are still tokens, quantised by blocks where they are gathered, on NVIDIA's Hopper."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import is_hopper
from moe_fast.launch.operators import has_memory, launch
from moe_fast.quantization._hopper_gathered import quantize_gathered_kernel
from moe_fast.quantization.hopper import WALK
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
from moe_ref.config.quantization import BLOCK

LINE = 16  # elements; the kernel copies eight at once
MOST = 2**31  # elements between two tokens, which must fit an int32


@dataclass(frozen=True)
class Gathered:
    """rows[p] = tokens[source[p]], or 0 where the source is -1."""

    tokens_TH: Tensor
    source_P: Tensor  # int32

    @property
    def token_map(self) -> tuple[Tensor, int, Tensor, int]:
        """The arguments of a kernel."""
        return self.tokens_TH, self.tokens_TH.stride(0), self.source_P, len(self.source_P)

    @property
    def like(self) -> Tensor:
        """A tensor of the rows' shape and dtype, without memory."""
        return self.tokens_TH.new_empty(()).expand(len(self.source_P), self.tokens_TH.shape[1])


def can_gather(tokens: Tensor, recipe: Recipe) -> bool:
    """Whether `quantize_gathered` can gather these tokens with this recipe."""
    return has_memory() and is_hopper(tokens.device) and KERNEL_OF[recipe.scaling] == "amax" and in_lines(tokens)


def in_lines(tokens: Tensor) -> bool:
    """Whether kernels can gather rows of these tokens: they have two-byte numbers in
    whole lines.
    """
    stride_t, stride_h = tokens.stride()
    has_lines = stride_h == 1 and stride_t % LINE == 0 and tokens.shape[1] % LINE == 0 and tokens.data_ptr() % LINE == 0
    return tokens.itemsize == 2 and has_lines and tokens.numel() > 0 and len(tokens) * stride_t < MOST


def quantize_gathered(
    rows: Gathered, recipe: Recipe, role: str, splits: Tensor, rowwise: bool, columnwise: bool, *, for_products: bool
) -> Quantized:
    """`quantize` of the rows, or with `for_products` `quantize_for_products`, bit by bit, without
    writing the rows.
    """
    tokens, size, rule = rows.tokens_TH.detach().resolve_neg(), BLOCK[recipe.scaling], KERNEL_OF[recipe.scaling]
    like, format = rows.like, format_of(recipe, role)
    grid = grid_of(like.shape, splits, WALK, True, (size, size), size, least_groups=LEAST_GROUPS_OF_BLOCKS)
    by_rows = by_columns = None
    if rowwise:
        by_rows = empty_form(like, rule, (1, size), grid, amax=not for_products)
    if columnwise:
        tensors = {"codes": not for_products, "turned": for_products, "amax": not for_products}
        by_columns = empty_form(like, rule, (size, 1), grid, **tensors)
    settings: dict[str, Any] = {k: v for k, v in grid.settings.items() if k not in ("BLOCK_M", "BLOCK_N")}
    constants = encoding(recipe, format, tokens.device)
    del constants["HARDWARE"]
    launch(quantize_gathered_kernel, (grid.programs,), tokens)(
        tokens,
        tokens.stride(0),
        rows.source_P,
        *splits_arguments(splits),
        *form_arguments(by_rows),
        *form_arguments(by_columns),
        *like.shape,
        *grid.sizes,
        *scale_limits(recipe, tokens.dtype),
        **constants,
        WHOLE=not for_products,
        **settings,
        **NO_FP_FUSION,
    )
    return Quantized(recipe, format, tokens.dtype, splits, None, by_rows, by_columns)
