"""A finding names the factor of a result that is wrong by a factor alone."""

import numpy as np
import pytest
import torch

from conformance.judge import judge
from conformance.judge.bound import Bounded
from conformance.judge.factor import plain_factor

RIGHT = np.array([3.0, -1.5, 0.25, 7.0, 0.0])
BOUND = np.full(5, 2.0**-20)


@pytest.mark.parametrize(
    ("name", "factor"), [("2", 2.0), ("1/2", 0.5), ("1/3", 1 / 3), ("−1", -1.0), ("0", 0.0), ("64", 64.0)]
)
def test_a_factor_is_found_through_rounding(name, factor):
    rounded = (RIGHT * factor).astype(np.float32).astype(np.float64) + 0.9 * BOUND
    assert plain_factor(RIGHT, rounded, BOUND) == name


@pytest.mark.parametrize(
    "got",
    [
        RIGHT,  # not wrong
        RIGHT * np.array([2.0, 2, 2, 1, 2]),  # one value right
        RIGHT * 2 + np.array([0, 0, 2.0**-17, 0, 0]),
        RIGHT * 1.01,
        RIGHT + 1,
    ],
)
def test_another_error_has_no_factor(got):
    assert plain_factor(RIGHT, got, BOUND) == ""


def test_one_value_is_no_factor():
    assert plain_factor(RIGHT[3:], 2 * RIGHT[3:], BOUND[3:]) == ""
    assert plain_factor(RIGHT, 2 * RIGHT, np.full(5, np.inf)) == ""


def test_the_message_of_a_finding_names_the_factor():
    value = torch.from_numpy(RIGHT)
    expected = Bounded(value, torch.from_numpy(BOUND), torch.float32, torch.float32)
    twice, shifted = judge("loss", expected, 2 * value.float()), judge("loss", expected, value.float() + 1)
    assert twice is not None and twice.message.endswith("; all values are 2 × the reference's")
    assert shifted is not None and "all values" not in shifted.message
