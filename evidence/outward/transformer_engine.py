"""Transformer Engine's names of quantisers, permutation and router, over `moe_fast`."""

import copy
import os
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from evidence.outward.modules import moe_fast, not_offered, stub
from moe_fast.te import shim
from moe_ref.config import Recipe

DType = Enum("DType", "kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1 kByte kInt32 kInt64")
TORCH_TYPES = {
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
Format = Enum("Format", "BYTEMAP BITMAP_U8")
HistogramMode = Enum("HistogramMode", "TWO_KERNEL FUSED_ATOMIC")


class QuantizedTensorStorage:
    """The base class of the results of Transformer Engine's own reference quantisers."""


class Quantizer:
    """The base class of quantisers: which directions they make."""

    optimize_for_gemm = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True, **_: Any) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def copy(self) -> "Quantizer":
        return copy.copy(self)

    def make_empty(self, *_: Any, **__: Any) -> None:
        """Nothing: `update_quantized` returns its result."""

    def update_quantized(self, x: Tensor, _: Any = None) -> SimpleNamespace:
        return self(x)

    def __call__(self, x: Tensor) -> SimpleNamespace:
        return self.split(x, [x.shape[0]])[0]

    def recipe(self) -> tuple[Recipe, str]:
        """The recipe and the role of the same meaning."""
        raise NotImplementedError

    def split(self, x: Tensor, sizes: list[int]) -> list[SimpleNamespace]:
        """Quantise each group of rows; one result per group."""
        recipe, role = self.recipe()
        splits = None if len(sizes) == 1 else torch.tensor(sizes, device=x.device)
        directions = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        quantized, _ = moe_fast.quantize(x, recipe, role=role, splits=splits, **directions)
        results = [SimpleNamespace() for _ in sizes]
        for columnwise, direction in enumerate(("rowwise", "columnwise")):
            values: Any = [(None, None, None)] * len(sizes)
            if directions[direction]:
                values = self.parts(quantized, bool(columnwise), sizes)
            for result, (codes, scale, amax) in zip(results, values, strict=True):
                vars(result).update(
                    {f"_{direction}_data": codes, f"_{direction}_scale_inv": scale, f"_amax_{direction}": amax}
                )
        return results

    def parts(self, quantized: Any, columnwise: bool, sizes: list[int]) -> list[tuple[Any, ...]]:
        """(codes, scales, amax) of each group, in Transformer Engine's orientation."""
        codes = moe_fast.codes(quantized, columnwise=columnwise).split(sizes)
        scales = moe_fast.scales(quantized, columnwise=columnwise, layout="gemm")
        return [
            (group_codes.T.contiguous() if columnwise else group_codes, s, None)
            for group_codes, s in zip(codes, scales, strict=True)
        ]


class Float8BlockQuantizer(Quantizer):
    """Blocks of 1 × 128 or 128 × 128."""

    def __init__(self, fp8_dtype: DType, *, block_scaling_dim: int = 2, amax_epsilon: float = 0.0,
                 force_pow_2_scales: bool = True, **directions: Any) -> None:  # fmt: skip
        super().__init__(**directions)
        self.dtype, self.square = fp8_dtype, block_scaling_dim == 2
        self.epsilon, self.power_of_two = amax_epsilon, force_pow_2_scales

    def recipe(self) -> tuple[Recipe, str]:
        is_e5m2 = self.dtype is DType.kFloat8E5M2
        if is_e5m2 and self.square:
            not_offered("square blocks of E5M2")
        recipe = Recipe(
            "block",
            fp8_format="hybrid" if is_e5m2 else "e4m3",
            power_of_two_scales=self.power_of_two,
            amax_epsilon=float(self.epsilon),
        )
        return recipe, "weight" if self.square else "grad_output" if is_e5m2 else "input"


