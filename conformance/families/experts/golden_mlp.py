"""Cases of expert MLPs computed by hand: literal inputs and outputs."""

import math
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.judge import Bounded, Expectation

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]
LN3 = math.log(3)  # σ(ln 3) = 3/4
QUICK = LN3 / 1.702  # σ(1.702 u) = 3/4
QUICK_SLOPES = 3 * (0.75 + 0.1875 * LN3), 0.75 * QUICK  # of ¾ u (v + 1) at v = 2
KEPT = 1.125  # ln 3 = 1.0986… in E4M3, whose next number is 1
KEPT_SIGMOID = 1 / (1 + math.exp(-KEPT))
KEPT_SLOPES = KEPT_SIGMOID * (1 + KEPT * (1 - KEPT_SIGMOID)) * 2.25, KEPT * KEPT_SIGMOID


def _floats(*rows: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def _within_roundings(*rows: Any) -> Bounded:
    """Within a few roundings of float32; zeros are exact."""
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, value.abs() * 2.0**-20, torch.float32, torch.float32)


def _exactly(*rows: Any, dtype: torch.dtype = torch.float32) -> Bounded:
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, torch.zeros_like(value), dtype, torch.float32)


def _zeros(*shape: int) -> Bounded:
    return Bounded(
        torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), torch.float32, torch.float32
    )


