"""On a GPU each pair of options, and each recipe and direction, has a case of a model's size."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.axes import Dtype, Size
from conformance.core.case import axes_of
from conformance.core.model_sizes import ALIKE, EXACT, LINE, TRIED
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, structures_of
from conformance.engine.choose.profiles import PROFILES
from conformance.families.quantization.cases import RECIPES, recipe_of
from tests.common.suite import outcome_of, wrapped

GPU = Space(device="cuda", ranks=1, shared_ranks=4)
SIZED = [name for name, contract in CONTRACTS.items() if contract.shapes.models]
ROWS, COLUMNS = 128, 256  # where another tile begins


@cache
def cases(function: str, kind: str = "models") -> list[Any]:
    structures = structures_of(Section(kind, function), PROFILES["gate"], GPU, 0)
    return [case for structure in structures for case in structure]


def scope(function: str) -> Scope:
    return scope_of(function, replace(GPU, few_kernels=True))


def test_every_function_with_a_width_or_experts_has_such_cases():
    sizes = {"hidden", "width", "experts"}
    for name, contract in CONTRACTS.items():
        several = contract.signature.producer.endswith("dispatch") or name.endswith(("dispatch", "combine"))
        if contract.shapes.kernels and not several and sizes & scope(name).live and contract.shapes.real:
            assert cases(name), name


@pytest.mark.parametrize("function", SIZED)
def test_each_length_has_a_case(function):
    """Its own, its odd neighbour, or the next one that an interleave divides."""
    for name, lengths in CONTRACTS[function].shapes.models.items():
        if name not in scope(function).live:
            continue
        for length in lengths:
            above = [getattr(case, name) + length // -unit_of(case, name) for case in cases(function)]
            assert any(0 <= excess <= LINE * TRIED for excess in above), (name, length)


def unit_of(case: Any, name: str) -> int:
    """The elements of a unit of the size."""
    return 1 if name in EXACT else case.row_unit if name == "tokens" else case.unit


@pytest.mark.parametrize("function", ["quantize", "glu", "activation", "topk_routing", "glu_and_quantize"])
def test_each_pair_of_option_values_has_a_case(function):
    shapes, known = CONTRACTS[function].shapes, axes_of(CONTRACTS[function].case_type)
    base = shapes.covered | shapes.of_models
    options = {name for name, axis in known.items() if not isinstance(axis, Size | Dtype) and name not in ALIKE}
    axes = scope(function).covered_axes(base, {}, options)
    rows = scope(function).array(base, {}, {*axes}).cases
    pairs = {(a, getattr(row, a), b, getattr(row, b)) for row in rows for a, b in combinations(axes, 2)}
    missing = {(a, x, b, y) for a, x, b, y in pairs if not any(case.has({a: x, b: y}) for case in cases(function))}
    assert not missing


def test_each_recipe_has_a_case_in_each_direction_beyond_a_tile():
    wide_cases = [case for case in cases("quantize") if case.hidden * case.unit > COLUMNS]
    reached = {(case.scaling, case.variant, case.direction) for case in wide_cases}
    variants = {(scaling, variant) for scaling, recipes in RECIPES.items() for variant in range(len(recipes))}
    assert {(scaling, variant) for scaling, variant, _ in reached} == variants
    assert len(reached) > 2 * len(variants)


@pytest.mark.parametrize("function", [name for name in SIZED if CONTRACTS[name].shapes.model_rows])
def test_each_further_row_of_options_has_a_case(function):
    rows = CONTRACTS[function].shapes.model_rows
    missing = [row for row in rows if not any(case.has(row) for case in cases(function))]
    # a score that the function does not have
    assert all(function == "aux_loss_scores" and row["score"] == "softmax_pre" for row in missing)


def test_a_long_search_drops_tokens_of_some_experts_and_none_of_others():
    for case in cases("drop_tokens"):
        if case.tokens == 4096:
            routed = CONTRACTS["drop_tokens"].problem(case).required["routing_map"].bool().sum(0)
            assert routed.min() < case.capacity < routed.max(), case.text


@pytest.mark.parametrize("function", ["permute_and_quantize", "grouped_mlp", "glu_and_quantize"])
def test_the_reference_can_afford_their_rows_and_weights(function):
    for case in cases(function):
        widths = [getattr(case, name) * case.unit for name in ("hidden", "width") if hasattr(case, name)]
        assert case.tokens * case.row_unit * sum(widths) < 2**20, case.text


def test_four_over_six_by_rows_alone_has_a_case_beyond_a_tile():
    beyond_a_tile = [case for case in cases("quantize") if case.hidden * case.unit > COLUMNS]
    assert any(case.direction == "rowwise" and recipe_of(case).four_over_six == "all" for case in beyond_a_tile)


@pytest.mark.parametrize("function", ["grouped_linear", "glu", "grouped_mlp"])
def test_some_cases_are_of_whole_lines_and_some_are_odd(function):
    assert {case.width % LINE == 0 for case in cases(function)} == {True, False}


@pytest.mark.parametrize("function", SIZED)
def test_they_differ_from_small_cases_in_sizes_alone(function):
    axes = axes_of(CONTRACTS[function].case_type)
    assert all(case.law == "" and scope(function).fits(case) for case in cases(function))
    assert all(case.seed == 0 or "seed" in axes for case in cases(function))


@pytest.mark.parametrize(("profile", "space"), [("gate", Space()), ("smoke", GPU)], ids=["a CPU", "a smoke run"])
def test_such_cases_are_left_out_by(profile, space):
    assert not list(structures_of(Section("models", "grouped_mlp"), PROFILES[profile], space, 0))


# ---- mistakes past the first tile, with one option


def lost(x: torch.Tensor) -> torch.Tensor:
    """x with 0 where other tiles than the first would be, in both dimensions."""
    x = x.clone()
    x[ROWS:, COLUMNS:] = 0
    return x


MISTAKES = {
    "probs on the input": ("grouped_mlp", lambda settings: settings.get("probs_on_input")),
    "a second bias": ("sequential_mlp", lambda settings: settings.get("fc2_bias") is not None),
    "a clamp of a layer": ("shared_experts", lambda settings: settings.get("clamp")),
    "delayed scaling": ("latent_projection", lambda settings: settings.get("state") is not None),
    "an interleaved gate": ("glu", lambda settings: settings.get("interleave")),
    "a clamp": ("glu_and_quantize", lambda settings: settings.get("clamp")),
    "probs": ("glu_backward_and_quantize", lambda settings: settings.get("probs") is not None),
    "no probs": ("permute", lambda settings: settings.get("probs") is None),
}


@pytest.mark.parametrize("option", MISTAKES)
def test_a_second_tile_that_an_option_loses_is_found(option):
    function, has = MISTAKES[option]

    def mistaken(original: Any, x: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        return original(lost(x) if has(settings) else x, *arguments, **settings)

    implementation = wrapped(function, mistaken)
    tall = [case for case in cases(function) if case.tokens * case.row_unit > ROWS]
    assert "FAIL" in {outcome_of(case, implementation).status for case in tall}
