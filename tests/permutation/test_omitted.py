"""Every third case leaves out an optional setting that the other arguments imply."""

import pytest

import moe_ref
from conformance.families.permutation.cases import RoutingCase
from tests.common.suite import outcome_of, reference

CASES = [RoutingCase(function="unpermute", tokens=3, experts=2, seed=seed) for seed in range(3)]


def without_a_default(rows, row_map, *, restore_shape, probs=None):
    return moe_ref.unpermute(rows, row_map, restore_shape=restore_shape, probs=probs)


def with_a_wrong_default(rows, row_map, *, restore_shape=None, probs=None):
    out = moe_ref.unpermute(rows, row_map, restore_shape=restore_shape, probs=probs)
    return out if restore_shape else out[:1]


@pytest.mark.parametrize(
    ("unpermute", "statuses"),
    [
        (moe_ref.unpermute, ["PASS"] * 3),
        (without_a_default, ["PASS"] * 3),
        (with_a_wrong_default, ["FAIL", "PASS", "PASS"]),
    ],
)
def test_restore_shape_is_left_out_where_it_has_a_default(unpermute, statuses):
    assert [outcome_of(case, reference(unpermute=unpermute)).status for case in CASES] == statuses


def test_the_finding_says_what_the_call_was_without():
    implementation = reference(unpermute=with_a_wrong_default)
    assert outcome_of(CASES[0], implementation).finding["message"].endswith("; called without restore_shape")
