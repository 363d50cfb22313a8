"""torchao's MX casts: MXFP8 by rows, scales rounded up."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evidence.oracles.compare import EITHER, OURS, Comparison, Known
from evidence.oracles.random_inputs import blocks
from evidence.oracles.te_quantization import ROLE, Part, bad, of_rows, reference
from moe_ref.config import Recipe

PEER = "torchao's MX casts"
PACKAGES = ("torchao==0.18.0",)
SOURCE = None

NOT_FINITE = (
    "an infinity or a NaN in the block: OCP MX leaves the scale open; torchao's is NaN, moe_ref's as the "
    "kernel of Transformer Engine's, whose maximum passes over NaN"
)
LOGARITHM = (
    "the scale is the logarithm rounded up, and float32 has lost that the quotient is above a power of two: "
    "the largest value is cut"
)
UNSCALED = "a scale of code 0: torchao does not scale the block, and its codes are 0"


def comparisons(source: Path | None) -> Iterator[Comparison]:
    """E4M3 and E5M2, of float32 and bfloat16."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    for dtype, format in product((torch.float32, torch.bfloat16), formats):
        largest = torch.finfo(formats[format]).max

        def theirs(x: Tensor, code_dtype: torch.dtype = formats[format]) -> tuple[Tensor, Tensor]:
            scale, data = to_mx(x, code_dtype, 32, ScaleCalculationMode.RCEIL)
            return data.view(torch.uint8), scale.view(torch.uint8).reshape(len(x), -1)

        x = blocks(4096, 32, dtype, largest)
        ours = reference(Recipe("mxfp8", fp8_format="hybrid"), ROLE[format])

        def known(x: Tensor, out: Tensor, ours: Any = ours, theirs: Any = theirs) -> list[Known]:
            scale = ours(x)[1]
            half = theirs(x)[1].int() + 1 == scale.int()
            return [
                Known(NOT_FINITE, EITHER, of_rows(x, bad, out)),
                Known(UNSCALED, OURS, (scale == 0).expand(out.shape)),
                Known(LOGARITHM, OURS, half.expand(out.shape)),
            ]

        yield from Part(ours, theirs).compared(f"MXFP8 {format}", x, known, per=1)
