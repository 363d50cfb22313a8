"""Quantised GEMMs in the tolerance experiment: honest and planted kernels in three regimes."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Problem
from conformance.families.quantization.cases import RECIPES
from conformance.judge import Bounded
from conformance.judge.ratios import RowWise
from moe_ref.config import Recipe
from tests.honest.low_precision import (
    FourteenBits,
    Part,
    Reciprocal,
    ScaledFirst,
    ScaledLast,
    Source,
    Split,
    Way,
    by_codes,
    make,
    never_promoted,
    of_fourteen_bits,
)
from tests.honest.wrong_products import (
    across_experts,
    in_bfloat16,
    in_e4m3,
    in_high_precision,
    neighbours,
    other_direction,
    parts_with,
    to_nearest,
    untransformed,
)
from tests.judge.tolerance_experiment import REGIMES

COUNTS, IN, OUT = (96, 128, 64), 512, 128  # whole blocks of 16 and 32; of 128 with a remainder
UNEQUAL = (1.0, 0.4, 3.0)  # scale of each expert's weights
PRODUCTS = {"fprop": "grouped_linear", "dgrad": "grouped_dgrad", "wgrad": "grouped_wgrad"}
SCALINGS: dict[str, Recipe] = {
    "FP8": RECIPES["current"][0],
    "FP8 blocks": RECIPES["block"][1],
    "MXFP8": RECIPES["mxfp8"][1],
    "NVFP4": RECIPES["nvfp4"][0],
}
HONEST = {"scaled first": ScaledFirst, "scaled last": ScaledLast, "split": Split}
DECLARING = {
    "14 bits": (FourteenBits, {"accumulator": "hopper_fp8"}),
    "reciprocals": (Reciprocal, {"scale_arithmetic": "reciprocal"}),
}


def declaring(scaling: str, gemm: str) -> list[str]:
    """The applicable entries of DECLARING: with noise and reciprocal scales no code is certain."""
    return [
        name
        for name in DECLARING
        if name != "reciprocals" or not SCALINGS[scaling].stochastic_rounding or gemm == "fprop"
    ]


@dataclass(frozen=True)
class Product:
    """One GEMM and its expectation."""

    problem: Problem
    expected: RowWise | Bounded

    def by(self, kernel: SimpleNamespace) -> Tensor:
        return getattr(kernel, self.problem.function)(*self.problem.required.values(), **self.problem.settings)


def product(scaling: str, gemm: str, regime: str, seed: int = 0, declared: dict[str, Any] | None = None) -> Product:
    """A GEMM of a regime's normal random numbers, bfloat16."""
    source, scale, recipe, rows = np.random.default_rng(seed), REGIMES[regime], SCALINGS[scaling], sum(COUNTS)

    def normal(*shape: int, by: float, spread: int = 0) -> Tensor:
        powers = np.exp2(source.integers(-spread, spread + 1, (shape[0], *[1] * (len(shape) - 1))))
        return torch.from_numpy(source.standard_normal(shape) * by * powers).bfloat16()

    sizes = torch.tensor(UNEQUAL).bfloat16()[:, None, None]
    x, d_out = normal(rows, IN, by=scale.x, spread=scale.spread), normal(rows, OUT, by=scale.x, spread=scale.spread)
    weight = normal(len(COUNTS), OUT, IN, by=scale.gate_up) * sizes
    counts = torch.tensor(COUNTS)
    required = {
        "fprop": {"rows": x, "weight": weight, "tokens_per_expert": counts},
        "dgrad": {"d_out": d_out, "weight": weight, "tokens_per_expert": counts},
        "wgrad": {"d_out": d_out, "rows": x, "tokens_per_expert": counts},
    }[gemm]
    noise = (
        {"noise": torch.from_numpy(source.random((2, rows, OUT))).float()}
        if recipe.stochastic_rounding and gemm != "fprop"
        else {}
    )
    problem = Problem(PRODUCTS[gemm], required, {"recipe": recipe} | noise)
    (expected,) = CONTRACTS[problem.function].expected(None, problem, declared or {}).values()
    assert isinstance(expected, RowWise) or declared  # else most rows have uncertain codes
    return Product(problem, expected)


# ---- bugs


def shorter(source: Source) -> list[Part]:
    """Omits the last 16 of K."""
    return [
        part._replace(code=torch.cat([part.code[:, :-16], torch.zeros_like(part.code[:, -16:])], 1))
        for part in by_codes(source)
    ]


def of_one_expert(change: Callable[[Part], Part]) -> Callable[[Source], list[Part]]:
    return lambda source: [change(part) if e == 1 else part for e, part in enumerate(by_codes(source))]


def scaled_twice(part: Part) -> Part:
    return part._replace(scale=part.scale * part.scale)


def one_rows_scale(part: Part) -> Part:
    """Row 5 is 1/16 too large."""
    return part._replace(
        whole=torch.where(torch.arange(len(part.whole))[:, None] == 5, part.whole * 1.0625, part.whole)
    )


def one_block(part: Part) -> Part:
    """The second half of row 7 takes twice the scale of its first block."""
    scale = part.scale.clone()
    scale[7, part.scale.shape[1] // 2 :] = 2 * part.scale[7, 0]
    return part._replace(scale=scale)


FREE = ("FP8", "FP8 blocks", "NVFP4")  # scales other than powers of two
EVERYWHERE: dict[str, SimpleNamespace] = {
    "high precision instead": make(Way(parts=in_high_precision)),
    "the tail of the contraction dropped": make(Way(parts=shorter)),
    "scaled twice in one expert": make(Way(parts=of_one_expert(scaled_twice))),
    "one row's scale": make(Way(parts=of_one_expert(one_rows_scale))),
    "one block's scale": make(Way(parts=of_one_expert(one_block))),
}
BUGS: list[tuple[str, str, str, SimpleNamespace]] = [  # scaling, product, name, kernel
    *(
        (scaling, gemm, name, kernel)
        for scaling in SCALINGS
        for gemm in PRODUCTS
        for name, kernel in EVERYWHERE.items()
    ),
    *(
        (scaling, gemm, "values in bfloat16", make(Way(parts=in_bfloat16)))
        for scaling in ("FP8", "FP8 blocks")
        for gemm in PRODUCTS
    ),
    *(
        (scaling, gemm, "another expert's weight scale", parts_with(neighbours, role="weight"))
        for scaling in SCALINGS
        for gemm in ("fprop", "dgrad")
    ),
    *(
        (scaling, "dgrad", "E4M3 for E5M2", parts_with(in_e4m3, role="grad_output"))
        for scaling in ("FP8", "FP8 blocks", "MXFP8")
    ),
    *(("FP8 blocks", gemm, "the other direction", make(Way(parts=lambda s: other_direction(s)))) for gemm in PRODUCTS),
    ("FP8 blocks", "wgrad", "blocks in two experts", parts_with(across_experts, role="input")),
    # K = 512 with per-tensor scales: promoted in time, their error is below bfloat16's rounding
    *(("FP8", gemm, "14 bits", make(Way(product=of_fourteen_bits))) for gemm in ("dgrad", "wgrad")),
    *(("FP8", gemm, "14 bits, never promoted", make(Way(product=never_promoted))) for gemm in ("fprop", "wgrad")),
    *(
        ("NVFP4", gemm, "nearest for stochastic", parts_with(to_nearest, role="grad_output"))
        for gemm in ("dgrad", "wgrad")
    ),
    *(
        ("NVFP4", "wgrad", f"no transform of {role}", parts_with(untransformed, role=role))
        for role in ("input", "grad_output")
    ),
]
