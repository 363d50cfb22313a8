"""The planted faults here, where kernels are interpreted; --sanitize finds them on a GPU."""

import pytest

from conformance.families.experts.cases import GroupedCase
from tests.common.fast import interpreted
from tests.common.suite import outcome_of
from tests.sanitizers import faults

SMALL = GroupedCase(function="grouped_wgrad", tokens=50, experts=2, hidden=40, width=40, dtype="bfloat16", seed=1)
TINY = GroupedCase(  # its last row is tiny
    function="grouped_wgrad", tokens=1000, hidden=4, width=4, values="rows", dtype="bfloat16", seed=4
)


@interpreted
@pytest.mark.parametrize("case", [SMALL, TINY], ids=["small", "tiny"])
def test_the_kernel_without_a_fault_is_right(case):
    assert outcome_of(case, faults.Right).status == "PASS"


@interpreted
def test_a_row_left_out_of_a_thousand_is_within_the_tolerance():
    assert outcome_of(TINY, faults.LeavesOutARow).status == "PASS"
    assert outcome_of(SMALL, faults.LeavesOutARow).status == "FAIL"


@interpreted
def test_the_interpreter_finds_a_store_past_the_end():
    outcome = outcome_of(SMALL, faults.StoresPastTheEnd)
    assert (outcome.status, outcome.finding["check"]) == ("FAIL", "memory")
