"""The result of `quantize`: its codes, scales and amax in the shapes of the reference, and its
values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION, number_bits
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import INTERPRETED, casts_in_hardware, strided
from moe_fast.launch.operators import as_operators, has_memory, launch, record, traceable
from moe_fast.launch.specialization import DIVISOR
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.quantization import _hadamard as hadamard
from moe_fast.quantization._dequantize import dequantize_kernel
from moe_ref.config import Recipe, check_splits, require
from moe_ref.config.quantization import SCALE_LAYOUTS

FLOAT32_MAX = torch.finfo(torch.float32).max
KERNEL_OF = {
    "delayed": "group",
    "current": "group",
    "block": "amax",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}  # the kernels' names


@record
@dataclass(frozen=True)
class Form:
    """The codes and scales of a tensor along one direction, as the kernels keep them.

    There is one scale per group, or one per block, in the orientation of x, with room for as many
    rows of blocks as any splits may have. Past the blocks that exist, values are unspecified.
    """

    codes_MN: Tensor  # uint8, contiguous; 0 past the last group; [0,N] if there is only `turned_NT`
    scale: Tensor  # [G], or [rows of blocks, columns of blocks]
    amax: Tensor  # in the shape of `scale`, and the dtype of x or float32 (NVFP4: see `per`); or [0]
    block: tuple[int, int] | None  # rows and columns that share a scale; None: a group
    per: str = "group"  # NVFP4: there is one amax per "group" [G], "row" [M], or "column" of a group [G,N]
    largest: float = 448.0  # NVFP4: the largest scale of a block
    transformed: bool = False  # whether the codes are of the Hadamard transform
    # for products with block scaling: transposed codes, in which each group begins at a tile of 128
    # rows, and its last tile ends with zeros
    turned_NT: Tensor | None = None


@record
@dataclass(frozen=True)
class Quantized:
    """The result of `quantize`; see `codes`, `scales`, `amax` and `dequantize`."""

    recipe: Recipe
    format: str
    dtype: torch.dtype
    splits: Tensor | None
    source: Tensor | None  # where x stands in autograd's graph, without memory of its own
    rowwise: Form | None
    columnwise: Form | None  # may be the same form as by rows

    def form(self, columnwise: bool) -> Form:
        """The form by columns, or the form by rows."""
        chosen = self.columnwise if columnwise else self.rowwise
        require(chosen is not None, "columnwise", columnwise, "a direction that quantize was asked for")
        assert chosen is not None
        return chosen


def format_of(recipe: Recipe, role: str) -> str:
    """The format of a role's codes."""
    if recipe.scaling == "nvfp4":
        return "e2m1"
    return "e5m2" if recipe.fp8_format == "hybrid" and role == "grad_output" else "e4m3"


def scale_limits(recipe: Recipe, dtype: torch.dtype) -> tuple[int, int]:
    """(the least amax, the scale on overflow), as the kernels take them."""
    infinity = FLOAT32_MAX if dtype == torch.float64 else torch.finfo(dtype).max
    return number_bits(recipe.amax_epsilon or 0.0), number_bits(infinity)


def splits_arguments(splits: Tensor | None) -> tuple[Any, ...]:
    """The splits and their stride, as kernels take them: one compiled version serves int32 and
    int64.
    """
    return strided(None if splits is None else splits.to(torch.int64), 1)


def encoding(recipe: Recipe, format: str, device: torch.device) -> dict[str, Any]:
    """The constants of kernels that encode."""
    power_of_two, hardware = bool(recipe.power_of_two_scales), casts_in_hardware(device)
    return {"FORMAT": format, "POWER_OF_TWO": power_of_two, "HARDWARE": hardware}


