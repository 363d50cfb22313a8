"""torchao's names of its kernels for training in MXFP8, NVFP4 and blocks of FP8, over `moe_fast`.

The package's own files serve everything else: references, tensor classes and layouts.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evidence.outward.modules import moe_fast, not_offered, replace
from moe_ref.config import Recipe

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
ACTIVATION = Recipe("nvfp4", stochastic_rounding=False)
WEIGHT = Recipe("nvfp4", stochastic_rounding=False, hadamard=False)
MXFP8 = Recipe("mxfp8")
BLOCK = Recipe("block", power_of_two_scales=False, amax_epsilon=1e-12)


def nvfp4(x: Tensor, recipe: Recipe, role: str, splits: Tensor | None = None) -> list[Tensor]:
    """Packed codes and swizzled scales by rows, then of the transpose."""
    quantized, _ = moe_fast.quantize(x, recipe, role=role, splits=splits, columnwise=True)
    results = []
    for columnwise in (False, True):
        codes = moe_fast.codes(quantized, columnwise=columnwise)
        codes = codes.T if columnwise else codes
        scales = torch.cat(moe_fast.scales(quantized, columnwise=columnwise, layout="gemm"))
        results += [(codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scales.view(torch.float8_e4m3fn)]
    return results


def check(x: Tensor, signs: Sequence[int], stochastic: bool) -> None:
    """End tests of seeds and of other signs: our noise is an argument, and our signs are fixed."""
    if stochastic or tuple(signs) != SIGNS:
        not_offered("a seed of stochastic rounding, and other signs of the Hadamard transform")


def rht_quantize_row_col(A: Tensor, col_global_amax: Any = None, row_global_amax: Any = None,
                         sign_vector: Sequence[int] = SIGNS, stochastic_rounding: bool = False,
                         **_: Any) -> Any:  # fmt: skip
    """(codes and scales of the transformed transpose, codes and scales of the rows)."""
    check(A, sign_vector, stochastic_rounding)
    codes, scales, t_codes, t_scales = nvfp4(A, ACTIVATION, "input")
    m, n = A.shape
    return t_codes, t_scales.view(n // 128, m // 64, 32, 16), codes, scales.view(m // 128, n // 64, 32, 16)


def group_rht_quantize_row_col(A: Tensor, sign_vector: Sequence[int], offsets: Tensor, num_tensors: int, rows: int,
                               hidden: int, shape_rep: int, row_amax: Any, col_amax: Any, rng_state: Any,
                               stochastic_rounding: bool, *_: Any, **settings: Any) -> Any:  # fmt: skip
    """Per group: (codes and scales of the rows, codes and scales of the transformed transpose)."""
    check(A, sign_vector, stochastic_rounding)
    splits = offsets.diff(prepend=offsets.new_zeros(1))
    codes, scales, t_codes, t_scales = nvfp4(A, ACTIVATION, "input", splits)
    return codes, scales.view(-1, hidden // 16), t_codes, t_scales.view(hidden, -1)


def weight_quantize_2d(W: Tensor, global_amax: Any = None) -> Any:
    """(codes and scales of the rows, codes and scales of the transpose), of 16 × 16 blocks."""
    codes, scales, t_codes, t_scales = nvfp4(W, WEIGHT, "weight")
    m, n = W.shape
    return codes, scales.view(m // 128, n // 64, 32, 16), t_codes, t_scales.view(n // 128, m // 64, 32, 16)


def group_weight_quantize_2d(W: Tensor, global_amax: Any, num_tensors: int) -> Any:
    """The same of each expert; the rows of all experts are one call with splits."""
    experts, m, n = W.shape
    splits = torch.full((experts,), m, device=W.device)
    codes, scales, t_codes, t_scales = nvfp4(W.reshape(-1, n), WEIGHT, "weight", splits)
    return (
        codes.view(experts, m, -1),
        scales.view(experts, m // 128, n // 64, 32, 16),
        t_codes.view(n, experts, -1).transpose(0, 1),
        t_scales.view(experts, n // 128, m // 64, 32, 16),
    )


def amaxes(A: Tensor, sign_vector: Sequence[int] = SIGNS, **_: Any) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of the transformed transpose and of the rows."""
    check(A, sign_vector, False)
    quantized, _state = moe_fast.quantize(A, ACTIVATION, columnwise=True)
    return moe_fast.amax(quantized, columnwise=True)[0], moe_fast.amax(quantized)[0]


def group_amaxes(A: Tensor, sign_vector: Sequence[int], offsets: Tensor, num_tensors: int, *_: Any, **__: Any) -> Any:
    """The same of each group."""
    check(A, sign_vector, False)
    splits = offsets.diff(prepend=offsets.new_zeros(1))
    quantized, _state = moe_fast.quantize(A, ACTIVATION, splits=splits, columnwise=True)
    return moe_fast.amax(quantized, columnwise=True), moe_fast.amax(quantized)


def mxfp8(x: Tensor, scaling_mode: str, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Codes [M,N] and scales, in x's orientation."""
    if scaling_mode != "rceil":
        not_offered("scales that are rounded down")
    rows = x.shape[0]
    if not columnwise:  # rows are quantised by themselves, but ours are multiples of 32
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % 32))
    quantized, _ = moe_fast.quantize(x, MXFP8, rowwise=not columnwise, columnwise=columnwise)
    codes = moe_fast.codes(quantized, columnwise=columnwise).view(torch.float8_e4m3fn)
    return codes[:rows], moe_fast.scales(quantized, columnwise=columnwise).view(torch.float8_e8m0fnu)[:rows]


