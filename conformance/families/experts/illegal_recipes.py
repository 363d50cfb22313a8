"""Illegal calls of functions with a recipe: recipes, states, noise and incomplete blocks.

Constructing an invalid recipe raises already. A rule on an argument that only a backward reads
belongs to grouped_dgrad and grouped_wgrad.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.illegal import on_device
from moe_ref.config import LinearState, Recipe
from moe_ref.config.state import new_quantizer_state

Rule = Callable[[Problem], Problem]
CURRENT, DELAYED, MXFP8, NVFP4 = (
    Recipe("current"),
    Recipe("delayed", amax_history_len=2),
    Recipe("mxfp8"),
    Recipe("nvfp4"),
)
OVERRIDDEN = Recipe("nvfp4", backward_override="dequantized")
BOTH_LEVELS = Recipe(
    "nvfp4", hadamard=False, stochastic_rounding=False, row_scaled_activation=True, four_over_six="activations"
)
OF_ONE = ("shared_experts", "latent_projection")  # functions of one expert with all rows
PAIRED = ("grouped_mlp", "shared_experts")  # functions of two layers, with a state and a noise per layer


def state_for(experts: int, length: int = 2, dtype: torch.dtype = torch.float32) -> LinearState:
    """The state before the first step."""
    state = new_quantizer_state(Recipe("delayed", amax_history_len=length), num_groups=experts)
    assert state is not None
    return LinearState(*(type(state)(*(tensor.to(dtype) for tensor in state)) for _ in range(3)))


def factors(
    function: str, rows: int, columns: int, outputs: int, counts: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Zeros for the tensor arguments of a function, for as many experts as there are counts."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    experts, token_counts = len(counts), {"tokens_per_expert": torch.tensor(counts)}
    weights = {"fc1_weight": zeros(experts, 2 * outputs, columns), "fc2_weight": zeros(experts, columns, outputs)}
    return {
        "grouped_linear": {"rows": zeros(rows, columns), "weight": zeros(experts, outputs, columns)} | token_counts,
        "grouped_dgrad": {"d_out": zeros(rows, outputs), "weight": zeros(experts, outputs, columns)} | token_counts,
        "grouped_wgrad": {"d_out": zeros(rows, outputs), "rows": zeros(rows, columns)} | token_counts,
        "grouped_mlp": {"rows": zeros(rows, columns)} | token_counts | weights,
        "sequential_mlp": {"rows": zeros(rows, columns)} | token_counts | weights,
        "shared_experts": {"x": zeros(rows, columns)} | {name: weight[0] for name, weight in weights.items()},
        "latent_projection": {"x": zeros(rows, columns), "weight": zeros(outputs, columns)},
    }[function]


def by_recipe(
    blame: str,
    recipe: Recipe | None,
    *,
    rows: int = 2,
    columns: int = 1,
    outputs: int = 1,
    counts: tuple[int, ...] = (1, 1),
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> Rule:
    """The call with this recipe, and a state and a noise per layer."""

    def break_it(problem: Problem) -> Problem:
        twice, experts = problem.function in PAIRED, 1 if problem.function in OF_ONE else len(counts)
        values = {name: x(experts) if callable(x) else x for name, x in settings.items()}
        settings_of_layers = {name: (x, x) if twice and name in ("state", "noise") else x for name, x in values.items()}
        required = factors(problem.function, rows, columns, outputs, counts, dtype)
        recipe_setting: dict[str, Any] = {} if recipe is None else {"recipe": recipe}
        return replace(
            problem,
            required=required,
            settings=recipe_setting | settings_of_layers,
            blame=blame,
            wanted=(),
            cotangents={},
            layouts={},
        )

    return break_it


BLOCKS: dict[str, Any] = {"rows": 64, "columns": 32, "outputs": 32, "counts": (32, 32)}
_RECIPE: dict[str, Rule] = {
    "recipe_a_word": lambda problem: replace(by_recipe("recipe", None)(problem), settings={"recipe": "mxfp8"}),
    "state_missing": by_recipe("state", DELAYED),
}
_STATE: dict[str, Rule] = {
    "state_without_recipe": by_recipe("state", None, state=state_for),
    "noise_without_recipe": by_recipe("noise", None, noise=torch.zeros(2, 2, 2)),
    "noise_for_what_is_not_quantised": by_recipe("noise", OVERRIDDEN, **BLOCKS, noise=torch.zeros(2, 64, 32)),
    "state_of_nothing": by_recipe("state", CURRENT, state=state_for),
    "state_a_dictionary": by_recipe("state", DELAYED, state={"input": 1.0}),
    "state_of_other_experts": by_recipe("state", DELAYED, state=lambda experts: state_for(experts + 1)),
    "state_of_another_length": by_recipe("state", DELAYED, state=partial(state_for, length=3)),
    "state_in_half": by_recipe("state", DELAYED, state=partial(state_for, dtype=torch.bfloat16)),
}
_BLOCKS: dict[str, Rule] = {
    "columns_no_multiple_of_blocks": by_recipe("weight", MXFP8, **BLOCKS | {"columns": 33}),
    "outputs_no_multiple_of_blocks": by_recipe("weight", MXFP8, **BLOCKS | {"outputs": 33}),
    "columns_no_multiple_of_small_blocks": by_recipe(
        "weight", Recipe("nvfp4", stochastic_rounding=False), **BLOCKS | {"columns": 24}
    ),
}
_SEGMENTS: dict[str, Rule] = {
    "count_no_multiple_of_blocks": on_device(by_recipe("tokens_per_expert", MXFP8, **BLOCKS | {"counts": (16, 48)}))
}
_ALL_TOKENS: dict[str, Rule] = {"tokens_no_multiple_of_blocks": by_recipe("x", MXFP8, **BLOCKS | {"rows": 33})}
_NOISE: dict[str, Rule] = {
    "noise_unasked": by_recipe("noise", CURRENT, noise=torch.zeros(2, 2, 1)),
    "noise_of_one_direction": by_recipe("noise", NVFP4, **BLOCKS, noise=torch.zeros(1, 64, 32)),
    "noise_of_integers": by_recipe("noise", NVFP4, **BLOCKS, noise=torch.zeros(2, 64, 32, dtype=torch.int64)),
}
_TOKENS: dict[str, Rule] = {
    "transform_of_floats": by_recipe("rows", NVFP4, **BLOCKS, dtype=torch.float32, noise=torch.zeros(2, 64, 32)),
    "two_levels_of_rows_along_tokens": by_recipe("recipe", BOTH_LEVELS, **BLOCKS),
}
_PAIRS: dict[str, Rule] = {
    "state_of_one_layer": lambda problem: _unpaired(by_recipe("state", DELAYED, state=state_for)(problem), "state"),
    "noise_of_one_layer": lambda problem: _unpaired(
        by_recipe("noise", NVFP4, **BLOCKS, noise=torch.zeros(2, 64, 32))(problem), "noise"
    ),
}
_NONE: dict[str, Rule] = {
    "state_for_all_experts": by_recipe("state", DELAYED, state=(state_for(2), state_for(2))),
    "noise_for_all_experts": by_recipe(
        "noise", NVFP4, **BLOCKS, noise=(torch.zeros(2, 64, 64), torch.zeros(2, 64, 32))
    ),
}


def _unpaired(problem: Problem, name: str) -> Problem:
    return replace(problem, settings=problem.settings | {name: problem.settings[name][0]})


GROUPED_LINEAR: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _SEGMENTS
GROUPED_DGRAD: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _SEGMENTS | _NOISE
GROUPED_WGRAD: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _SEGMENTS | _NOISE | _TOKENS
LATENT_PROJECTION: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _ALL_TOKENS
GROUPED_MLP: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _SEGMENTS | _PAIRS
SEQUENTIAL_MLP: dict[str, Rule] = _RECIPE | _BLOCKS | _SEGMENTS | _NONE
SHARED_EXPERTS: dict[str, Rule] = _RECIPE | _STATE | _BLOCKS | _ALL_TOKENS | _PAIRS
