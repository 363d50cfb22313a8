"""Launches of the products for NVIDIA's Hopper."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_fast.experts import _hopper, _hopper_codes, _hopper_gated, _hopper_rows
from moe_fast.experts._linear import SEGMENT_ROWS
from moe_fast.experts.activations import CURVES, Settings
from moe_fast.experts.segments import DESCRIBED_SIZE, Plan, programs
from moe_fast.launch.descriptors import described, layout_of
from moe_fast.launch.prepared import launch
from moe_fast.launch.tuning import ceil_div
from moe_fast.quantization.gathered import Gathered

# Measured on an H200 (docs/results/experts.json). A ring's stages and the tile that leaves
# share 227 KiB.
OUTER = {"STAGES": 6, "BLOCK_P": 32, "BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 8}
MATMUL = {"STAGES": 3, "num_warps": 4}
MATMUL_TILE = tuple(getattr(_hopper_rows, side).value for side in ("HEIGHT", "DEPTH", "WIDTH"))
MATMUL_ROWS = MATMUL_TILE[0] * _hopper_rows.GROUPS.value  # of a tile: both groups' rows
BAND = 8  # blocks of outputs that share blocks of inputs in the L2
HEIGHT = _hopper_codes.HEIGHT.value
CODES = _hopper_codes.CODES.value
STAGES = {3: 4, 2: 5}  # by the number of groups
LARGE = 384  # rows of an expert, on average: three groups then waste few rows of their tiles


def outer_products(d_out_PM: Tensor, rows_PN: Tensor, plan: Plan, out_LMN: Tensor) -> None:
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · rows[p], for operands that have descriptors."""
    block_p, block_m, block_n = (OUTER[f"BLOCK_{letter}"] for letter in "PMN")
    experts, num_outs, num_ins = out_LMN.shape
    pieces = experts * ceil_div(num_outs, block_m) * ceil_div(num_ins, block_n)
    launch(_hopper.outer_products_kernel, (programs(pieces, out_LMN.device),))(
        segments_of(d_out_PM, [block_p, block_m]),
        segments_of(rows_PN, [block_p, block_n]),
        described(out_LMN, [1, block_m, block_n]),
        plan.segment_3L,
        experts,
        num_outs,
        num_ins,
        BAND=BAND,
        **OUTER,
    )


def matmul(
    x_PD: Tensor, matrices: Tensor, turned: bool, bias: tuple[Any, ...], plan: Plan, out_PC: Tensor, filled: bool
) -> None:
    """out[p] = x[p] · weight[e] + bias[e] for operands and a result that have descriptors.

    Args:
        matrices: weight, [L, D, C], or if turned its transposes, [L, C, D].
        bias: a tensor, or none, and its strides.
        plan: of tiles of `MATMUL_ROWS`.
        filled: whether the rows past all segments are written: zeros.
    """
    block_rows, block_depth, block_columns = MATMUL_TILE
    pieces = plan.capacity * ceil_div(out_PC.shape[1], block_columns)
    launch(_hopper_rows.matmul_kernel, (programs(pieces, out_PC.device),))(
        described(x_PD, [block_rows, block_depth]),
        described(matrices, [1, block_columns, block_depth] if turned else [1, block_depth, block_columns]),
        out_PC,
        segments_of(out_PC, [block_rows, block_columns]),
        *bias,
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        out_PC.shape[0] if filled else 0,
        out_PC.shape[1],
        x_PD.shape[1],
        TURNED=turned,
        **MATMUL,
    )


