"""Laws that put other values in the storage of a call: segments change, the tail stays."""

from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.families.experts.cases import GroupedCase
from conformance.families.experts.laws import BUFFER_REUSE, turned
from tests.common.suite import outcome_of, wrapped

SIZES = {"tokens": 3, "experts": 2, "counts": (2, 1), "hidden": 1, "width": 1, "tail": 3}
CASES = [
    GroupedCase(function=function, scaling="nvfp4", variant=1, dtype="bfloat16", **SIZES)
    for function in ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.function)


@each_case
def test_the_reference_keeps_buffer_reuse_in_nvfp4_with_a_tail(case):
    assert BUFFER_REUSE.applies(case)
    assert outcome_of(replace(case, law="buffer_reuse"), moe_ref).status == "PASS"


@each_case
def test_results_remembered_by_address_break_buffer_reuse_in_nvfp4_with_a_tail(case):
    results = {}

    def by_address(original, x, *arguments, **settings):
        return results.setdefault((x.data_ptr(), x.shape), original(x, *arguments, **settings)).clone()

    outcome = outcome_of(replace(case, law="buffer_reuse"), wrapped(case.function, by_address))
    assert (outcome.status, outcome.finding["check"]) == ("FAIL", "buffer_reuse")


@each_case
def test_turned_rows_stay_in_their_segments(case):
    problem = CONTRACTS[case.function].legal(case)
    name, rows = next(iter(problem.required.items()))
    total = int(problem.required["tokens_per_expert"].sum())
    second = turned(problem).required[name]
    torch.testing.assert_close(second[:total], -rows[:total].flip(0), rtol=0, atol=0)
    torch.testing.assert_close(second[total:], rows[total:], rtol=0, atol=0, equal_nan=True)
    assert not second[total:].isfinite().all()
