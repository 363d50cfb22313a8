"""Cases of experts computed by hand: literal inputs and outputs."""

import math
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.judge import Bounded, Expectation

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]
LN3 = math.log(3)  # σ(ln 3) = 3/4
QUICK = LN3 / 1.702  # σ(1.702 u) = 3/4
SATURATED = 1 / (1 + math.exp(-1.702 * 7))
KEPT = 1.125  # ln 3 = 1.0986… in E4M3, whose next number is 1
KEPT_SIGMOID = 1 / (1 + math.exp(-KEPT))


def _floats(*rows: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def _within_roundings(*rows: Any, gate: float = 0.0) -> Bounded:
    """Within a few roundings of float32, and of `gate`, where σ = ½ + ½ tanh cancels."""
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, value.abs() * 2.0**-20 + gate * 2.0**-23, torch.float32, torch.float32)


def _exactly(*rows: Any, dtype: torch.dtype = torch.float32) -> Bounded:
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, torch.zeros_like(value), dtype, torch.float32)


def _empty(*shape: int) -> Bounded:
    return Bounded(
        torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), torch.float32, torch.float32
    )


def _halves(*rows: Any) -> Tensor:
    return _floats(*rows, dtype=torch.bfloat16)


def _glu(*rows: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Problem:
    return Problem("glu", {"h": _floats(*rows, dtype=dtype)}, settings)


def _with(problem: Problem, *cotangent: Any) -> Problem:
    """The call with gradients of all its inputs."""
    wanted = ("h", *(["probs"] if "probs" in problem.settings else []))
    h = problem.required["h"]
    return Problem(
        problem.function, problem.required, problem.settings, {}, wanted, {"out": _floats(*cotangent, dtype=h.dtype)}
    )


GLU: Golden = {
    # u = ln 3, 0 and v = 2, 5; with p = ½: du = ½ · ¾ (1 + ¼ ln 3) · 2, and ½ · ½ · 5;  dv = ½ u σ;
    # dp = u σ v
    "swiglu": (
        _with(_glu([LN3, 0, 2, 5], probs=_floats(0.5)), [1, 1]),
        {
            "out": _within_roundings([0.75 * LN3, 0]),
            "d_h": _within_roundings([0.75 * (1 + LN3 / 4), 1.25, 0.375 * LN3, 0]),
            "d_probs": _within_roundings(1.5 * LN3),
        },
    ),
    "clamped_with_an_offset": (  # 7 · (1 + 1), 0 · …, 3 · (7 + 1), 3 · (-7 + 1), 7 · (-7 + 1)
        _glu([100, -1, 3, 3, 100, 1, 100, 9, -9, -100], kind="reglu", clamp=7.0, offset=1.0),
        {"out": _exactly([14, 0, 24, -18, -42])},
    ),
    "an_infinite_prob": (  # 0 · ∞ is NaN
        Problem("glu", {"h": _floats([-1, 1], [3, 2])}, {"kind": "reglu", "probs": _floats(math.inf, math.inf)}),
        {"out": _exactly([math.nan], [math.inf])},
    ),
    # gpt-oss: u = ln 3 / 1.702, 100 → 7 and v = 2, -9 → -7;  ½ · ¾ u (2 + 1), ½ · 7 σ (-7 + 1)
    "of_gpt_oss": (
        _with(
            _glu([QUICK, 2, 100, -9], kind="quick_geglu", clamp=7.0, offset=1.0, interleave=1, probs=_floats(0.5)),
            [1, 1],
        ),
        {
            "out": _within_roundings([1.125 * QUICK, -21 * SATURATED]),
            "d_h": _within_roundings([1.5 * (0.75 + 0.1875 * LN3), 0.375 * QUICK, 0, 0]),
            "d_probs": _within_roundings(2.25 * QUICK - 42 * SATURATED),
        },
    ),
    "the_gate_has_no_lower_bound": (
        _glu([-8, 1], clamp=7.0),
        {"out": _within_roundings([-8 / (1 + math.exp(8))], gate=8)},
    ),
    # u: on the bound, above it, free; v: free, above, on the upper and on the lower bound
    "the_gradient_passes_at_the_bounds": (
        _with(_glu([2, 4, 1, 1, 1, 4, 2, -2], kind="reglu", clamp=2.0), [1, 10, 100, 1000]),
        {"out": _exactly([2, 4, 2, -2]), "d_h": _exactly([1, 0, 200, -2000, 2, 0, 100, 1000])},
    ),
    "interleaved_by_two": (  # u_0 u_1 v_0 v_1 u_2 u_3 v_2 v_3
        _with(_glu([1, 2, 10, 20, 3, 4, 30, 40], kind="reglu", interleave=2), [1, 1, 1, 1]),
        {"out": _exactly([10, 40, 90, 160]), "d_h": _exactly([10, 20, 1, 2, 30, 40, 3, 4])},
    ),
    # u = ln 3, 464 → 1.125, 448 and v = 2.2, 17 → 2.25, 16, both second ones by ties; σ(464) = 1; p
    # = ½
    "gradients_of_the_stored_input": (
        _with(_glu([LN3, 464, 2.2, 17], probs=_floats(0.5), fp8_input_store=True), [1, 1]),
        {
            "out": _within_roundings([0.375 * LN3 * 2.2, 3944]),
            "d_h": _within_roundings(
                [0.5 * KEPT_SIGMOID * (1 + KEPT * (1 - KEPT_SIGMOID)) * 2.25, 8, 0.5 * KEPT * KEPT_SIGMOID, 224]
            ),
            "d_probs": _within_roundings(KEPT * KEPT_SIGMOID * 2.25 + 7168),
        },
    ),
    "the_normal_distribution": (_glu([1, 1], kind="geglu_erf"), {"out": _within_roundings([0.8413447460685429])}),
    "its_form_with_tanh": (_glu([1, 1], kind="geglu"), {"out": _within_roundings([0.8411919906082768])}),
    "its_form_with_a_sigmoid": (
        _glu([1, 1], kind="quick_geglu"),
        {"out": _within_roundings([1 / (1 + math.exp(-1.702))])},
    ),
    "rounded_once": (  # 515 · 1.5 = 772.5, and 515 is no bfloat16
        _glu([5, 103], dtype=torch.bfloat16, kind="reglu", probs=_floats(1.5)),
        {"out": _exactly([772], dtype=torch.bfloat16)},
    ),
    "rounded_before_the_probs": (  # 515 → 516; 516 · 1.5 = 774 → 776
        _glu([5, 103], dtype=torch.bfloat16, kind="reglu", probs=_floats(1.5), round_before_probs=True),
        {"out": _exactly([776], dtype=torch.bfloat16)},
    ),
}

ACTIVATION: Golden = {
    "squared_relu": (
        _with(Problem("activation", {"h": _floats([-1, 0, 3])}, {"probs": _floats(2)}), [5, 5, 5]),
        {"out": _exactly([0, 0, 18]), "d_h": _exactly([0, 0, 60]), "d_probs": _exactly(45)},
    ),
    "relu_is_flat_at_zero": (
        _with(Problem("activation", {"h": _floats([-1, 0, 3])}, {"kind": "relu"}), [5, 5, 5]),
        {"out": _exactly([0, 0, 3]), "d_h": _exactly([0, 0, 5])},
    ),
    "an_infinite_prob": (  # 0 · ∞ is NaN
        Problem("activation", {"h": _floats([-1], [3])}, {"kind": "relu", "probs": _floats(math.inf, math.inf)}),
        {"out": _exactly([math.nan], [math.inf])},
    ),
    "silu": (Problem("activation", {"h": _floats([LN3])}, {"kind": "silu"}), {"out": _within_roundings([0.75 * LN3])}),
    "gelu": (
        Problem("activation", {"h": _floats([1, -1])}, {"kind": "gelu"}),
        {"out": _within_roundings([0.8413447460685429, -0.15865525393145707])},
    ),
    "gelu_tanh": (
        Problem("activation", {"h": _floats([1, -1])}, {"kind": "gelu_tanh"}),
        {"out": _within_roundings([0.8411919906082768, -0.15880800939172324])},
    ),
    "quick_gelu": (
        Problem("activation", {"h": _floats([1])}, {"kind": "quick_gelu"}),
        {"out": _within_roundings([1 / (1 + math.exp(-1.702))])},
    ),
    "rounded_once": (  # 529 · 1.5 = 793.5; rounded before, 528 · 1.5 = 792 as well: so 1.51, 798.79 against 797.28
        Problem("activation", {"h": _floats([23], dtype=torch.bfloat16)}, {"probs": _floats(1.51)}),
        {"out": _exactly([800], dtype=torch.bfloat16)},
    ),
    "rounded_before_the_probs": (
        Problem(
            "activation",
            {"h": _floats([23], dtype=torch.bfloat16)},
            {"probs": _floats(1.51), "round_before_probs": True},
        ),
        {"out": _exactly([796], dtype=torch.bfloat16)},
    ),
}

# two experts, of two rows and one, and a tail row never read:  W_0 = [[1, 2]],  W_1 = [[10, 100]]
_ROWS = _floats([1, 2], [3, 4], [5, 6], [torch.nan, torch.inf])
_WEIGHT = _floats([[1, 2]], [[10, 100]])
_COUNTS = torch.tensor([2, 1])
_COTANGENT = _floats([1], [10], [100], [torch.nan])
_D_ROWS = _exactly([1, 2], [10, 20], [1000, 10000], [0, 0])

GROUPED_LINEAR: Golden = {
    "each_row_by_its_own_weight": (
        Problem(
            "grouped_linear",
            {"rows": _ROWS, "weight": _WEIGHT, "tokens_per_expert": _COUNTS},
            {"bias": _floats([0.5], [-0.5])},
            wanted=("rows", "weight", "bias"),
            cotangents={"out": _COTANGENT},
        ),
        {
            "out": _exactly([5.5], [11.5], [649.5], [0]),
            "d_rows": _D_ROWS,
            "d_weight": _exactly([[31, 42]], [[500, 600]]),
            "d_bias": _exactly([11], [100]),
        },
    ),
    "experts_without_rows": (  # first, in the middle and last
        Problem(
            "grouped_linear",
            {
                "rows": _ROWS[:2],
                "weight": torch.arange(1.0, 11.0).reshape(5, 1, 2),
                "tokens_per_expert": torch.tensor([0, 1, 0, 1, 0]),
            },
            wanted=("weight",),
            cotangents={"out": _floats([1], [1])},
        ),
        {
            "out": _exactly([1 * 3 + 2 * 4], [3 * 7 + 4 * 8]),
            "d_weight": _exactly([[0, 0]], [[1, 2]], [[0, 0]], [[3, 4]], [[0, 0]]),
        },
    ),
    "no_rows_at_all": (
        Problem(
            "grouped_linear",
            {"rows": _ROWS[:0], "weight": _WEIGHT, "tokens_per_expert": torch.tensor([0, 0])},
            wanted=("rows", "weight"),
            cotangents={"out": _COTANGENT[:0]},
        ),
        {"out": _empty(0, 1), "d_rows": _empty(0, 2), "d_weight": _exactly([[0, 0]], [[0, 0]])},
    ),
    "rounded_once": (  # 256 + 1 + 1 = 258 is a bfloat16; 256 + 1 is not, and would stay 256 twice
        Problem(
            "grouped_linear",
            {"rows": _halves([256, 1, 1]), "weight": _halves([[1, 1, 1]]), "tokens_per_expert": torch.tensor([1])},
        ),
        {"out": _exactly([258], dtype=torch.bfloat16)},
    ),
}
LATENT_PROJECTION: Golden = {
    "down_with_a_bias": (  # x Wᵀ = 1 + 4, 3 + 8
        Problem(
            "latent_projection",
            {"x": _ROWS[:2], "weight": _WEIGHT[0]},
            {"bias": _floats(0.5)},
            wanted=("x", "weight", "bias"),
            cotangents={"out": _COTANGENT[:2]},
        ),
        {
            "out": _exactly([5.5], [11.5]),
            "d_x": _exactly([1, 2], [10, 20]),
            "d_weight": _exactly([31, 42]),
            "d_bias": _exactly(11),
        },
    ),
    "no_tokens_at_all": (
        Problem(
            "latent_projection",
            {"x": _ROWS[:0], "weight": _WEIGHT[0]},
            wanted=("x", "weight"),
            cotangents={"out": _COTANGENT[:0]},
        ),
        {"out": _empty(0, 1), "d_x": _empty(0, 2), "d_weight": _exactly([0, 0])},
    ),
    "rounded_once": (  # the bias among the terms: 256 + 1 + 1 = 258
        Problem("latent_projection", {"x": _halves([256, 1]), "weight": _halves([1, 1])}, {"bias": _halves(1)}),
        {"out": _exactly([258], dtype=torch.bfloat16)},
    ),
}
GROUPED_DGRAD: Golden = {
    "wider_than_tall": (
        Problem("grouped_dgrad", {"d_out": _COTANGENT, "weight": _WEIGHT, "tokens_per_expert": _COUNTS}),
        {"d_rows": _D_ROWS},
    ),
}
_FIRST = {"d_out": _COTANGENT, "rows": _ROWS, "tokens_per_expert": torch.tensor([2, 0])}
GROUPED_WGRAD: Golden = {
    "an_expert_without_rows": (Problem("grouped_wgrad", _FIRST), {"d_weight": _exactly([[31, 42]], [[0, 0]])}),
    "added_to_what_was_there": (
        Problem("grouped_wgrad", _FIRST, {"accumulate_into": _floats([[1000, 2000]], [[7, 8]])}),
        {"d_weight": _exactly([[1031, 2042]], [[7, 8]])},
    ),
    "added_before_it_is_rounded": (  # 257 is no bfloat16, and 257 - 256 = 1
        Problem(
            "grouped_wgrad",
            {"d_out": _halves([1], [1]), "rows": _halves([256], [1]), "tokens_per_expert": torch.tensor([2])},
            {"accumulate_into": _floats([[-256]])},
        ),
        {"d_weight": _exactly([[1]])},
    ),
}
