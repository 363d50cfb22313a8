"""Few logits of long sums, whose parts a matrix library may add up in the dtype of the factors."""

from typing import Any

import pytest
import torch

import moe_ref
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from moe_fast.launch.arithmetic import product
from tests.common.suite import outcome_of, wrapped

LONG = [case for case in scope_of("gate", Space(device="cuda")).always() if case.hidden > 1000 and case.tokens > 500]


def in_parts(gate: Any, x: Any, weight: Any, *, bias: Any = None, router_dtype: Any = None) -> Any:
    """Four sums in the dtype of x, added up in it."""
    pairs = zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)
    logits = sum(gate(*pair, router_dtype=router_dtype) for pair in pairs)
    return logits if bias is None else logits + bias.to(logits.dtype)


def test_sums_in_parts_are_rounded_too_often_unless_that_is_declared():
    assert [case.dtype for case in LONG] == ["bfloat16"]
    (case,) = (case.changed(law="") for case in LONG)
    assert outcome_of(case, moe_ref).status == "PASS"
    outcome = outcome_of(case, wrapped("gate", in_parts))
    assert outcome.status == "FAIL" and outcome.finding["check"] == "bound"
    assert outcome_of(case, wrapped("gate", in_parts, accumulator="storage")).status == "PASS"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_has_the_dtype_of_its_factors_also_under_autocast(dtype):
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = product(a, b)
    expected = (a.float() @ b.float()).bfloat16() if dtype == torch.bfloat16 else a @ b
    assert out.dtype == dtype and torch.equal(out, expected)
