"""Cases of quantisation computed by hand: literal inputs, codes and scales.

E4M3 is s.eeee.mmm with bias 7, E5M2 s.eeeee.mm with bias 15, E2M1 s.ee.m with bias 1
(0 ½ 1 1½ 2 3 4 6), E8M0 an exponent plus 127.
"""

import math
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.families.quantization.quantize import problem_of
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.config import Recipe

INF, NAN = math.inf, math.nan


def _row(*values: float, columns: int = 0, rows: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values as row 0, padded with zero columns and rows."""
    padded = [*values, *[0.0] * (columns - len(values))]
    return torch.tensor([padded] + [[0.0] * len(padded)] * (rows - 1), dtype=dtype)


def _rows(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _bytes(*rows: Any) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.uint8))


def _exactly(*rows: Any) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.float32))


def _codes(*codes: int, columns: int = 0, rows: int = 1) -> Exact:
    padded = [*codes, *[0] * (columns - len(codes))]
    return _bytes(*[padded] + [[0] * len(padded)] * (rows - 1))


def _of(
    recipe: Recipe,
    x: Tensor,
    steps: str = "quantize",
    gemm: bool = False,
    extra_inputs: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Problem:
    return problem_of({"x": x, "recipe": recipe} | (extra_inputs or {}), settings, steps, gemm)


def _with_gradient(problem: Problem, *cotangent: list[float]) -> Problem:
    return problem_of(problem.required, problem.settings, wanted=("x",), cotangents={"dequantized": _rows(*cotangent)})


PLAIN_FP4 = Recipe("nvfp4", hadamard=False, stochastic_rounding=False)
QUANTIZE: dict[str, tuple[Problem, dict[str, Expectation]]] = {
    "one_scale": (  # 448 / 7 = 64:  64, 128, -192, 448
        _of(Recipe("current"), _row(1, 2, -3, 7)),
        {
            "amax": _exactly(7.0),
            "scales": _exactly(1 / 64),
            "codes": _codes(0x68, 0x70, 0xF4, 0x7E),
            "values": _exactly([1.0, 2, -3, 7]),
        },
    ),
    "halfway_goes_to_the_even_code": (  # codes 16 18 20; 0 2⁻⁹ 2⁻⁸
        _of(Recipe("current"), _row(448, 17, -19, 2.0**-10, 3 * 2.0**-10, -(2.0**-10))),
        {
            "scales": _exactly(1.0),
            "codes": _codes(0x7E, 0x58, 0xDA, 0, 2, 0x80),
            "values": _exactly([448.0, 16, -20, 0, 2.0**-8, -0.0]),
        },
    ),
    "nan_infinity_and_minus_zero": (  # amax skips NaN; with an infinity the scale is 1, ∞ saturates
        _of(Recipe("current"), _rows([NAN, 1, -0.0], [-INF, 3, 0]), splits=torch.tensor([1, 1])),
        {
            "amax": _exactly(1.0, INF),
            "scales": Exact(torch.tensor([1.0, 448]) / torch.tensor([448.0, 448])),
            "codes": _bytes([0x7F, 0x7E, 0x80], [0xFE, 0x44, 0]),
        },
    ),
    "groups_alone_and_rows_behind": (  # 7 · 64; empty group: scale 1; 14 · 32; past the groups: 0
        _of(Recipe("current"), _rows([7], [14], [INF], [NAN]), splits=torch.tensor([1, 0, 1, 0])),
        {
            "amax": _exactly(7.0, 0, 14, 0),
            "scales": _exactly(1 / 64, 1, 1 / 32, 1),
            "codes": _bytes([0x7E], [0x7E], [0], [0]),
            "values": _exactly([7.0], [14], [0], [0]),
        },
    ),
    "the_gradient_is_straight_through": (
        _with_gradient(_of(Recipe("current"), _rows([1000], [3], [5]), splits=torch.tensor([1, 1])), [2], [-3], [4]),
        {"d_x": _exactly([2.0], [-3], [0])},
    ),
    "gradients_in_e5m2": (  # 57344 / 7 = 8192;  1⅛ · 8192 = 4½ · 2048 → 4 · 2048
        _of(Recipe("current"), _row(7, 1, 1.125), role="grad_output"),
        {"scales": _exactly(1 / 8192), "codes": _codes(0x7B, 0x70, 0x70), "values": _exactly([7.0, 1, 1])},
    ),
    "a_power_of_two_below": (  # 448 / 3 > 128; 3 · 128 = 384
        _of(Recipe("block"), _row(3, -1.5)),
        {
            "amax": _exactly([3.0]),
            "scales": _exactly([1 / 128]),
            "codes": _codes(0x7C, 0xF4),
            "values": _exactly([3.0, -1.5]),
        },
    ),
    "blocks_begin_with_each_group": (  # the two directions of a block of one column
        _of(Recipe("block"), _rows([7], [3], [1]), splits=torch.tensor([2, 1]), columnwise=True),
        {
            "scales": _exactly([1 / 64], [1 / 128], [1 / 256]),
            "codes": _bytes([0x7E], [0x7C], [0x78]),
            "scales.columnwise": _exactly([1 / 64], [1 / 256]),
            "codes.columnwise": _bytes([0x7E], [0x74], [0x78]),
        },
    ),
    "the_next_power_of_two": (  # 448 = 2⁰ · 448; 450 = 2¹ · 225 → 2¹ · 224; 2⁻⁹ < 1/448 < 2⁻⁸
        _of(
            Recipe("mxfp8"),
            torch.cat(
                [_row(448, columns=32), _row(450, columns=32), _row(0, 1, columns=32), _row(columns=32, rows=29)]
            ),
        ),
        {
            "scales": _bytes(*[[127], [128], [119]], *[[0]] * 29),
            "codes": _bytes([0x7E, *[0] * 31], [0x76, *[0] * 31], [0, 0x78, *[0] * 30], *[[0] * 32] * 29),
        },
    ),
    "infinity_takes_the_largest_exponent": (  # 1 · 2⁻¹²⁷ underflows
        _of(Recipe("mxfp8"), _row(INF, 1, NAN, columns=32, rows=32)),
        {"scales": _bytes([254], *[[0]] * 31), "codes": _codes(0x7E, 0, 0x7F, columns=32, rows=32)},
    ),
    "two_levels": (  # 6 · 448 / 6 = 448; 448 · 6/6 = 448: x itself. ¼ → 0, ¾ → 1, 2½ → 2, 5 → 4
        _of(PLAIN_FP4, _row(6, 3, 1.5, 0.25, -0.25, 0.75, 2.5, -5, columns=16, rows=16)),
        {
            "amax": _exactly(6.0),
            "scales": _bytes([0x7E], *[[0]] * 15),
            "codes": _codes(7, 5, 3, 0, 8, 2, 4, 14, columns=16, rows=16),
        },
    ),
    "noise_decides": (  # 2½ and 5 are halfway: up if noise < ½; 1 is exact
        _of(
            Recipe("nvfp4"),
            _row(6, 2.5, 2.5, 5, -5, 1, columns=16, rows=16),
            role="grad_output",
            noise=torch.stack([_row(0.75, 0.25, 0.5, 0.75, 0.25, columns=16, rows=16), _row(columns=16, rows=16)]),
        ),
        {"codes": _codes(7, 5, 4, 6, 15, 2, columns=16, rows=16)},
    ),
    "scales_in_their_places": (  # the transpose of a column, padded to four columns
        _of(Recipe("block"), _rows([7], [14]), gemm=True),
        {"scales": _exactly([1 / 64], [1 / 32]), "codes": _bytes([0x7E], [0x7E])},
    ),
    "a_step_learns_from_the_one_before": (  # scale 1: 7; then 448 / 7 = 64: 3½ · 64 = 224
        _of(
            Recipe("delayed", amax_history_len=2), _row(7), "quantize+update+quantize", extra_inputs={"x.1": _row(3.5)}
        ),
        {
            "amax": _exactly(7.0),
            "scales": _exactly(1.0),
            "codes": _codes(0x4E),
            "1.amax": _exactly(3.5),
            "1.scales": _exactly(1 / 64),
            "1.codes": _codes(0x76),
            "state.amax_history": _exactly([3.5, 7]),
            "state.scale": _exactly(64.0),
        },
    ),
    "what_the_other_ranks_saw": (  # group 0: 14 on another rank; group 1: no reduced amax
        _of(
            Recipe("delayed", amax_history_len=1),
            _rows([7], [28]),
            "quantize+reduced+reload+quantize",
            extra_inputs={"x.1": _rows([14], [56]), "reduced_amax": torch.tensor([14.0, 0.0])},
            splits=torch.tensor([1, 1]),
        ),
        {"1.scales": _exactly(1 / 32, 1 / 16), "1.codes": _bytes([0x7E], [0x7E]), "1.values": _exactly([14.0], [28.0])},
    ),
    "a_nan_in_the_history_is_passed_over": (  # of a reduced amax; then 448 / 3½ = 128, clear of the history's NaN
        _of(
            Recipe("delayed", amax_history_len=2),
            _row(7),
            "quantize+reduced+quantize+update",
            extra_inputs={"x.1": _row(3.5), "reduced_amax": torch.tensor([torch.nan])},
        ),
        {"scales": _exactly(1.0), "1.scales": _exactly(1.0), "state.scale": _exactly(128.0)},
    ),
}
