"""Illegal calls of quantisation."""

from dataclasses import replace

import torch

from conformance.core.illegal import Rule, bare, flat, in_dtype, on_device, setting, with_values
from moe_ref.config import Recipe
from moe_ref.config.state import new_quantizer_state


def _quantizing(blame: str, recipe: Recipe, x: torch.Tensor, **settings: object) -> Rule:
    """A call with this recipe, tensor and settings, blamed on one argument."""
    return lambda problem: replace(bare(problem), required={"x": x, "recipe": recipe}, settings=settings, blame=blame)


_SQUARE = torch.zeros(16, 16, dtype=torch.bfloat16)


CURRENT, _GRADIENT = Recipe("current"), {"role": "grad_output", "columnwise": True}


# two rows, two groups of one row
QUANTIZE: dict[str, Rule] = {
    "x_flat": flat("x"),
    "x_of_integers": in_dtype("x", torch.int32),
    "recipe_a_word": lambda problem: replace(
        bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "role_unknown": setting("role", "activation"),
    "no_direction": setting("rowwise", False),
    "splits_negative": on_device(with_values("splits", torch.tensor([-1, 2]))),
    "splits_beyond_the_rows": on_device(with_values("splits", torch.tensor([2, 1]))),
    "splits_of_floats": in_dtype("splits", torch.float32),
    "splits_empty": with_values("splits", torch.zeros(0, dtype=torch.int64)),
    "state_of_nothing": _quantizing("state", CURRENT, torch.zeros(2, 1), state=new_quantizer_state(Recipe("delayed"))),
    "state_missing": _quantizing("state", Recipe("delayed"), torch.zeros(2, 1), state=None),
    "state_of_other_groups": _quantizing(
        "state", Recipe("delayed"), torch.zeros(2, 1), state=new_quantizer_state(Recipe("delayed"), num_groups=2)
    ),
    "columns_no_multiple": _quantizing("x", Recipe("mxfp8"), torch.zeros(32, 33)),
    "rows_no_multiple": on_device(
        _quantizing("splits", Recipe("mxfp8"), torch.zeros(64, 32), splits=torch.tensor([16, 48]))
    ),
    "transform_of_floats": _quantizing("x", Recipe("nvfp4"), _SQUARE.float(), columnwise=True),
    "noise_unasked": setting("noise", torch.zeros(2, 2, 1)),
    "noise_of_one_direction": _quantizing("noise", Recipe("nvfp4"), _SQUARE, **_GRADIENT, noise=torch.zeros(1, 16, 16)),
}
