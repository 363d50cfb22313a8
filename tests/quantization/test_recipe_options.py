"""The recipes of the cases have every pair of options that makes a difference."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.families.quantization.cases import RECIPES, VARIANTS, QuantizeCase
from moe_ref.config import Recipe
from moe_ref.config.quantization import AMAX_ALGORITHMS, ERRORS, FP8_FORMATS, SCOPES

OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "delayed": {"fp8_format": FP8_FORMATS, "margin": (0, 2), "amax_history_len": (1, 3, 1024),
     "amax_compute_algo": AMAX_ALGORITHMS},
    "current": {"fp8_format": FP8_FORMATS, "power_of_two_scales": (False, True), "amax_epsilon": (0.0, 1.5)},
    "mxfp8": {"fp8_format": FP8_FORMATS, "two_dimensional_weights": (False, True)},
    "nvfp4": {**dict.fromkeys(("two_dimensional_weights", "hadamard", "stochastic_rounding"), (False, True)),
     "row_scaled_activation": (False, True), "four_over_six": SCOPES, "four_over_six_bound_256": SCOPES,
     "four_over_six_error": ERRORS},
}  # fmt: skip
OPTIONS["block"] = OPTIONS["current"] | OPTIONS["mxfp8"]


def pairs_of_options(recipe: Recipe) -> set[frozenset[tuple[str, Any]]]:
    """Pairs of options with an effect; without four over six its bound and error have none."""
    without = recipe.four_over_six == "none"
    options = {name: getattr(recipe, name) for name in OPTIONS[recipe.scaling]}
    used = {name: x for name, x in options.items() if not (without and name.startswith("four_over_six_"))}
    return {frozenset(pair) for pair in itertools.combinations(used.items(), 2)}


def legal_recipes(scaling: str) -> Iterator[Recipe]:
    for values in itertools.product(*OPTIONS[scaling].values()):
        with contextlib.suppress(ValueError):
            yield Recipe(scaling, **dict(zip(OPTIONS[scaling], values, strict=True)))


def missing_pairs(scaling: str, recipes: tuple[Recipe, ...]) -> set[frozenset[tuple[str, Any]]]:
    pairs = set().union(*map(pairs_of_options, legal_recipes(scaling)))
    return pairs - set().union(*map(pairs_of_options, recipes))


@pytest.mark.parametrize("scaling", RECIPES)
def test_every_pair_of_options_is_in_a_recipe(scaling):
    assert not missing_pairs(scaling, RECIPES[scaling])
    assert missing_pairs(scaling, RECIPES[scaling][:-1])  # the last one is needed


def test_every_recipe_runs_in_each_role_that_differs():
    ran = {(case.scaling, case.variant) for case in scope_of("quantize", Space()).always()}
    assert {(scaling, i) for scaling, recipes in RECIPES.items() for i in range(VARIANTS, len(recipes))} <= ran


def test_a_variant_without_a_recipe_is_refused():
    case = QuantizeCase(function="quantize", scaling="current", variant=9)
    assert scope_of("quantize", Space()).refused(case) == "variant is 9; current has 5 recipes"
