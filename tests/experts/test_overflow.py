"""Stages past the largest number of float16: infinities, NaN, or the number of a wider stage."""

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.experts.cases_mlp import OVERFLOW
from conformance.interface import load

FUNCTIONS = ("grouped_mlp", "sequential_mlp", "shared_experts")
SATURATING = {"AD79": "out", "AD80": "out", "AD81": "d_rows", "AD82": "d_fc1_weight"}


def overflowing(function: str) -> list[Case]:
    return [case for case in scope_of(function, Space()).always() if getattr(case, "values", "") == OVERFLOW]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("implementation", ["tests.honest.layers:Kept", "tests.honest.layers:Stages"])
def test_stages_in_float16_and_wider_ones_are_accepted(implementation, function):
    loaded = load(implementation)
    outcomes = [evaluate(case, loaded) for case in overflowing(function)]
    assert outcomes
    assert {(x.status, str(x.finding)) for x in outcomes} <= {("PASS", "None"), ("NOT_OFFERED", "None")}


@pytest.mark.parametrize("defect", SATURATING)
def test_a_stage_that_saturates_is_found(defect):
    cases = overflowing("grouped_mlp")
    outcomes = [evaluate(case, load(f"conformance.mutants.planted:{defect}.moe_ref")) for case in cases]
    assert SATURATING[defect] in {x.finding["output"] for x in outcomes if x.finding}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_cases_have_rows_that_overflow_rows_that_depend_on_them_and_others(function):
    """Some results are past the largest number, some depend on a stage that is, some on none."""
    spoilt, unspoilt, infinite = 0, 0, 0
    for case in overflowing(function):
        problem = CONTRACTS[function].problem(case)
        for expected in CONTRACTS[function].expected(case, problem, {}).values():
            spoilt += int((expected.spoilt & expected.value.isfinite()).sum())
            unspoilt += int((~expected.spoilt & expected.bound.isfinite()).sum())
            infinite += int(expected.value.isinf().sum())
    assert min(spoilt, unspoilt, infinite) > 20


def test_cotangents_stay_finite():
    for function in FUNCTIONS:
        for case in overflowing(function):
            problem = CONTRACTS[function].problem(case)
            assert all(x.isfinite().all() for x in problem.cotangents.values())
            assert problem.required["fc1_weight"].dtype == torch.float16
