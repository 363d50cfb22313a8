"""Without the reference, a release fails in the calls that its kernels do not serve."""

import pytest

from conformance.families.permutation.cases import routed
from conformance.peers.te import Adapter
from tests.te.judging import Checked, judged
from tests.te.standin import standin


def has_tail(case):
    """Rows past the last segment."""
    return bool(case.tail)


def has_tail_in_its_law(case):
    return has_tail(case) or case.law == "padding_independence"


def is_empty(case):
    """No column, no chunk, or nothing routed."""
    return case.hidden == 0 or (not case.sizes if case.function == "sort_chunks" else not routed(case).any())


UNSERVED = [  # functions, cases of a section, the cases that fail, the number of cases that pass at least
    (("grouped_linear",), 10, has_tail, 8),
    (("grouped_dgrad", "grouped_wgrad"), 30, has_tail_in_its_law, 40),
    (("grouped_mlp",), 20, has_tail, 8),
    (("permute", "unpermute", "sort_chunks"), 25, is_empty, 20),
]


@pytest.mark.parametrize(("functions", "most", "is_unserved", "passing"), UNSERVED, ids=lambda x: "")
def test_alone_the_newest_release_fails_only_in_calls_that_its_kernels_do_not_serve(
    functions, most, is_unserved, passing
):
    te = standin("2.20")
    outcomes = judged(Checked(te, Adapter(te)), functions, most)
    failing = [case for case, x in outcomes if x.status in ("FAIL", "BLOCKED") and not case.golden]
    assert failing and all(map(is_unserved, failing))
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) > passing