def activated_matmul(
    x: Tensor | Gathered, weight_LCD: Tensor, bias: tuple[Any, ...], probs: tuple[Any, ...], settings: Settings,
    plan: Plan, out_PF: Tensor,
) -> None:  # fmt: skip
    """out[p] = the gated activation of x[p] · weight[e]ᵀ + bias[e], times probs[p], for operands
    and a result that have descriptors.

    Args:
        x: [P, D] rows, or tokens that `can_gather` takes.
        weight_LCD: C = 2F rows, the gates', then the values'.
        bias, probs: each a tensor, or none, and its strides.
        plan: of tiles of `MATMUL_ROWS`.
    """
    high, deep, _wide = MATMUL_TILE
    half, piece = _hopper_gated.HALF.value, _hopper_gated.PIECE.value
    depth, width = weight_LCD.shape[2], out_PF.shape[1]
    source_PD, token_map = (x.tokens_TH, x.token_map) if isinstance(x, Gathered) else (x, (None, 0, None, 0))
    by_half, tiles = weight_LCD.unflatten(1, (2, width)), plan.capacity * ceil_div(width, half)
    launch(_hopper_gated.activated_matmul_kernel, (programs(tiles, out_PF.device),))(
        described(source_PD, [high, deep]),
        *token_map,
        described(by_half, [1, 2, half, deep]),
        out_PF,
        segments_of(out_PF, [high, piece], swizzled=2 * piece),
        *bias,
        *probs,
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        *out_PF.shape,
        depth,
        *settings.numbers(),
        CURVE=CURVES[settings.kind][0],
        CLAMPED=settings.clamp is not None,
        ROUND_FIRST=settings.round_first and probs[0] is not None,
        **MATMUL,
    )


def rows_of_tile(num_rows: int, num_experts: int) -> int:
    """How many rows a tile of codes has: 64 for each group of warps."""
    return HEIGHT * (3 if num_rows >= LARGE * num_experts else 2)


def scaled_matmul(
    codes_PD: Tensor, scales: tuple[Any, ...], matrices_LCD: Tensor, matrix_scales: tuple[Any, ...],
    bias: tuple[Any, ...], plan: Plan, out_PC: Tensor, filled: bool,
) -> None:  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for operands and a result that have descriptors.

    Args:
        scales, matrix_scales, bias: each a tensor, or none, and its strides.
        plan: of tiles of `rows_of_tile`.
        filled: as in `matmul`.
    """
    groups, columns = plan.tile.rows // HEIGHT, ceil_div(out_PC.shape[1], CODES)
    launch(_hopper_codes.scaled_matmul_kernel, (programs(plan.capacity * columns, out_PC.device),))(
        described(codes_PD, [HEIGHT, CODES]),
        described(matrices_LCD, [1, CODES, CODES]),
        out_PC,
        segments_of(out_PC, [HEIGHT, CODES]),
        *scales,
        *matrix_scales,
        *bias,
        plan.tile_4C,
        plan.total_2,
        plan.capacity,
        out_PC.shape[0] if filled else 0,
        out_PC.shape[1],
        codes_PD.shape[1],
        GROUPS=groups,
        STAGES=STAGES[groups],
        num_warps=4,
    )


def scaled_wgrad(
    d_out_MP: Tensor, d_out_scale: Tensor, x_NP: Tensor, x_scale: Tensor, plan: Plan, out_LMN: Tensor
) -> None:
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · x[p], for turned codes and for scales that have
    descriptors."""
    experts, num_outs, num_ins = out_LMN.shape
    pieces = experts * ceil_div(num_outs, 3 * HEIGHT) * ceil_div(num_ins, CODES)
    launch(_hopper_codes.scaled_wgrad_kernel, (programs(pieces, out_LMN.device),))(
        described(d_out_MP, [HEIGHT, CODES]),
        described(d_out_scale, [1, HEIGHT], swizzled=0),
        described(x_NP, [CODES, CODES]),
        described(x_scale, [1, CODES], swizzled=0),
        described(out_LMN, [1, HEIGHT, CODES]),
        plan.segment_3L,
        experts,
        num_outs,
        num_ins,
        BAND=BAND,
        STAGES=STAGES[3],
        num_warps=4,
    )


def segments_of(rows_PC: Tensor, block: list[int], swizzled: int = 128) -> TensorDescriptor:
    """As `expert_slices`: a descriptor of rows that ends where an expert's rows end."""
    stride, num_columns = rows_PC.stride(0), rows_PC.shape[1]
    layout = layout_of(swizzled, rows_PC.itemsize, 4)
    shape = [DESCRIBED_SIZE, DESCRIBED_SIZE, SEGMENT_ROWS, num_columns]
    return TensorDescriptor(rows_PC, shape, [2**34 - stride, stride, stride, 1], [1, 1, *block], layout)
