"""The cases of a structure run the same kernels, and few structures have every value of an axis."""

from dataclasses import replace

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.axes import size_class
from conformance.core.case import axes_of
from conformance.core.covering import Covered, covering
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.core.variations import Variations
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of, structures_of
from conformance.engine.choose.profiles import PROFILES, Amount
from conformance.families.router.space import SINKHORN_SPREADS

GPU = Space("cuda", ranks=1)
FEW = replace(GPU, few_kernels=True)


@pytest.mark.parametrize("function", CONTRACTS)
def test_the_cases_of_a_structure_are_legal_distinct_and_alike(function):
    scope = scope_of(function, FEW)
    for seed, first in enumerate(scope.covering().cases[:6]):
        cases = Variations(scope).of(first, 10, 10, seed)
        assert cases[0] == first
        assert cases == Variations(scope).of(first, 10, 10, seed)
        assert len({case.text for case in cases}) == len(cases) > 4
        assert all(scope.fits(case) and scope.alike(first, case) for case in cases)
        assert all(not case.law or case.law in scope.laws(case) for case in cases)


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"grads": "tokens"}, {"topk": 4}, {"layout": "strided", "layout_of": "tokens"}]
)
def test_cases_that_run_other_kernels_are_of_another_structure(change):
    scope = scope_of("permute", FEW)
    case = scope.case({"tokens": 20, "experts": 5, "hidden": 33, "topk": 2})
    assert not scope.alike(case, replace(case, **change))
    assert scope.alike(case, replace(case, seed=3, values="special", hidden=45))
    assert scope.alike(case, replace(case, layout="negated", layout_of="tokens"))


@pytest.mark.parametrize(("align", "same"), [(2, True), (64, True), (0, False)])
def test_cases_of_other_numbers_are_alike_where_both_are_given(align, same):
    scope = scope_of("permute", FEW)
    case = scope.case({"tokens": 20, "experts": 5, "hidden": 33, "topk": 2, "align": 16})
    assert scope.alike(case, replace(case, align=align)) == same


@pytest.mark.parametrize(("space", "values"), [(FEW, {0, 2}), (GPU, {0, 1, 2, 5, 16})], ids=["few", "all"])
def test_with_few_kernels_an_array_pairs_one_of_alike_values(space, values):
    scope = scope_of("permute_and_quantize", space)
    axes = scope.covered_axes({}, {"room": [{"align": n} for n in (0, 2, 1, 5, 16)]}, only=("room",))
    assert {value for ((_, value),) in axes["room"]} == values


@pytest.mark.parametrize(("hidden", "same"), [(7, True), (5, True), (6, False), (8, False)])
def test_cases_are_alike_where_products_of_their_sizes_are(hidden, same):
    scope = scope_of("latent_projection", FEW)
    case = scope.case({"tokens": 7, "hidden": 5, "width": 12})  # 5 · 12 is no multiple of 8; 6 · 12 is
    assert scope.alike(case, replace(case, hidden=hidden)) == same


@pytest.mark.parametrize(
    ("n", "second", "same"), [(1, 2, False), (5, 7, True), (15, 16, False), (17, 31, True), (48, 64, True)]
)
def test_sizes_of_one_class_have_one_divisibility_and_block(n, second, same):
    assert (size_class(n) == size_class(second)) == same


@pytest.mark.parametrize("function", CONTRACTS)
def test_with_few_kernels_each_layout_occurs_and_the_pairs_of_all_other_structural_axes(function):
    scope, shapes = scope_of(function, FEW), CONTRACTS[function].shapes
    axes = scope.covered_axes(shapes.covered, shapes.together(scope))
    cases = scope.covering().cases
    layouts = {(dict(value)["layout"], dict(value)["layout_of"]) for value in axes.get("layout", ())}
    fitting = {
        (case.layout, case.layout_of)
        for case in scope_of(function, GPU).covering().cases
        if (case.layout, case.layout_of) in layouts
    }
    assert fitting <= {(case.layout, case.layout_of) for case in cases}
    data = {name for name, axis in axes_of(CONTRACTS[function].case_type).items() if axis.data}
    assert data.isdisjoint(axes) or "counts" in axes  # the length of a list is structural


