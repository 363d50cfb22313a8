"""Illegal calls of fused stages."""

from dataclasses import replace

import torch

from conformance.core.contract import Problem
from conformance.core.illegal import Rule, bare, in_dtype, on_device, one_more, setting, with_values
from conformance.families.experts.illegal import HIDDEN, OF_GATES
from conformance.families.permutation.illegal import PERMUTE
from conformance.families.quantization.illegal import CURRENT
from moe_ref.config import Recipe
from moe_ref.config.state import new_quantizer_state


def _by_recipe(blame: str, recipe: Recipe, hidden: int = 16, **settings: object) -> Rule:
    """Another recipe, two bfloat16 tokens of width `hidden`, and other settings."""
    tokens = torch.zeros(2, hidden, dtype=torch.bfloat16)
    return lambda problem: replace(
        bare(problem), required=problem.required | {"tokens": tokens, "recipe": recipe}, settings=settings, blame=blame
    )


# two tokens for two experts
PERMUTE_AND_QUANTIZE: dict[str, Rule] = PERMUTE | {
    "tokens_of_integers": in_dtype("tokens", torch.int32),
    "recipe_a_word": lambda problem: replace(
        bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "role_unknown": setting("role", "activation"),
    "no_direction": setting("rowwise", False),
    "state_of_nothing": _by_recipe("state", CURRENT, state=new_quantizer_state(Recipe("delayed"), num_groups=2)),
    "state_missing": _by_recipe("state", Recipe("delayed"), state=None),
    "state_of_one_expert": _by_recipe("state", Recipe("delayed"), state=new_quantizer_state(Recipe("delayed"))),
    "columns_no_multiple": _by_recipe("tokens", Recipe("mxfp8"), 33, align=32),
    "no_whole_blocks": _by_recipe("align", Recipe("mxfp8"), 32),
    "align_no_whole_blocks": _by_recipe("align", Recipe("mxfp8"), 32, align=16),
    "capacity_no_whole_blocks": _by_recipe("capacity", Recipe("nvfp4"), capacity=24),
    "noise_missing": _by_recipe("recipe", Recipe("nvfp4"), role="grad_output", align=16),
}


def _activating(
    blame: str, recipe: Recipe, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, **settings: object
) -> Rule:
    """Another recipe, zeros for h (and for the cotangent of that width), and settings."""
    h = torch.zeros(rows, columns, dtype=dtype)

    def break_it(problem: Problem) -> Problem:
        halves = "glu" in problem.function
        d_out = {"d_out": h[:, : columns // 2] if halves else h} if "d_out" in problem.required else {}
        return replace(bare(problem), required=d_out | {"h": h, "recipe": recipe}, settings=settings, blame=blame)

    return break_it


# two rows, one for each of two groups
QUANTIZED_ACTIVATION: dict[str, Rule] = HIDDEN | {
    "recipe_a_word": lambda problem: replace(
        bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "no_direction": setting("rowwise", False),
    "splits_negative": on_device(with_values("splits", torch.tensor([-1, 2]))),
    "splits_beyond_the_rows": on_device(with_values("splits", torch.tensor([2, 1]))),
    "splits_of_floats": in_dtype("splits", torch.float32),
    "state_of_nothing": _activating("state", CURRENT, 2, 2, state=new_quantizer_state(Recipe("delayed"))),
    "state_missing": _activating("state", Recipe("delayed"), 2, 2, state=None),
    "state_of_other_groups": _activating(
        "state", Recipe("delayed"), 2, 2, state=new_quantizer_state(Recipe("delayed"), num_groups=2)
    ),
    "columns_no_multiple": _activating("h", Recipe("mxfp8"), 32, 34),
    "rows_no_multiple": on_device(_activating("splits", Recipe("mxfp8"), 64, 64, splits=torch.tensor([16, 48]))),
    "rounding_a_word": setting("round_before_quantize", "bfloat16"),
}


TRANSFORM_NOT_ROUNDED: dict[str, Rule] = {
    "transform_not_rounded": _activating(
        "round_before_quantize", Recipe("nvfp4", stochastic_rounding=False), 16, 32, columnwise=True
    ),
}


QUANTIZED_BACKWARD: dict[str, Rule] = TRANSFORM_NOT_ROUNDED | {
    "cotangent_too_long": one_more("d_out"),
    "cotangent_in_another_dtype": in_dtype("d_out", torch.float16),
    "noise_unasked": setting("noise", torch.zeros(2, 2, 2)),
}


GLU_AND_QUANTIZE: dict[str, Rule] = QUANTIZED_ACTIVATION | OF_GATES | TRANSFORM_NOT_ROUNDED
ACTIVATION_AND_QUANTIZE: dict[str, Rule] = (
    QUANTIZED_ACTIVATION | TRANSFORM_NOT_ROUNDED | {"kind_with_a_gate": setting("kind", "swiglu")}
)
GLU_BACKWARD_AND_QUANTIZE: dict[str, Rule] = QUANTIZED_ACTIVATION | OF_GATES | QUANTIZED_BACKWARD
ACTIVATION_BACKWARD_AND_QUANTIZE: dict[str, Rule] = (
    QUANTIZED_ACTIVATION | QUANTIZED_BACKWARD | {"kind_with_a_gate": setting("kind", "swiglu")}
)
