"""Products by a recipe computed by hand: literal inputs and outputs.

E4M3 has eight numbers per binade, E5M2 four; E2M1 is 0 ½ 1 1½ 2 3 4 6. A scale of 64 maps an amax
of 7 to 448.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Opaque, Problem
from conformance.families.experts.precision import script_of
from conformance.judge import Bounded, Expectation
from moe_ref.config import Recipe

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]


def _floats(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _within_roundings(*rows: Any) -> Bounded:
    """Within a few roundings of float32; zeros are exact."""
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, value.abs() * 2.0**-20, torch.float32, torch.float32)


def _exactly(*rows: Any) -> Bounded:
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, torch.zeros_like(value), torch.float32, torch.float32)


def _corner(side: int, *rows: list[float]) -> list[list[float]]:
    """A square of zeros with these numbers in its first rows and columns."""
    filled = [[*row, *[0.0] * (side - len(row))] for row in rows]
    return filled + [[0.0] * side] * (side - len(rows))


CURRENT = Recipe("current")
_COUNTS = torch.tensor([1, 1])
_CURRENT = Problem(
    "grouped_linear",
    {"rows": _floats([7, 1.1], [14, 2.3]), "weight": _floats([[7, 7]], [[1.75, 0.3]]), "tokens_per_expert": _COUNTS},
    {"recipe": CURRENT},
    wanted=("rows", "weight"),
    cotangents={"out": _floats([7], [3.5])},
)
_BLOCK = Problem(
    "grouped_linear",
    {"rows": _floats([1, 0.3], [0.5, 3.5]), "weight": _floats([[1, 3.5]]), "tokens_per_expert": torch.tensor([2])},
    {"recipe": Recipe("block", power_of_two_scales=False)},
    wanted=("weight",),
    cotangents={"out": _floats([1], [0])},
)
_MX = Problem(
    "grouped_linear",
    {
        "rows": _floats(*_corner(32, [7, 1.25 * 2.0**-14])),
        "weight": _floats(_corner(32, [7, 1])),
        "tokens_per_expert": torch.tensor([32]),
    },
    {"recipe": Recipe("mxfp8")},
    wanted=("rows", "weight"),
    cotangents={"out": _floats(*_corner(32, [7]))},
)


def _overridden(override: str) -> Problem:
    """A cotangent inexact in E5M2 at the scale of 7: 1.1 · 8192 = 9011.2 would be 8192."""
    return Problem(
        "grouped_linear",
        {"rows": _floats([7, 1.1]), "weight": _floats([[7, 1.1], [0.3, 3.5]]), "tokens_per_expert": torch.tensor([1])},
        {"recipe": Recipe("current", backward_override=override)},
        wanted=("rows", "weight"),
        cotangents={"out": _floats([7, 1.1])},
    )


_FP4 = Problem(
    "grouped_linear",
    {
        "rows": _floats(*_corner(16, [6, 3, 1.5, 0.25, 0.75], [1.5, 0.3])),
        "weight": _floats(_corner(16, [6, 1, 1, 1, 1])),
        "tokens_per_expert": torch.tensor([16]),
    },
    {"recipe": Recipe("nvfp4", hadamard=False, stochastic_rounding=False)},
)


def _delayed() -> Problem:
    """Delayed scaling with scales of 64, 32 and 1024."""
    required = {"rows": _floats([7, 8]), "weight": _floats([[7, 1.1]]), "tokens_per_expert": torch.tensor([1])}
    settings = {"recipe": Recipe("delayed", amax_history_len=1), "state": Opaque("state")}
    state = {f"state.{role}.amax_history": _floats([0]) for role in ("input", "weight", "grad_output")}
    state |= {
        f"state.{role}.scale": _floats(scale) for role, scale in (("input", 64), ("weight", 32), ("grad_output", 1024))
    }
    return Problem(
        "grouped_linear",
        required | state,
        settings,
        wanted=("rows", "weight"),
        cotangents={"out": _floats([1])},
        script=script_of("grouped_linear", tuple(required), tuple(settings), ("out",)),
        first=required,
    )


GROUPED_LINEAR: Golden = {
    # 1.1 · 64 = 70.4 → 72;  2.3 · 32 = 73.6 → 72;  0.3 · 256 = 76.8 → 80;  gradients are
    # exact in E5M2
    "a_scale_for_each_expert": (
        _CURRENT,
        {
            "out": _exactly([49 + 7.875], [24.5 + 2.25 * 0.3125]),
            "d_rows": _exactly([49, 49], [6.125, 3.5 * 0.3125]),
            "d_weight": _exactly([[49, 7.875]], [[49, 7.875]]),
        },
    ),
    "a_scale_of_the_steps_before": (  # 8 · 64 is cut off at 448: 7;  1.1 · 32 = 35.2 → 36
        _delayed(),
        {"out": _exactly([49 + 7 * 1.125]), "d_rows": _exactly([7, 1.125]), "d_weight": _exactly([[7, 7]])},
    ),
    "blocks_along_the_contraction": (  # 0.3 · 448 = 134.4 → 128 in its row; 0.3 · 128 = 38.4 → 40 in its column
        _BLOCK,
        {"out": _within_roundings([2], [12.75]), "d_weight": _within_roundings([[1, 0.3125]])},
    ),
    # 1¼ · 2⁻¹⁴ in a block with 7 is subnormal, halfway between two codes; alone it is exact
    "small_blocks_along_the_contraction": (
        _MX,
        {
            "out": _exactly(*_corner(32, [49 + 2.0**-14])),
            "d_rows": _exactly(*_corner(32, [49, 7])),
            "d_weight": _exactly(_corner(32, [49, 8.75 * 2.0**-14])),
        },
    ),
    "gradients_of_what_is_stored": (  # 1.1 → 1.125 and 0.3 → 0.3125 forward
        _overridden("high_precision"),
        {
            "out": _within_roundings([49 + 1.125**2, 7 * 0.3125 + 1.125 * 3.5]),
            "d_rows": _within_roundings([49 + 1.1 * 0.3, 7 * 1.1 + 1.1 * 3.5]),
            "d_weight": _within_roundings([[49, 7.7], [7.7, 1.21]]),
        },
    ),
    "gradients_of_what_codes_come_back_as": (  # with 1.1 in the cotangent
        _overridden("dequantized"),
        {
            "out": _within_roundings([49 + 1.125**2, 7 * 0.3125 + 1.125 * 3.5]),
            "d_rows": _within_roundings([49 + 1.1 * 0.3125, 7 * 1.125 + 1.1 * 3.5]),
            "d_weight": _within_roundings([[49, 7.875], [7.7, 1.1 * 1.125]]),
        },
    ),
    "gradients_of_codes_by_rows": (  # in a block with 7, inexact; alone in its column, exact
        replace(_MX, settings={"recipe": Recipe("mxfp8", backward_override="dequantized")}),
        {
            "out": _exactly(*_corner(32, [49 + 2.0**-14])),
            "d_rows": _exactly(*_corner(32, [49, 7])),
            "d_weight": _exactly(_corner(32, [49, 7 * 2.0**-14])),
        },
    ),
    "two_levels": (  # ¼ → 0 and ¾ → 1 of 6; the second row's scale is ¼: 0.3 → ¼
        _FP4,
        {"out": _within_roundings(*_corner(16, [36 + 3 + 1.5 + 1], [9.25]))},
    ),
}
GROUPED_DGRAD: Golden = {
    "noise_decides": (  # 2½ is halfway between 2 and 3: up where the noise is below ½
        Problem(
            "grouped_dgrad",
            {
                "d_out": _floats(*_corner(16, [6, 2.5], [6, 2.5])),
                "weight": _floats(_corner(16, [6], [6])),
                "tokens_per_expert": torch.tensor([16]),
            },
            {
                "recipe": Recipe("nvfp4"),
                "noise": torch.stack([_floats(*_corner(16, [0, 0.75], [0, 0.25])), torch.zeros(16, 16)]),
            },
        ),
        {"d_rows": _within_roundings(*_corner(16, [36 + 12], [36 + 18]))},
    ),
}
LATENT_PROJECTION: Golden = {
    "by_a_recipe": (
        Problem(
            "latent_projection",
            {"x": _floats([7, 1.1]), "weight": _floats([7, 7])},
            {"recipe": CURRENT},
            wanted=("x", "weight"),
            cotangents={"out": _floats([7])},
        ),
        {"out": _exactly([56.875]), "d_x": _exactly([49, 49]), "d_weight": _exactly([49, 7.875])},
    ),
}

# one expert, two equal rows with probs of 1 and 5/16; h = 7, 1 3/32
_LAYERS = {"fc1_weight": _floats([[1, 7], [0.15625, 0]]), "fc2_weight": _floats([[1, 1], [7, 0]])}  # [1,2,2] each
GROUPED_MLP: Golden = {
    "what_is_weighted_is_quantised": (  # a = 7, 1 3/32 · 64 = 70 → 72;  5/16 · 7 · 64 = 140 → 144, 5/16 · 70 = 21⅞ → 22
        Problem(
            "grouped_mlp",
            {"rows": _floats([7, 0], [7, 0]), "tokens_per_expert": torch.tensor([2]), **_LAYERS},
            {"recipe": CURRENT, "kind": "relu", "probs": _floats(1, 0.3125)},
            wanted=("rows", "probs", "fc1_weight", "fc2_weight"),
            cotangents={"out": _floats([7, 0], [0, 0])},
        ),
        {
            "out": _exactly([8.125, 49], [2.25 + 0.34375, 15.75]),
            "d_rows": _exactly([7 + 1.09375, 49], [0, 0]),  # d_a = d_h = 7, 7
            "d_probs": _exactly(49 + 7 * 1.09375, 0),  # by the activations before weighting, not quantised
            "d_fc1_weight": _exactly([[49, 0], [49, 0]]),
            "d_fc2_weight": _exactly([[49, 7.875], [0, 0]]),
        },
    ),
}
SEQUENTIAL_MLP: Golden = {
    name: (Problem("sequential_mlp", call.required, call.settings, {}, call.wanted, call.cotangents), expectations)
    for name, (call, expectations) in GROUPED_MLP.items()
}
SHARED_EXPERTS: Golden = {
    "both_layers_by_a_recipe": (
        Problem(
            "shared_experts",
            {"x": _floats([7, 0]), **{name: weight[0] for name, weight in _LAYERS.items()}},
            {"recipe": CURRENT, "kind": "relu"},
            wanted=("fc2_weight",),
            cotangents={"out": _floats([7, 0])},
        ),
        {"out": _exactly([8.125, 49]), "d_fc2_weight": _exactly([49, 7.875], [0, 0])},
    ),
}
