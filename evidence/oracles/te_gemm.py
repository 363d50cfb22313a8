"""The matrix product of block-scaled FP8 in Transformer Engine's tests, read from its source:
forward and both gradients, from the codes and scales that both sides share.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import Comparison, compare
from evidence.oracles.random_inputs import generator
from evidence.oracles.source import load
from evidence.oracles.te_router import placed
from moe_ref.config import Recipe

PEER = "the block-scaled matrix product in Transformer Engine's tests"
PACKAGES: tuple[str, ...] = ()
SOURCE = "NVIDIA/TransformerEngine"

SHAPES = ((1, 16, 16), (48, 128, 144), (160, 272, 256))  # rows, columns in, columns out
LINE, SQUARE = (1, 128), (128, 128)
TILE = {"input": LINE, "grad_output": LINE, "weight": SQUARE}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RULE = "within (K + 8) · 2^-23 of Σ |a b|, with K products"


def fma(y: Tensor, x: Tensor, s: Tensor) -> Tensor:
    """y + x s with one rounding, stored in y, in place of the source's kernel for a GPU."""
    return y.copy_(y.double() + x.double() * s.double())


class Operand:
    """Codes and scales of a tensor, as a product over its columns reads them; with `turned`, over
    its rows.
    """

    def __init__(self, x: Tensor, recipe: Recipe, role: str, turned: bool = False) -> None:
        q = moe_ref.quantize(x, recipe, role=role, columnwise=True).quantized
        codes, scales, value = (f(q, columnwise=turned) for f in (moe_ref.codes, moe_ref.scales, moe_ref.dequantize))
        e5m2 = role == "grad_output" and recipe.fp8_format == "hybrid"
        codes = codes.T if turned else codes
        self.codes = codes.contiguous().view(FP8["e5m2" if e5m2 else "e4m3"])
        self.scales = scales.T.contiguous() if turned else scales
        self.magnitude = (value.T if turned else value).double().abs()
        self.tile = TILE[role]


def comparisons(source: Path) -> Iterator[Comparison]:
    """Forward, and the gradients of rows and weights."""
    file = source / "tests/pytorch/references/blockwise_fp8_gemm_reference.py"
    gemm = load(file, ["CuBLASRefBlockwiseGemm"], fused_fma=fma).CuBLASRefBlockwiseGemm().qgemm
    for shape, format, powers in product(SHAPES, ("e4m3", "hybrid"), (True, False)):
        yield from products(gemm, shape, Recipe("block", fp8_format=format, power_of_two_scales=powers))


def products(gemm: Callable[..., Tensor], shape: tuple[int, int, int], recipe: Recipe) -> Iterator[Comparison]:
    """All three of one shape, in float32."""
    rows, columns, width = shape
    drawn = generator(rows)
    x, weight = torch.randn(rows, columns, generator=drawn), torch.randn(width, columns, generator=drawn)
    d_out, counts = torch.randn(rows, width, generator=drawn), torch.tensor([rows])
    weights = weight[None]
    pairs: dict[str, tuple[Any, Operand, Operand]] = {
        "forward": (
            moe_ref.grouped_linear(x, weights, counts, recipe=recipe),
            Operand(x, recipe, "input"),
            Operand(weight, recipe, "weight"),
        ),
        "gradient of the rows": (
            moe_ref.grouped_dgrad(d_out, weights, counts, recipe=recipe),
            Operand(d_out, recipe, "grad_output"),
            Operand(weight, recipe, "weight", turned=True),
        ),
        "gradient of the weight": (
            moe_ref.grouped_wgrad(d_out, x, counts, recipe=recipe)[0],
            Operand(d_out, recipe, "grad_output", turned=True),
            Operand(x, recipe, "input", turned=True),
        ),
    }
    for name, (ours, a, b) in pairs.items():
        theirs = gemm(a.codes, b.codes, torch.float32, a.scales, b.scales, a.tile, b.tile, use_split_accumulator=True)
        bound = (a.codes.shape[1] + 8) * 2.0**-23 * (a.magnitude @ b.magnitude.T)
        text = f"{shape} {recipe.fp8_format}, powers of two {recipe.power_of_two_scales}"
        yield compare(name, ours, theirs, case=partial(placed, text), bound=bound.float(), rule=RULE)
