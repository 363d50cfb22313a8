"""Fixed products that are large enough for ratios: all are judged by them, and a result that is cut
off instead of rounded is found by them, too.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.experts.cases import GroupedCase
from conformance.families.experts.space_ratios import SHORT, ratio_cases
from conformance.interface import Implementation
from conformance.judge import judge
from conformance.judge.ratios import LEAST_ELEMENTS, RowWise
from tests.honest.low_precision import Way, make, scaled_first

poison.install()
FUNCTIONS = tuple(SHORT)
CASES = [case for function in FUNCTIONS for case in ratio_cases(scope_of(function, Space()))]


def cut_off(x: Tensor) -> Tensor:
    """The next number of bfloat16 towards zero, in float32."""
    return (x.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


def in_high_precision(function: str) -> SimpleNamespace:
    def product(first, second, counts):
        return cut_off(getattr(moe_ref, function)(first.double(), second.double(), counts)).bfloat16()

    return SimpleNamespace(**{function: product})


def truncating(case: GroupedCase) -> SimpleNamespace:
    low = make(Way(product=lambda first, second, recipe: cut_off(scaled_first(first, second, recipe))))
    return low if case.scaling else in_high_precision(case.function)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{case.scaling}")
def test_each_is_judged_by_ratios_which_find_what_is_cut_off_without_the_bound(case):
    contract = CONTRACTS[case.function]
    problem = contract.problem(case)
    (expected,) = contract.expected(case, problem, {}).values()
    assert isinstance(expected, RowWise)
    assert len(expected.judged) * expected.value.shape[-1] >= LEAST_ELEMENTS
    assert judge("out", expected, expected.reference) is None
    assert evaluate(case, Implementation(moe_ref)).status == "PASS"
    assert evaluate(case, Implementation(truncating(case))).status == "FAIL"
    cut = getattr(truncating(case), case.function)(*problem.required.values(), **problem.settings)
    assert judge("out", replace(expected, bound=10 * expected.bound), cut).check == "ratio"


def test_every_product_has_one_in_each_precision_and_all_are_run():
    assert [(case.function, case.scaling) for case in CASES] == [
        (f, s) for f in FUNCTIONS for s in ("", "current", "block", "nvfp4")
    ]
    for function in FUNCTIONS:
        assert set(ratio_cases(scope_of(function, Space()))) <= set(scope_of(function, Space()).always())


@pytest.mark.parametrize(
    ("lacking", "remaining"), [("recipe", [("", 0)]), ("noise", [("", 0), ("current", 0), ("block", 0), ("nvfp4", 1)])]
)
def test_settings_that_an_implementation_lacks_have_no_case(lacking, remaining):
    for function in FUNCTIONS:
        cases = ratio_cases(scope_of(function, Space(without={function: frozenset({lacking})})))
        assert [(case.scaling, case.variant) for case in cases] == remaining