def to_mxfp8_dim0(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Blocks along rows."""
    return mxfp8(x, scaling_mode, columnwise=False)


def to_mxfp8_dim1(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Blocks along columns; the scales of the transpose."""
    codes, scales = mxfp8(x, scaling_mode, columnwise=True)
    return codes.T.contiguous().T, scales.T.contiguous()


def mxfp8_1x32(x: Tensor, block_size: int = 32, scaling_mode: str = "rceil", **_: Any) -> tuple[Tensor, Tensor]:
    """Blocks along rows; scales in the layout of a matrix product."""
    codes, scales = mxfp8(x, scaling_mode, columnwise=False)
    return codes, importlib.import_module("torchao.prototype.mx_formats.utils").to_blocked(scales).view(x.shape[0], -1)


def mxfp8_32x1(x: Tensor, block_size: int = 32, scaling_mode: str = "rceil", blocked_scale_output: bool = False,
               **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Blocks along columns."""
    if blocked_scale_output:
        not_offered("scales of columns in blocked layout")
    return to_mxfp8_dim1(x, block_size, scaling_mode)


def blocks(role: str, transpose: bool, columnwise: bool = False) -> Any:
    """A quantiser of blocks of 128 in FP8; with `transpose` of the transpose."""

    def quantize(x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
        if block_size != 128:
            not_offered("blocks of 256")
        by_columns = columnwise != transpose and role == "input"
        quantized, _ = moe_fast.quantize(x, BLOCK, role=role, rowwise=not by_columns, columnwise=by_columns)
        codes = moe_fast.codes(quantized, columnwise=by_columns).view(dtype)
        scales = moe_fast.scales(quantized, columnwise=by_columns)
        return (codes.T, scales.T) if transpose else (codes, scales)

    return quantize


def collected(capability: Any = torch.cuda.get_device_capability) -> None:
    """Give back what the test files ask for while they are collected."""
    torch.cuda.get_device_capability = capability


def pad_groups(x: Tensor, ends: Tensor, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of groups that end at `ends`, each padded; where the padded groups begin and end)."""
    rows, experts = x.shape[0], len(ends)
    expert_of = torch.searchsorted(ends.long(), torch.arange(rows, device=x.device), right=True)
    routing_map = torch.nn.functional.one_hot(expert_of.clamp(max=experts - 1), experts).bool()
    most = -(-(rows + experts * alignment) // alignment) * alignment
    out = moe_fast.permute(x, routing_map, align=alignment, num_rows=most)
    last = out.tokens_per_expert.cumsum(0).to(ends.dtype)
    return out.rows, last - out.tokens_per_expert.to(ends.dtype), last


def install() -> None:
    """Let the test files see a device of compute capability 10, and replace the kernels."""
    torch.cuda.get_device_capability = lambda *_: (10, 0)  # until all test files are collected
    replace("torchao.utils", **dict.fromkeys(("is_sm_at_least_100", "is_cuda_version_at_least"), lambda *_: True))
    package = "torchao.prototype.moe_training.nvfp4_training."
    replace(package + "hadamard_quantize_row_col_triton", triton_rht_quantize_row_col=rht_quantize_row_col)
    replace(package + "hadamard_amax_triton", triton_rht_amax=amaxes)
    replace(package + "group_hadamard_amax_triton", triton_group_rht_amax=group_amaxes)
    replace(package + "group_rht_quantize_row_col_triton", triton_group_rht_quantize_row_col=group_rht_quantize_row_col)
    replace(package + "quantize_2d_triton", triton_weight_quantize_2d=weight_quantize_2d)
    replace(package + "group_quantize_2d_triton", triton_group_weight_quantize_2d=group_weight_quantize_2d)
    replace(
        "torchao.prototype.mx_formats.kernels",
        triton_to_mxfp8_dim0=to_mxfp8_dim0,
        triton_to_mxfp8_dim1=to_mxfp8_dim1,
    )
    replace(
        "torchao.prototype.moe_training.kernels.mxfp8",
        mxfp8_quantize_2d_1x32_cutedsl=mxfp8_1x32,
        mxfp8_quantize_2d_32x1_cutedsl=mxfp8_32x1,
        fused_pad_token_groups_cuda=pad_groups,
    )
    available = ("_mxfp8_cuda_kernels_available", "_mxfp8_cutedsl_kernels_available")
    replace("torchao.prototype.moe_training.kernels.mxfp8.quant", **dict.fromkeys(available, True))
    replace(
        "torchao.prototype.blockwise_fp8_training.kernels",
        triton_fp8_blockwise_act_quant_lhs=blocks("input", transpose=False),
        triton_fp8_blockwise_act_quant_rhs=blocks("input", transpose=False, columnwise=True),
        triton_fp8_blockwise_act_quant_transposed_lhs=blocks("input", transpose=True),
        triton_fp8_blockwise_weight_quant_rhs=blocks("weight", transpose=False),
        triton_fp8_blockwise_weight_quant_transposed_rhs=blocks("weight", transpose=True),
    )
