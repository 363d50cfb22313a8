"""Cases of more than 65,535 rows, for a GPU: the reference passes, and a kernel that drops the rows
past 2¹⁶ fails.
"""

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.shapes import TALL
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.interface import load
from tests.common.suite import outcome_of, wrapped

EMPTY_SLOT = -1
FUNCTIONS = [function for function, contract in CONTRACTS.items() if contract.shapes.tall]


def tall_case(function):
    (case,) = scope_of(function, Space(device="cuda")).tall()
    return case


def without_last(x):
    """The tensor, with nothing in the rows past 2¹⁶."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or len(x) < TALL:
        return x
    below_2_16 = torch.arange(len(x)) < TALL - 1
    nothing = EMPTY_SLOT if x.dtype in (torch.int32, torch.int64) and x.shape[1:] == (1,) else 0
    return torch.where(below_2_16.reshape(-1, *[1] * (x.dim() - 1)), x, torch.tensor(nothing, dtype=x.dtype))


def short(original, *arguments, **settings):
    return original(*map(without_last, arguments), **{name: without_last(x) for name, x in settings.items()})


def test_a_gpu_alone_has_tall_cases():
    assert {"quantize", "glu", "unpermute", "gate", "jitter"} <= set(FUNCTIONS)
    for function in FUNCTIONS:
        assert tall_case(function) in scope_of(function, Space(device="cuda")).always()
        assert scope_of(function, Space()).tall() == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_kernel_without_rows_past_65535_fails_a_tall_case_that_the_reference_passes(function):
    assert outcome_of(tall_case(function), load("moe_ref").namespace).status == "PASS"
    assert outcome_of(tall_case(function), wrapped(function, short)).status == "FAIL"
