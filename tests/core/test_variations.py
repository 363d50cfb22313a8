"""The cases of structures have each value of the data axes and most pairs, unlike random draws."""

from dataclasses import replace
from itertools import combinations

import pytest

from conformance.core import variations
from conformance.core.signature import FAR
from conformance.core.space import Space
from conformance.core.variations import Variations
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES

FEW = Space("cuda", ranks=1, few_kernels=True)
SPREADS = {"all", "uniform", "skewed", "one_hot", "empty", "ragged", "sparse"}
FUNCTIONS = ("permute", "topk_routing", "aux_loss_scores", "quantize", "glu", "grouped_linear", "moe_layer")


def structures(function, count, first=6):
    """Cases of the first structures of an array, drawn together."""
    scope, drawn = scope_of(function, FEW), Variations(scope_of(function, FEW))
    return [drawn.of(case, count, count, seed) for seed, case in enumerate(scope.covering().cases[:first])]


def pairs(function, cases):
    """The pairs of values of data, and of these and laws, that the cases have."""
    scope = scope_of(function, FEW)
    axes = [axis for axis in scope.axes if axis.data and axis.alternatives(scope.signature, cases[0])]
    values = [
        [("law", case.law), *((a.name, getattr(case, a.name)) for a in axes if getattr(case, a.name) in a.listed())]
        for case in cases
    ]
    return {pair for values_of_case in values for pair in combinations(values_of_case, 2)}


def at_random(monkeypatch):
    """Draw independently of the cases before."""
    monkeypatch.setattr(variations, "CANDIDATES", 1)
    monkeypatch.setattr(variations, "WANTED", 0.0)
    monkeypatch.setattr(Variations, "_meet", lambda self, structure, case: None)


def test_a_structure_has_each_value_of_its_data():
    scope = scope_of("pad_routing_map", FEW)
    first = scope.case({"tokens": 20, "experts": 5, "topk": 2, "spread": "uniform", "align": 2, "law": "determinism"})
    cases = Variations(scope).of(first, 17, 34, 0)
    assert {case.align for case in cases} >= {1, 2, 3, 4, 8, 16, 32, 64, 128, 256}
    assert {case.spread for case in cases} >= SPREADS
    assert {case.law for case in cases} == {*scope.cheap_laws(first)}


def test_a_structure_drawn_at_random_lacks_some_value_of_its_data(monkeypatch):
    at_random(monkeypatch)
    test = test_a_structure_has_each_value_of_its_data
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_structures_together_have_more_pairs_of_data_than_draws_at_random(function, monkeypatch):
    chosen = pairs(function, [case for structure in structures(function, 17) for case in structure])
    at_random(monkeypatch)
    drawn = pairs(function, [case for structure in structures(function, 17) for case in structure])
    assert len(chosen) > 1.1 * len(drawn)


def test_more_cases_run_while_they_have_new_pairs():
    scope = scope_of("quantize", FEW)
    first = scope.covering().cases[0]
    drawn = Variations(scope)
    numbers = [len(drawn.of(first, 5, 40, seed)) for seed in range(4)]
    assert numbers[0] > 5 and numbers[-1] == 5


@pytest.mark.parametrize("function", ["load_balancing_loss", "z_loss", "aux_loss_scores", "glu"])
def test_each_input_and_cotangent_is_negated_in_some_case(function):
    cases = cases_of(Section("covering", function), PROFILES["gate"], Space("cuda", ranks=1), 0)
    scope = scope_of(function, FEW)
    negatable = {name for case in cases if case.layout not in FAR for name in scope.signature.negatable(case)}
    assert {case.layout_of for case in cases if case.layout == "negated"} == negatable
    assert any(name.startswith("d_") for name in negatable)


def test_a_structure_of_another_layout_keeps_it():
    scope = scope_of("z_loss", FEW)
    first = scope.case({"tokens": 20, "experts": 5, "grads": "logits", "layout": "strided", "layout_of": "logits"})
    assert {case.layout for case in Variations(scope).of(first, 17, 34, 0)} == {"strided"}
    contiguous = replace(first, layout="contiguous", layout_of="")
    assert {case.layout for case in Variations(scope).of(contiguous, 17, 34, 0)} == {"contiguous", "negated"}
