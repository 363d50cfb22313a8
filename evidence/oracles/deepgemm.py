"""DeepGEMM's casts, read from its source: FP8 by rows and squares, and the codes of FP4."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from evidence.oracles.compare import EITHER, OURS, Comparison, Known, compare
from evidence.oracles.random_inputs import blocks
from evidence.oracles.source import load
from evidence.oracles.te_quantization import Part, bad, of_rows, reference
from moe_ref.config import Recipe
from moe_ref.dispatch.low_latency import quantize_for_wire
from moe_ref.quantization.formats import E2M1, encode

PEER = "DeepGEMM's casts"
PACKAGES: tuple[str, ...] = ()
SOURCE = "deepseek-ai/DeepGEMM"

NAMES = ["ceil_div", "align", "ceil_to_ue8m0", "per_token_cast_to_fp8", "per_block_cast_to_fp8"]
NAMES += ["_quantize_to_fp4_e2m1"]
SMALL = "an amax below 1e-4: DeepGEMM raises it to 1e-4, the recipe does not"
NOT_FINITE = "an infinity or a NaN in the block, on which DeepGEMM's cast and the recipe's kernel do not agree"
TIES = "a tie: E2M1 rounds to the even code, as the hardware does; DeepGEMM's cast always towards 0"
SIGN = "-0 and NaN: DeepGEMM gives code 0, the hardware's conversion -0 and the largest value"


def wire(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_for_wire`, whose scales are powers of two."""
    codes, scale = quantize_for_wire(x, round_scale=True)
    return codes.view(torch.uint8), scale


def value_of_scale(ours: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Scales of E8M0 as float32."""

    def made(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = ours(x)
        return codes, torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale

    return made


def comparisons(source: Path) -> Iterator[Comparison]:
    """Scales that are powers of two, which all three rules share."""
    read = load(source / "deep_gemm/utils/math.py", NAMES)
    recipes = {size: reference(Recipe(name), "input") for size, name in ((32, "mxfp8"), (128, "block"))}
    pairs = (
        ("FP8 by rows of 128, against the wire of dispatch", wire, 128, read.per_token_cast_to_fp8, 1),
        ("FP8 by rows of 128, against block scaling", recipes[128], 128, read.per_token_cast_to_fp8, 1),
        (
            "FP8 by squares of 128, against block scaling",
            reference(Recipe("block"), "weight"),
            128,
            read.per_block_cast_to_fp8,
            128,
        ),
        ("FP8 by rows of 32, against MXFP8", recipes[32], 32, read.per_token_cast_to_fp8, 1),
    )
    for subject, ours, size, cast, per in pairs:
        for dtype in (torch.float32, torch.bfloat16):
            x = blocks(384, size, dtype, 448.0, special=per == 1)

            def theirs(x: Tensor, cast: Callable = cast, size: int = size) -> tuple[Tensor, Tensor]:
                codes, scale = cast(x, True, size)
                return codes.view(torch.uint8), scale

            def known(x: Tensor, out: Tensor, per: int = per, small: bool = ours is not wire) -> list[Known]:
                little = x.float().abs().reshape(len(x) // per, -1).amax(1) < 2e-4 * small
                little = little.repeat_interleave(per)[:, None].expand(x.shape)
                return [
                    Known(NOT_FINITE, EITHER, of_rows(x, bad, out)),
                    Known(SMALL, EITHER, of_rows(little, torch.Tensor.bool, out)),
                ]

            yield from Part(value_of_scale(ours), theirs).compared(subject, x, known, per=per)
    yield fp4(read._quantize_to_fp4_e2m1)


def fp4(theirs: Callable[[Tensor], Tensor]) -> Comparison:
    """All numbers of bfloat16."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    x = x[torch.sort(torch.where(x.isnan(), torch.inf, x.abs()), stable=True).indices]
    ties = torch.isin(x.abs(), torch.tensor([0.75, 1.75, 3.5]))
    causes = [Known(TIES, OURS, ties), Known(SIGN, OURS, x.isnan() | (x.abs() <= 0.25))]
    return compare(
        "E2M1 codes of every bfloat16",
        encode(x, E2M1),
        theirs(x).view(torch.uint8),
        case=lambda at, _: f"x = {x[at]}",
        known_causes=causes,
    )
