"""The launch of the quantiser for NVIDIA's Hopper, and the tensors that it can quantise."""

from typing import Any

from torch import Tensor

from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import is_hopper
from moe_fast.launch.descriptors import described, have_descriptors
from moe_fast.launch.prepared import launch
from moe_fast.launch.sizes import Walk
from moe_fast.quantization._hopper import SIZE, quantize_tiles_kernel
from moe_fast.quantization.quantized import Grid, splits_arguments
from moe_ref.config import Recipe

# Measured on an H200 (docs/results/quantization.json). Two programs share a multiprocessor.
WALK = Walk(tokens=128, columns=128, num_warps=8, steps=8, stages=2, registers=128)
MOST_ROWS = 2**31 - SIZE.value  # a coordinate of a descriptor is an int32


def can_quantize(x: Tensor) -> bool:
    """Whether `quantize_tiles` can quantise this tensor."""
    return is_hopper(x.device) and x.itemsize == 2 and max(x.shape) < MOST_ROWS and have_descriptors(x)


def quantize_tiles(
    x: Tensor, splits: Tensor | None, forms: tuple[Any, ...], arguments: tuple[Any, ...], recipe: Recipe, format: str,
    square: bool, with_tail: bool, grid: Grid,
) -> None:  # fmt: skip
    """As `quantize_blocks_kernel`, for blocks that span rows, alone or together with blocks along
    rows.
    """
    settings = {name: value for name, value in grid.settings.items() if name not in ("BLOCK_M", "BLOCK_N")}
    launch(quantize_tiles_kernel, (grid.programs,))(
        described(x, [SIZE.value, SIZE.value]),
        *splits_arguments(splits),
        *forms,
        *arguments,
        FORMAT=format,
        POWER_OF_TWO=bool(recipe.power_of_two_scales),
        SQUARE=square,
        WHOLE=with_tail,
        **settings,
        **NO_FP_FUSION,
    )