def test_an_axis_covered_once_needs_fewer_rows_and_loses_no_value():
    axes = {"a": (1, 2, 3), "b": (1, 2, 3), "many": tuple(range(9))}
    all_rows, *_ = covering(axes, lambda row: True)
    rows, *_ = covering(axes, lambda row: True, once=("many",))
    assert len(rows) < len(all_rows)
    assert {row["many"] for row in rows} == set(range(9))
    assert len({(row["a"], row["b"]) for row in rows}) == 9


def test_the_first_cases_of_an_array_have_the_wanted_share_of_its_pairs():
    array = scope_of("permute", FEW).covering()
    some = array.first(10**6, 0.9)
    assert 0.9 <= array.reached[len(some) - 1] / array.pairs < 1
    assert array.reached[len(some) - 2] / array.pairs < 0.9
    assert array.first(3, 0.9) == array.cases[:3]
    assert array.first(10**6, 1.0) == array.cases
    assert Covered([], [], 4).first(3, 1.0) == []


@pytest.mark.parametrize("space", [GPU, Space("cpu")], ids=["cuda", "cpu"])
def test_products_of_16_bit_values_have_long_sums_along_every_dimension(space):
    # a forward sums over columns, a gradient of rows over features, one of weights over tokens
    for function in ("grouped_linear", "grouped_dgrad", "grouped_wgrad"):
        cases = [case for case in scope_of(function, space).always() if case.dtype in ("bfloat16", "float16")]
        unscaled = [case for case in cases if not case.scaling]
        for dimension in ("hidden", "width", "tokens"):
            assert max(getattr(case, dimension) for case in unscaled) > 256, (function, dimension)


def test_a_law_that_runs_other_kernels_has_one_case_of_an_array():
    laws = [case.law for case in scope_of("permute", FEW).covering().cases]
    assert laws.count("history") == 1
    assert [case.law for case in scope_of("permute", GPU).covering().cases].count("history") > 3


def test_a_gpu_gets_fewer_structures_and_more_cases_than_a_cpu():
    gate = PROFILES["gate"]
    section = Section("covering", "sort_chunks")
    gpu, cpu = (list(structures_of(section, gate, space, 0)) for space in (GPU, Space("cpu")))
    assert len(gpu) < len(cpu) / 2
    assert sum(map(len, gpu)) > 2 * sum(map(len, cpu))
    assert {len(structure) for structure in cpu} == {1}


def test_cases_of_far_addresses_and_large_tensors_have_no_others_of_their_structure():
    structures = [
        s
        for function in ("permute", "grouped_linear")
        for s in structures_of(Section("fixed", function), PROFILES["gate"], GPU, 0)
    ]
    slow = [s for s in structures if s[0].is_large or s[0].layout.startswith("wide")]
    assert slow and all(len(structure) == 1 for structure in slow)
    assert any(len(structure) > 1 for structure in structures)


def test_an_amount_is_relative_to_the_weight():
    amount = Amount(drawn=10, rows=30, cases=1)
    assert (amount.structures("permute"), amount.covering("permute")) == (30, 90)
    assert amount.covering("grouped_mlp") == 20


def test_the_seed_of_a_run_changes_the_data_of_a_structure():
    section = Section("covering", "jitter")
    first, repeated, another_seed = (cases_of(section, PROFILES["gate"], GPU, seed) for seed in (0, 0, 1))
    assert first == repeated != another_seed


@pytest.mark.parametrize("function", ["gate", "route", "shared_experts", "alltoall_dispatch"])
def test_functions_of_ranks_have_cases_of_four_even_on_one_gpu(function):
    one_gpu = Space("cuda", ranks=1, shared_ranks=4)
    contract = CONTRACTS[function]
    for space, most in ((one_gpu, 4), (replace(one_gpu, shared_ranks=0), 1)):
        scope = scope_of(function, space)
        cases = [*scope.always(), *scope.covering().cases]
        assert max(1, *(ranks_of(contract, case) for case in cases)) == most


def test_cases_of_a_structure_have_plans_that_converge():
    scope = scope_of("sinkhorn_routing", FEW)
    spreads = {case.spread for first in scope.covering().cases for case in Variations(scope).of(first, 40, 40, 0)}
    assert {"distinct", "ties", "near"} <= spreads <= {*SINKHORN_SPREADS}