# H = 1, F = 1, two experts of one row each, and a tail row never read; f(h) = max(h, 0)²
_ROWS = _floats([3], [2], [torch.nan])
_WEIGHTS = {"fc1_weight": _floats([[2]], [[1]]), "fc2_weight": _floats([[1]], [[-3]])}
_BIASES = {"fc1_bias": _floats([1], [3]), "fc2_bias": _floats([10], [100])}
_PROBS = _floats(0.5, 2, torch.nan)
_SQUARED = {"kind": "squared_relu"}
_EVERY = ("rows", "probs", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")


def _mlp(*wanted: str, **settings: Any) -> Problem:
    cotangents = {"out": _floats([1], [1], [torch.nan])} if wanted else {}
    return Problem(
        "grouped_mlp",
        {"rows": _ROWS, "tokens_per_expert": torch.tensor([1, 1]), **_WEIGHTS},
        _SQUARED | settings,
        {},
        wanted,
        cotangents,
    )


GROUPED_MLP: Golden = {
    "probs_between_the_layers": (  # h = 7, 5;  a = 49 · ½, 25 · 2;  y = 24.5 + ½ · 10, -150 + 2 · 100
        _mlp(*_EVERY, probs=_PROBS, **_BIASES),
        {
            "out": _exactly([29.5], [50], [0]),
            "d_rows": _exactly([14], [-60], [0]),  # d_a = 1, -3;  d_h = d_a p 2h = 7, -60
            "d_probs": _exactly(59, 25, 0),  # 49 + 10, -75 + 100
            "d_fc1_weight": _exactly([[21]], [[-120]]),
            "d_fc2_weight": _exactly([[24.5]], [[50]]),
            "d_fc1_bias": _exactly([7], [-60]),
            "d_fc2_bias": _exactly([0.5], [2]),
        },
    ),
    "probs_on_the_rows": (  # x' = 1.5, 4;  h = 4, 7;  y = 16 + 10, -147 + 100: the second bias is not weighted
        _mlp(*_EVERY, probs=_PROBS, probs_on_input=True, **_BIASES),
        {
            "out": _exactly([26], [-47], [0]),
            "d_rows": _exactly([8], [-84], [0]),  # d_h = 8, -42;  d_x' = 16, -42
            "d_probs": _exactly(48, -84, 0),
            "d_fc1_weight": _exactly([[12]], [[-168]]),
            "d_fc2_weight": _exactly([[16]], [[49]]),
            "d_fc1_bias": _exactly([8], [-42]),
            "d_fc2_bias": _exactly([1], [1]),
        },
    ),
    "without_probs": (_mlp(**_BIASES), {"out": _exactly([59], [25], [0])}),
    "the_second_bias_alone": (
        _mlp("fc2_bias", probs=_PROBS, fc2_bias=_BIASES["fc2_bias"]),
        {"out": _exactly([23], [176], [0])},
    ),
    "the_first_bias_alone": (_mlp(probs=_PROBS, fc1_bias=_BIASES["fc1_bias"]), {"out": _exactly([24.5], [-150], [0])}),
    "padded": (
        _mlp(*_EVERY, probs=_PROBS, align=4, recompute="moe", **_BIASES),
        {
            "out": _exactly([29.5], [50], [0]),
            "d_fc2_bias": _exactly([0.5], [2]),
            "d_fc1_weight": _exactly([[21]], [[-120]]),
        },
    ),
    "gated": (  # h = ln 3, 2: silu(ln 3) · 2 = 1.5 ln 3
        Problem(
            "grouped_mlp",
            {
                "rows": _floats([1]),
                "tokens_per_expert": torch.tensor([0, 1]),
                "fc1_weight": _floats([[9], [9]], [[LN3], [2]]),
                "fc2_weight": _floats([[9]], [[1]]),
            },
        ),
        {"out": _within_roundings([1.5 * LN3])},
    ),
    # gpt-oss: u = ln 3 / 1.702, v = 1.5 + ½;  a = ½ · ¾ u (2 + 1);  y = 2 a + ½ · 10;  d_a = 2 · ½
    "of_gpt_oss": (
        Problem(
            "grouped_mlp",
            {
                "rows": _floats([1]),
                "tokens_per_expert": torch.tensor([0, 1]),
                "fc1_weight": _floats([[9], [9]], [[QUICK], [1.5]]),
                "fc2_weight": _floats([[9]], [[2]]),
            },
            {"kind": "quick_geglu", "clamp": 7.0, "offset": 1.0, "probs": _floats(0.5)}
            | {"fc1_bias": _floats([9, 9], [0, 0.5]), "fc2_bias": _floats([9], [10])},
            wanted=_EVERY,
            cotangents={"out": _floats([1])},
        ),
        {
            "out": _within_roundings([2.25 * QUICK + 5]),
            "d_rows": _within_roundings([QUICK_SLOPES[0] * QUICK + QUICK_SLOPES[1] * 1.5]),
            "d_probs": _within_roundings(4.5 * QUICK + 10),
            "d_fc1_weight": _within_roundings([[0], [0]], [[QUICK_SLOPES[0]], [QUICK_SLOPES[1]]]),
            "d_fc2_weight": _within_roundings([[0]], [[1.125 * QUICK]]),
            "d_fc1_bias": _within_roundings([0, 0], [*QUICK_SLOPES]),
            "d_fc2_bias": _within_roundings([0], [0.5]),
        },
    ),
    # h = ln 3, 2.2 → 1.125, 2.25; d_fc2_weight uses the unrounded a = ¾ ln 3 · 2.2
    "gradients_of_the_stored_input": (
        Problem(
            "grouped_mlp",
            {
                "rows": _floats([1]),
                "tokens_per_expert": torch.tensor([1]),
                "fc1_weight": _floats([[LN3], [2.2]]),
                "fc2_weight": _floats([[1]]),
            },
            {"fp8_input_store": True},
            wanted=("rows", "fc1_weight", "fc2_weight"),
            cotangents={"out": _floats([1])},
        ),
        {
            "out": _within_roundings([0.75 * LN3 * 2.2]),
            "d_rows": _within_roundings([KEPT_SLOPES[0] * LN3 + KEPT_SLOPES[1] * 2.2]),
            "d_fc1_weight": _within_roundings([[KEPT_SLOPES[0]], [KEPT_SLOPES[1]]]),
            "d_fc2_weight": _within_roundings([[0.75 * LN3 * 2.2]]),
        },
    ),
    "rounded_before_the_probs": (  # 23² = 529 → 528 in bfloat16, · 1.51 = 797.28 → 796; rounded once, 798.79 → 800
        Problem(
            "grouped_mlp",
            {
                "rows": _floats([23], dtype=torch.bfloat16),
                "tokens_per_expert": torch.tensor([1]),
                "fc1_weight": _floats([[1]], dtype=torch.bfloat16),
                "fc2_weight": _floats([[1]], dtype=torch.bfloat16),
            },
            _SQUARED | {"probs": _floats(1.51), "round_before_probs": True},
        ),
        {"out": _exactly([796], dtype=torch.bfloat16)},
    ),
    "no_rows_at_all": (
        Problem(
            "grouped_mlp",
            {"rows": _ROWS[:0], "tokens_per_expert": torch.tensor([0, 0]), **_WEIGHTS},
            _SQUARED | _BIASES,
            {},
            ("rows", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"),
            {"out": _floats([1])[:0]},
        ),
        {
            "out": _zeros(0, 1),
            "d_rows": _zeros(0, 1),
            "d_fc1_weight": _zeros(2, 1, 1),
            "d_fc2_weight": _zeros(2, 1, 1),
            "d_fc1_bias": _zeros(2, 1),
            "d_fc2_bias": _zeros(2, 1),
        },
    ),
}
SEQUENTIAL_MLP: Golden = {
    name: (Problem("sequential_mlp", call.required, call.settings, {}, call.wanted, call.cotangents), expectations)
    for name, (call, expectations) in GROUPED_MLP.items()
}

_X = _floats([1, 0], [0, 1])
SHARED_EXPERTS: Golden = {
    "gated_by_a_score": (  # x W1ᵀ = 2, 3;  f = 4, 9;  y = (4, -4), (9, -9);  x gᵀ = ln 3, 0: σ = ¾, ½
        Problem(
            "shared_experts",
            {"x": _X, "fc1_weight": _floats([2, 3]), "fc2_weight": _floats([1], [-1])},
            _SQUARED | {"gate_weight": _floats([LN3, 0])},
            {},
            ("x", "fc1_weight", "fc2_weight", "gate_weight"),
            {"out": _floats([1, 0], [1, 0])},
        ),
        {
            "out": _within_roundings([3, -3], [4.5, -4.5]),
            # d_y = (¾, 0), (½, 0);  d_h = ¾ · 2 · 2, ½ · 2 · 3;  d_z = 4 · 3/16, 9 · ¼
            "d_x": _within_roundings([3 * 2 + 0.75 * LN3, 9], [6 + 2.25 * LN3, 9]),
            "d_fc1_weight": _within_roundings([3, 3]),
            "d_fc2_weight": _within_roundings([0.75 * 4 + 0.5 * 9], [0]),
            "d_gate_weight": _within_roundings([0.75, 2.25]),
        },
    ),
    "clamped": (  # reglu: u = 8 → 7, v = -8 → -7;  nothing passes beyond the bounds
        Problem(
            "shared_experts",
            {"x": _floats([4]), "fc1_weight": _floats([2], [-2]), "fc2_weight": _floats([1])},
            {"kind": "reglu", "clamp": 7.0},
            {},
            ("x",),
            {"out": _floats([1])},
        ),
        {"out": _exactly([-49]), "d_x": _exactly([0])},
    ),
    "without_a_gate": (
        Problem(
            "shared_experts",
            {"x": _X, "fc1_weight": _floats([2, 3]), "fc2_weight": _floats([1], [-1])},
            _SQUARED | {"recompute": True},
        ),
        {"out": _exactly([4, -4], [9, -9])},
    ),
}
