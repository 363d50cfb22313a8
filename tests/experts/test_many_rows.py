"""Cases with more than 2¹⁵ rows of an expert, and with sizes around the limit of a tuning class."""

import pytest

from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.experts.space_many import AROUND_4096, around_a_class, many_rows
from conformance.interface import load

GPU, CPU = Space(device="cuda"), Space()
COUNTED = {"N12": "grouped_linear", "N13": "grouped_dgrad", "N14": "grouped_wgrad", "N15": "grouped_mlp"}
TUNED = {"N16": ("glu", 4097), "N17": ("grouped_linear", 4096)}  # and the call that takes another's plan


def planted(name):
    return load(f"conformance.mutants.planted:{name}.moe_ref")


@pytest.mark.parametrize(("name", "function"), COUNTED.items())
def test_a_gpu_has_more_rows_of_an_expert_than_15_bits_count(name, function):
    scope = scope_of(function, GPU)
    (case,) = many_rows(scope)
    assert case in scope.always() and max(case.counts) > 2**15
    assert evaluate(case, load("moe_ref")).status == "PASS"
    assert evaluate(case, planted(name)).status == "FAIL"


@pytest.mark.parametrize(("name", "function", "tokens_at_fault"), [(name, *values) for name, values in TUNED.items()])
def test_a_plan_that_is_kept_for_a_class_of_sizes_is_wrong_for_one_of_three_calls(name, function, tokens_at_fault):
    scope = scope_of(function, GPU)
    cases = around_a_class(scope)
    assert set(cases) <= set(scope.always())
    assert tuple(case.tokens for case in cases) == AROUND_4096
    assert all(sorted(c.tokens for c in (*case.before, case)) == list(AROUND_4096) for case in cases)
    assert {evaluate(case, load("moe_ref")).status for case in cases} == {"PASS"}
    implementation = planted(name)
    assert [case.tokens for case in cases if evaluate(case, implementation).status == "FAIL"] == [tokens_at_fault]
    case = cases[AROUND_4096.index(tokens_at_fault)]  # after a call of another class alone it is right
    assert evaluate(case.changed(before=case.before[:1]), implementation).status == "PASS"


@pytest.mark.parametrize("function", ["glu", "grouped_linear", "grouped_mlp"])
def test_an_interpreter_has_no_case_of_many_rows_or_of_a_class_of_sizes(function):
    assert many_rows(scope_of(function, CPU)) == around_a_class(scope_of(function, CPU)) == []
