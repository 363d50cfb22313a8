"""Gradients of a grouped linear layer, which Transformer Engine has in a backward alone."""

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter
from conformance.peers.te.experts import Experts
from moe_ref.config import Recipe
from tests.te.judging import Checked, judged
from tests.te.standin import standin

FUNCTIONS = ("grouped_dgrad", "grouped_wgrad")


def test_alone_only_rows_past_the_last_segment_and_empty_sides_are_lost():
    te = standin("2.20")
    outcomes = judged(Checked(te, Adapter(te)), FUNCTIONS, most=30)
    lost = [case for case, outcome in outcomes if outcome.status == "FAIL"]
    assert lost and all(case.golden or case.tail or case.law == "padding_independence" for case in lost)
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) > 40


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_is_the_reference_s_and_needs_its_cotangent(monkeypatch, function):
    number = torch.Generator().manual_seed(0)
    rows, d_out, weight = (torch.randn(*shape, generator=number) for shape in ((48, 32), (48, 16), (3, 16, 32)))
    given = (d_out, weight if function == "grouped_dgrad" else rows, torch.tensor([16, 0, 32]))
    call = {"recipe": Recipe("current")}
    adapter, right = Adapter(standin("2.20")), getattr(moe_ref, function)(*given, recipe=Recipe("current"))
    assert torch.equal(getattr(adapter, function)(*given, **call), right)
    assert adapter.path[function].endswith("then the backward")
    gradient = Experts._gradient
    monkeypatch.setattr(
        Experts, "_gradient", lambda self, s, g, d, *how: gradient(self, s, g, torch.ones_like(d), *how)
    )
    assert not torch.allclose(getattr(Adapter(standin("2.20")), function)(*given, **call), right)
