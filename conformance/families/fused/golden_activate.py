"""Hand-computed fused activation and quantisation: literal inputs, codes and scales.

reglu and squared ReLU are exact. E4M3 is s.eeee.mmm with bias 7, E5M2 s.eeeee.mm with bias 15.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.families.fused.activate_and_quantize import problem_of
from conformance.judge import Bounded, Expectation
from conformance.judge.exact import Exact
from moe_ref.config import Recipe

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]
CURRENT, BLOCK = Recipe("current"), Recipe("block")


def _rows(*rows: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def _bytes(*rows: Any) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.uint8))


def _exactly(*rows: Any, dtype: torch.dtype = torch.float32) -> Exact:
    return Exact(torch.tensor(rows, dtype=dtype), "values")


def _numbers(*rows: Any) -> Bounded:
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, torch.zeros_like(value), torch.float32, torch.float32)


def _glu(recipe: Recipe, h: Tensor, **settings: Any) -> Problem:
    return problem_of("glu_and_quantize", {"h": h, "recipe": recipe}, {"kind": "reglu"} | settings)


def _with_gradients(problem: Problem, *cotangent: list[float]) -> Problem:
    wanted = ("h", *(["probs"] if "probs" in problem.settings else []))
    return problem_of(
        problem.function,
        problem.required,
        problem.settings,
        wanted=wanted,
        cotangents={"dequantized": _rows(*cotangent)},
    )


def _relu2(recipe: Recipe, h: Tensor, **settings: Any) -> Problem:
    return problem_of("activation_and_quantize", {"h": h, "recipe": recipe}, settings)


def _of_backward(function: str, recipe: Recipe, d_out: Tensor, h: Tensor, **settings: Any) -> Problem:
    return problem_of(f"{function}_backward_and_quantize", {"d_out": d_out, "h": h, "recipe": recipe}, settings)


# 17/16 lies halfway between E4M3's 1 and 9/8. A prob of 1 + 2^-12 lifts it above; in bfloat16 it
# falls back, and a tie goes to the even 1
_TIE = _rows([448, 0, 1, 0], [17 / 16, 0, 1, 0], dtype=torch.bfloat16)
_LIFT = torch.tensor([1, 1 + 2.0**-12])

GLU_AND_QUANTIZE: Golden = {
    # 1 · 1, 2 · 1, 0, 7 · 2 = 14, times ½ = 7:  448 / 7 = 64, of which 32, 64, 0, 448 are left
    "the_gate_is_in_no_amax": (
        _glu(CURRENT, _rows([1, 2, -100, 7, 1, 1, 1, 2]), probs=torch.tensor([0.5])),
        {
            "amax": _exactly(7.0),
            "scales": _exactly(1 / 64),
            "codes": _bytes([0x60, 0x68, 0, 0x7E]),
            "values": _exactly([0.5, 1, 0, 7]),
        },
    ),
    "one_rounding": (
        _glu(CURRENT, _TIE, probs=_LIFT),
        {
            "amax": _exactly(448.0),
            "codes": _bytes([0x7E, 0], [0x39, 0]),
            "values": _exactly([448.0, 0], [1.125, 0], dtype=torch.bfloat16),
        },
    ),
    "two_roundings_where_that_is_asked_for": (
        _glu(CURRENT, _TIE, probs=_LIFT, round_before_quantize=True),
        {"codes": _bytes([0x7E, 0], [0x38, 0])},
    ),
    # pairs (9, 9) → 7 · (7 + 1) = 56, (1, -9) → 1 · (-7 + 1) = -6;  448 / 56 = 8: 448, -48
    "clamped_and_interleaved": (
        _glu(CURRENT, _rows([9, 9, 1, -9]), clamp=7.0, offset=1.0, interleave=1),
        {"amax": _exactly(56.0), "scales": _exactly(1 / 8), "codes": _bytes([0x7E, 0xE4])},
    ),
    # groups (6, 3) and (1): columnwise 64 for the first two (448/6 = 74⅔), 256 for the last
    "both_directions_by_groups": (
        _glu(BLOCK, _rows([6, 1], [3, 1], [1, 1], [5, 5]), splits=torch.tensor([2, 1]), columnwise=True),
        {
            "amax": _exactly([6.0], [3.0], [1.0]),
            "scales": _exactly([1 / 64], [1 / 128], [1 / 256]),
            "codes": _bytes([0x7C], [0x7C], [0x78], [0]),
            "scales.columnwise": _exactly([1 / 64], [1 / 256]),
            "codes.columnwise": _bytes([0x7C], [0x74], [0x78], [0]),
        },
    ),
    "the_scale_of_earlier_steps": (  # 8 · 7 = 56; the amax enters the history
        problem_of(
            "glu_and_quantize",
            {
                "h": _rows([7, 2]),
                "recipe": Recipe("delayed", amax_history_len=2),
                "scale": torch.tensor([4.0]),
                "history": _rows([3, 99]),
            },
            {"kind": "reglu"},
        ),
        {
            "amax": _exactly(14.0),
            "scales": _exactly(0.25),
            "codes": _bytes([0x66]),
            "state.amax_history": _exactly([14.0, 99]),
            "state.scale": _exactly(4.0),
        },
    ),
    "straight_through": (  # du = 5 · ½ · 2, dv = 5 · ½ · 3, dp = 5 · 3 · 2; 0 in the last row
        _with_gradients(
            _glu(CURRENT, _rows([3, 2], [1, 1]), probs=torch.tensor([0.5, 1]), splits=torch.tensor([1])), [5], [5]
        ),
        {"codes": _bytes([0x7E], [0]), "d_h": _numbers([5, 7.5], [0, 0]), "d_probs": _numbers(30, 0)},
    ),
    "no_rows": (
        _glu(BLOCK, torch.zeros(0, 4)),
        {"codes": Exact(torch.zeros(0, 2, dtype=torch.uint8)), "scales": Exact(torch.zeros(0, 1))},
    ),
}
ACTIVATION_AND_QUANTIZE: Golden = {
    "squares": (  # 4, 0, 16 and a prob of 7/8: 3½, 0, 14;  448 / 14 = 32: 112, 448
        _relu2(CURRENT, _rows([2, -3, 4]), probs=torch.tensor([0.875])),
        {"amax": _exactly(14.0), "scales": _exactly(1 / 32), "codes": _bytes([0x6E, 0, 0x7E])},
    ),
    # 16² = 256 and 22² = 484: 484/448 is above 1: 2 · 242 → 240;  the 31 other columns are 0
    "the_next_power_of_two": (
        _relu2(Recipe("mxfp8"), torch.cat([_rows([16, 22, *[0] * 30]), torch.zeros(31, 32)])),
        {"scales": _bytes([128], *[[0]] * 31), "codes": _bytes([0x70, 0x77, *[0] * 30], *[[0] * 32] * 31)},
    ),
}
GLU_BACKWARD_AND_QUANTIZE: Golden = {
    # g = 4 · ½: du = 2 · 7, dv = 2 · 3; dp = 4 · 3 · 7.  57344 / 14 = 4096: 57344, 6 · 4096 = 24576
    "gates_and_values": (
        _of_backward("glu", CURRENT, _rows([4]), _rows([3, 7]), kind="reglu", probs=torch.tensor([0.5])),
        {"amax": _exactly(14.0), "scales": _exactly(1 / 4096), "codes": _bytes([0x7B, 0x76]), "d_probs": _numbers(84)},
    ),
    "nothing_passes_a_bound": (  # u above 7 has no gradient, v below -7 none
        _of_backward(
            "glu", Recipe("current", fp8_format="e4m3"), _rows([1, 1]), _rows([8, 1, 3, -8]), kind="reglu", clamp=7.0
        ),
        {"amax": _exactly(7.0), "codes": _bytes([0, 0xFE, 0x7E, 0])},
    ),
}
ACTIVATION_BACKWARD_AND_QUANTIZE: Golden = {
    "twice_what_is_positive": (  # 2 · 3 · 1 · ½, 0;  448 / 3 > 128: 384;  dp = 1 · 9 + 1 · 0
        _of_backward("activation", BLOCK, _rows([1, 1]), _rows([3, -3]), probs=torch.tensor([0.5])),
        {"amax": _exactly([3.0]), "scales": _exactly([1 / 128]), "codes": _bytes([0x7C, 0]), "d_probs": _numbers(9)},
    ),
}