@traceable
def codes(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The codes, [M,N] uint8, 0 in rows past the last group; E2M1 codes in the low four bits."""
    return quantized.form(columnwise).codes_MN


def scales(quantized: Quantized, *, columnwise: bool = False, layout: str = "compact") -> Any:
    """The scales to decode with: float32 1/s, or uint8 codes of E8M0 (MXFP8) or E4M3 (NVFP4).

    If a group has more than one scale, the shapes depend on the splits, which the host reads.
    """
    require(layout in SCALE_LAYOUTS, "layout", repr(layout), f"one of {', '.join(SCALE_LAYOUTS)}")
    form = quantized.form(columnwise)
    if form.block is None:
        scale = _shown(form.scale, quantized, form)
        return scale if layout == "compact" else tuple(scale.split(1))
    counts, block_scales = _compact(quantized, form, form.scale, columnwise)
    if layout == "compact":
        return block_scales
    scaling = quantized.recipe.scaling
    return tuple(
        _for_gemm(group_scales.T if columnwise else group_scales, scaling, turned=min(form.block) == 1)
        for group_scales in block_scales.split(counts)
    )


def _compact(quantized: Quantized, form: Form, blocks: Tensor, columnwise: bool) -> tuple[list[int], Tensor]:
    """(rows per group, one value per block). For MXFP8 and NVFP4 the value of a square block is
    repeated for each of its rows.
    """
    assert form.block is not None
    sizes = _sizes(quantized, form)
    counts = [ceil_div(size, form.block[0]) for size in sizes]
    existing_blocks = blocks[: sum(counts)]
    if quantized.recipe.scaling == "block" or min(form.block) == 1:
        return counts, existing_blocks
    return counts if columnwise else sizes, existing_blocks.repeat_interleave(form.block[0], 1 if columnwise else 0)


def _sizes(quantized: Quantized, form: Form) -> list[int]:
    """How many rows each group has. It waits for the device, and raises `ValueError` for illegal
    splits.
    """
    num_rows = form.codes_MN.shape[0]
    if quantized.splits is None:
        return [num_rows]
    sizes: list[int] = quantized.splits.tolist()
    check_splits(sizes, num_rows, quantized.recipe)
    return sizes


def _shown(values_G: Tensor, quantized: Quantized, form: Form) -> Tensor:
    """One value per group, or NaN if the splits are illegal; it does not wait for the device."""
    splits = quantized.splits
    if splits is None:
        return values_G
    is_illegal = (splits < 0).any() | (splits > form.codes_MN.shape[0]).any() | (splits.sum() > form.codes_MN.shape[0])
    return torch.where(is_illegal, torch.nan, values_G)


def _for_gemm(scale: Tensor, scaling: str, turned: bool) -> Tensor:
    """One group's scales, in the form's own orientation, as a matrix product reads them."""
    if scaling == "block":
        scale = scale.T if turned else scale
        return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    return (
        padded.unflatten(1, (padded.shape[1] // 4, 4))
        .unflatten(0, (len(padded) // 128, 4, 32))
        .permute(0, 3, 2, 1, 4)
        .flatten()
    )


def amax(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """max |x| of the elements of each scale, float32. For delayed scaling it is the amax of this
    step.

    If a group has more than one scale, the host reads the splits.

    Raises:
        ValueError: also for rows from a dispatch, because no amax travels.
    """
    form = quantized.form(columnwise)
    require(
        form.amax.numel() > 0 or form.scale.numel() == 0,
        "quantized",
        "from a dispatch",
        "made by a quantizer: amax does not travel",
    )
    if form.per == "row":
        return form.amax[: sum(_sizes(quantized, form))]
    if form.amax.dim() == 1:
        return _shown(form.amax, quantized, form)
    if form.per == "column":
        return form.amax
    return _compact(quantized, form, form.amax, columnwise)[1].float()


@traceable
def dequantize(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The values of the codes, [M,N] in the dtype of x, and 0 in rows past the last group; by one
    launch.

    For a form by columns of NVFP4 with a Hadamard transform, they are the values of the transform.
    """
    return _StraightThrough.apply(quantized.source, quantized, quantized.form(columnwise))


def _dequantize(quantized: Quantized, form: Form) -> Tensor:
    """The values of one form."""
    codes_MN, rule = form.codes_MN, KERNEL_OF[quantized.recipe.scaling]
    sizes = tuning.for_device(codes_MN.device).quantize
    block = form.block or (1, 1)
    tall = block[0] > 1
    aligned = rule in ("group", "nvfp4") or (rule == "amax" and tall)
    rows = block[0] if rule == "amax" and tall else None
    walk = sizes.tall if rows else sizes.columns if tall else sizes.groups
    ragged = is_ragged(codes_MN.shape[1])
    grid = grid_of(codes_MN.shape, quantized.splits, walk, aligned, block, rows, ragged=ragged)
    # dequantize_kernel writes all of it
    out = torch.empty(codes_MN.shape, dtype=quantized.dtype, device=codes_MN.device)
    launch(dequantize_kernel, (grid.programs,), codes_MN)(
        codes_MN,
        form.scale,
        *((0, 0) if form.block is None else form.scale.stride()),
        form.amax if rule == "nvfp4" else None,
        *splits_arguments(quantized.splits),
        out,
        *codes_MN.shape,
        *grid.sizes,
        3 if quantized.format == "e4m3" else 2,
        1 / (6 * form.largest),
        RULE=rule,
        PER=form.per,
        ALIGNED=aligned,
        BLOCK_R=block[0],
        BLOCK_C=block[1],
        **grid.settings,
        **NO_FP_FUSION,
    )
    return out


@as_operators
class _StraightThrough(torch.autograd.Function):
    """The values in the forward; in the backward the gradient goes to the source."""

    @staticmethod
    def forward(ctx: Any, source: Tensor | None, quantized: Quantized, form: Form) -> Tensor:
        ctx.transformed = form.transformed
        return _dequantize(quantized, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_value: Tensor) -> tuple[Tensor, None, None]:
        return _hadamard_adjoint(d_value) if ctx.transformed else d_value, None, None


def _hadamard_adjoint(d_value: Tensor) -> Tensor:
    """The adjoint of the transform, each sum rounded once to its dtype."""
    d_value = d_value.resolve_neg()  # because a kernel reads memory, without the pending minus
    grid = grid_of(
        d_value.shape, None, tuning.for_device(d_value.device).quantize.transformed, True, (hadamard.SIZE.value, 1)
    )
    # hadamard_adjoint_kernel writes all of it
    out = torch.empty(d_value.shape, dtype=d_value.dtype, device=d_value.device)
    if has_memory() and grid.programs:
        sizes = {name: grid.settings[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps")}
        launch(hadamard.hadamard_adjoint_kernel, (grid.programs,), d_value)(
            *strided(d_value), out, *d_value.shape, grid.column_programs, grid.steps, **sizes, **NO_FP_FUSION
        )
    return out


# --- how the kernels cut a tensor

NARROW = 32 if INTERPRETED else 256  # least columns of a tile of short rows
# lanes of a search for a tile's group, at least. Quantisers of blocks take as long with more, the
# others take up to 13 % longer with 8 groups.
LEAST_GROUPS, LEAST_GROUPS_OF_BLOCKS = (16, 16) if INTERPRETED else (64, 256)
MOST_WARPS = 16 if torch.version.hip else 32  # a program has at most 1024 threads
RAGGED = 256  # elements of a warp


@dataclass(frozen=True)
class Grid:
    """How a tensor is cut into tiles."""

    groups: int
    tiles: int  # along the rows; at least as many as any splits need
    column_programs: int  # programs that share a tile's rows
    steps: int  # tiles side by side that one program takes
    settings: dict[str, int]  # block sizes and warps

    @property
    def programs(self) -> int:
        return self.tiles * self.column_programs

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The last three sizes that the kernels take."""
        return self.groups, self.column_programs, self.steps


def is_ragged(*lengths: int) -> bool:
    """Whether one of these widths and strides is no multiple of what kernels are compiled for: rows
    are then read and written element by element, not in whole lines.
    """
    return any(length % DIVISOR for length in lengths)


def warps_for(tile: tuning.Tile, elements: int, ragged: bool) -> int:
    """The number of a tile's warps. A `ragged` tile has more, because each element has an address
    of its own, and a thread has registers for few addresses.
    """
    return max(tile.num_warps, min(elements // RAGGED, MOST_WARPS)) if ragged else tile.num_warps


def grid_of(
    shape: torch.Size, splits: Tensor | None, walk: tuning.Walk, aligned: bool, least: tuple[int, int] = (1, 1),
    rows: int | None = None, *, ragged: bool = False, least_groups: int = LEAST_GROUPS,
) -> Grid:  # fmt: skip
    """The tiles of `walk`, at least as large as a block, or `rows` rows high. With `aligned` each
    group is cut from its first row on.

    Compiled tiles are as wide as possible, and the search for the group of a tile has at least
    `least_groups` lanes, so that one configuration serves all widths and few or many groups.
    """
    num_rows, num_columns = shape
    groups = 1 if splits is None else len(splits)
    block_m = rows or max(walk.tokens, least[0])
    narrow = NARROW if INTERPRETED else walk.columns
    block_n = max(min(walk.columns, power_of_two(num_columns, least=narrow)), least[1])
    # the rest of x is one more; each has a last tile that may be partial
    pieces = groups + 1 if aligned and splits is not None else 1
    tiles = (num_rows + pieces * (block_m - 1)) // block_m
    steps = min(walk.steps, max(ceil_div(num_columns, block_n), 1))
    settings = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_G": power_of_two(groups + 1, least=least_groups),
        "STAGES": walk.stages,
        "num_warps": warps_for(walk, block_m * block_n, ragged),
    }
    settings |= {} if walk.registers is None or ragged else {"maxnreg": walk.registers}
    return Grid(groups, tiles, max(ceil_div(num_columns, block_n * steps), 1), steps, settings)