class MXFP8Quantizer(Quantizer):
    """Blocks of 32, and scales that are powers of two."""

    def __init__(self, fp8_dtype: DType, **directions: Any) -> None:
        super().__init__(**directions)
        self.dtype = fp8_dtype

    def recipe(self) -> tuple[Recipe, str]:
        is_e5m2 = self.dtype is DType.kFloat8E5M2
        return Recipe("mxfp8", fp8_format="hybrid" if is_e5m2 else "e4m3"), "grad_output" if is_e5m2 else "input"

    def parts(self, quantized: Any, columnwise: bool, sizes: list[int]) -> list[tuple[Any, ...]]:
        codes = moe_fast.codes(quantized, columnwise=columnwise).split(sizes)
        counts = [size // 32 for size in sizes] if columnwise else sizes
        if self.optimize_for_gemm:
            unit = 4 if columnwise else 128  # rows of scales are padded to it
            swizzled = moe_fast.scales(quantized, columnwise=columnwise, layout="gemm")
            heights = [-(-count // unit) * unit for count in counts]
            scales = [group_codes.view(height, -1) for group_codes, height in zip(swizzled, heights, strict=True)]
            return [(group_codes, s, None) for group_codes, s in zip(codes, scales, strict=True)]
        scales = moe_fast.scales(quantized, columnwise=columnwise).split(counts)
        return [(group_codes, s, None) for group_codes, s in zip(codes, scales, strict=True)]


class NVFP4Quantizer(Quantizer):
    """Blocks of 16 with scales in E4M3, and one amax per tensor or row."""

    def __init__(self, fp4_dtype: Any = None, *, with_rht: bool = False, with_2d_quantization: bool = False,
                 stochastic_rounding: bool = False, row_scaled_nvfp4: bool = False, nvfp4_use_4over6: bool = False,
                 nvfp4_e4m3_max: int = 448, nvfp4_4over6_err_mode: str = "MAE", with_random_sign_mask: bool = True,
                 **directions: Any) -> None:  # fmt: skip
        super().__init__(**directions)
        self.hadamard, self.signs, self.square = with_rht, with_random_sign_mask, with_2d_quantization
        self.stochastic, self.row_scaled = stochastic_rounding, row_scaled_nvfp4
        self.four_over_six, self.largest, self.error = nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode

    def recipe(self) -> tuple[Recipe, str]:
        if self.hadamard and self.columnwise_usage and not self.signs:
            not_offered("the Hadamard transform without signs")
        if self.four_over_six and os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH") == "1":
            not_offered("errors of four over six in approximate arithmetic")
        if self.row_scaled and self.four_over_six and self.columnwise_usage:
            not_offered("columns of a row-scaled tensor with four over six")
        recipe = Recipe(
            "nvfp4",
            hadamard=self.hadamard,
            two_dimensional_weights=self.square,
            stochastic_rounding=self.stochastic,
            row_scaled_activation=self.row_scaled,
            four_over_six="all" if self.four_over_six else "none",
            four_over_six_bound_256="all" if self.largest == 256 else "none",
            four_over_six_error=self.error.lower(),
        )
        return recipe, "weight" if self.square else "grad_output" if self.stochastic else "input"

    def parts(self, quantized: Any, columnwise: bool, sizes: list[int]) -> list[tuple[Any, ...]]:
        codes = moe_fast.codes(quantized, columnwise=columnwise).split(sizes)
        codes_of = [group_codes.T.contiguous() if columnwise else group_codes for group_codes in codes]
        packed = [group_codes[:, 0::2] | group_codes[:, 1::2] << 4 for group_codes in codes_of]
        if self.optimize_for_gemm and self.hadamard:
            swizzled = moe_fast.scales(quantized, columnwise=columnwise, layout="gemm")
            scales = [
                s.view(group_codes.shape[0], -1) if s.numel() else s
                for group_codes, s in zip(codes_of, swizzled, strict=True)
            ]
        else:
            compact = moe_fast.scales(quantized, columnwise=columnwise)
            counts = [size // 16 for size in sizes] if columnwise else sizes
            scales = [
                group_codes.T.contiguous() if columnwise else group_codes for group_codes in compact.split(counts)
            ]
        amax = moe_fast.amax(quantized, columnwise=columnwise)
        amaxes = amax.flatten().split([amax.numel() // len(sizes)] * len(sizes))
        return list(zip(packed, scales, amaxes, strict=True))


def permute(inp: Tensor, routing_map: Tensor, num_out_tokens: Any = None, max_token_num: int = -1,
            map_type: str = "mask") -> Any:  # fmt: skip
    """`moe_permute`; an index map becomes the multihot map of the same order of rows."""
    if not isinstance(inp, Tensor):
        not_offered("permutation of quantised tensors")
    if map_type == "mask":
        return shim.moe_permute(inp, routing_map, num_out_tokens)
    indices = routing_map.view(len(inp), -1)
    num_experts = int(indices.max()) + 1 if indices.numel() else 1
    multihot, _ = moe_fast.indices_to_multihot(
        indices, torch.ones_like(indices, dtype=inp.dtype), num_experts=num_experts
    )
    rows, row_map = shim.moe_permute(inp, multihot, num_out_tokens)
    return rows, SimpleNamespace(row_map=row_map, indices=indices, num_experts=num_experts)


def unpermute(
    inp: Tensor, row_id_map: Any, merging_probs: Tensor | None = None, *settings: Any, **named: Any
) -> Tensor:
    """`moe_unpermute`; see `permute`."""
    if not isinstance(row_id_map, SimpleNamespace):
        return shim.moe_unpermute(inp, row_id_map, merging_probs, *settings, **named)
    probs = merging_probs
    if probs is not None:
        probs = moe_fast.indices_to_multihot(row_id_map.indices, probs, num_experts=row_id_map.num_experts).probs
    return shim.moe_unpermute(inp, row_id_map.row_map, probs)


class Padding(torch.nn.Module):
    """`Fp8Padding`, or with `back` its inverse, by stock operators."""

    back = False

    def __init__(self, num_gemms: int, align_size: int = 16) -> None:
        super().__init__()
        self.align = align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> Any:
        padded = [-(-size // self.align) * self.align for size in m_splits]
        chunks = inp.split(padded if self.back else m_splits)
        if self.back:
            return torch.cat([chunk[:size] for chunk, size in zip(chunks, m_splits, strict=True)])
        sizes = zip(chunks, padded, strict=True)
        return torch.cat([pad(chunk, (0, 0, 0, size - len(chunk))) for chunk, size in sizes]), padded


def fused_topk(logits: Tensor, *arguments: Any, topk_indices: Tensor | None = None, routing_map_format: Any = None,
               qb_histogram: Any = None, **settings: Any) -> Any:  # fmt: skip
    """`fused_topk_with_score_function`; indices are read off the map."""
    if qb_histogram is not None or routing_map_format is Format.BITMAP_U8:
        not_offered("a histogram of scores, and maps of bits")
    probs, routing_map = shim.fused_topk_with_score_function(logits, *arguments, **settings)
    if topk_indices is None:
        return probs, routing_map
    topk = topk_indices.shape[-1]
    order = torch.argsort(routing_map.int(), dim=-1, descending=True, stable=True)[..., :topk]
    return probs, topk_indices.copy_(order)


def aux_loss_score(logits: Tensor, topk: int, score_function: str, routing_map_format: Any = None) -> Any:
    """`fused_compute_score_for_moe_aux_loss`."""
    if routing_map_format is Format.BITMAP_U8:
        not_offered("maps of bits")
    return shim.fused_compute_score_for_moe_aux_loss(logits, topk, score_function)


def named_recipe(name: str) -> type:
    """A class of `transformer_engine.common.recipe`, which answers by its name alone."""
    kinds = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4")
    members = {kind: classmethod(lambda cls, kind=kind: kind == cls.kind) for kind in kinds}
    return type(name, (), {"kind": name, **members})


def available(return_reason: bool = False) -> Any:
    """Each recipe runs on each device."""
    return (True, "") if return_reason else True


def install() -> None:
    """Stubs of the package; its Python references are read from the fetched files."""
    folder = Path(os.environ["OUTWARD_SOURCES"]) / "transformer_engine"
    recipes = {
        "delayed": "DelayedScaling",
        "float8_current_scaling": "Float8CurrentScaling",
        "float8_block_scaling": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    stub("transformer_engine")
    stub("transformer_engine.common")
    members: dict[str, Any] = {name: named_recipe(kind) for kind, name in recipes.items()}
    stub("transformer_engine.common.recipe", **members)
    functions = {name: member for name, member in vars(shim).items() if name.startswith("moe_")}
    functions |= {"moe_permute": permute, "moe_unpermute": unpermute}
    functions |= {f"is_{kind}_available": available for kind in ("bf16", "fp8", "mxfp8", "nvfp4", "fp8_block_scaling")}
    quantizers = {x.__name__: x for x in (Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)}
    stub(
        "transformer_engine.pytorch",
        folder / "pytorch",
        DType=DType,
        Fp8Padding=Padding,
        Fp8Unpadding=type("Unpadding", (Padding,), {"back": True}),
        get_device_compute_capability=torch.cuda.get_device_capability,
        **functions,
        **quantizers,
    )
    stub("transformer_engine.pytorch.constants", TE_DType=TORCH_TYPES)
    stub(
        "transformer_engine.pytorch.quantized_tensor",
        QuantizedTensorStorage=QuantizedTensorStorage,
        Quantizer=Quantizer,
    )
    stub("transformer_engine.pytorch.tensor")
    stub("transformer_engine.pytorch.tensor.utils")
    stub("transformer_engine.pytorch.custom_recipes", folder / "pytorch" / "custom_recipes")
    stub(
        "transformer_engine.pytorch.router",
        QBHistogramMode=HistogramMode,
        RoutingMapFormat=Format,
        fused_topk_with_score_function=fused_topk,
        fused_compute_score_for_moe_aux_loss=aux_loss_score,
        fused_moe_aux_loss=shim.fused_moe_aux_loss,
    )
    split = lambda x, sizes, quantizers, **_: quantizers[0].split(x, list(sizes))  # noqa: E731
    stub("transformer_engine_torch", DType=DType, split_quantize=split)
