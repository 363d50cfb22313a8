"""torch's grouped products through their adapter."""

import functools

import pytest
import torch

import moe_ref
from conformance.peers import torch_grouped
from tests.common.fast import normal
from tests.te.judging import judged

number = functools.partial(normal, dtype=torch.bfloat16)
FUNCTIONS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")


def whole(case):
    """Columns of whole 16 bytes, in place, and no rows past the last segment."""
    sides = case.hidden % 8 == case.width % 8 == 0 and case.hidden and case.width
    return bool(sides and case.layout == "contiguous" and not case.tail and not case.law and case.tokens)


@pytest.mark.parametrize("counts", [[2, 0, 3], [5, 0, 0], [0, 0, 5]])
def test_products_are_the_reference_s(counts):
    rows, d_out, weight, splits = (
        number(5, 16),
        number(5, 8, seed=1),
        number(3, 8, 16, seed=2),
        torch.tensor(counts),
    )
    calls = {"grouped_linear": (rows, weight), "grouped_dgrad": (d_out, weight), "grouped_wgrad": (d_out, rows)}
    for function, arguments in calls.items():
        got, expected = (
            getattr(implementation, function)(*arguments, splits) for implementation in (torch_grouped, moe_ref)
        )
        assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=2**-6), function
        assert not torch.allclose(got.float(), expected.float().flip(-1), rtol=2**-7, atol=2**-6)


def test_rows_past_the_last_offset_are_left_to_the_gate():
    outcomes = judged(torch_grouped, FUNCTIONS, most=40)
    failed = [case for case, outcome in outcomes if outcome.status == "FAIL"]
    assert failed and all(case.tail or case.golden or 0 in (case.tokens, case.hidden, case.width) for case in failed)
    assert not [case for case, outcome in outcomes if outcome.status == "FAIL" and whole(case)]


def test_columns_of_no_whole_16_bytes_are_declared():
    arguments = {"rows": number(5, 16), "weight": number(3, 6, 16), "tokens_per_expert": torch.tensor([5, 0, 0])}
    assert torch_grouped.supports("grouped_linear", **arguments) == "grouped_linear of 6 columns: no whole 16 bytes"
    arguments["weight"] = number(3, 8, 16)
    assert torch_grouped.supports("grouped_linear", **arguments) is None
    assert torch_grouped.supports("grouped_linear", rows=number(5, 16).double()) == "grouped_linear of float64"
