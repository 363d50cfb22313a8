"""Gradients of a grouped linear layer, which Transformer Engine has in a backward alone."""

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter
from conformance.peers.te.experts import Experts
from moe_ref.config import Recipe
from tests.te.standin import standin

FUNCTIONS = ("grouped_dgrad", "grouped_wgrad")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_is_the_reference_s_and_needs_its_cotangent(monkeypatch, function):
    number = torch.Generator().manual_seed(0)
    rows, d_out, weight = (torch.randn(*shape, generator=number) for shape in ((48, 32), (48, 16), (3, 16, 32)))
    arguments = (d_out, weight if function == "grouped_dgrad" else rows, torch.tensor([16, 0, 32]))
    call = {"recipe": Recipe("current")}
    adapter, expected = Adapter(standin("2.20")), getattr(moe_ref, function)(*arguments, recipe=Recipe("current"))
    assert torch.equal(getattr(adapter, function)(*arguments, **call), expected)
    assert adapter.path[function].endswith("then the backward")
    gradient = Experts._gradient
    monkeypatch.setattr(
        Experts, "_gradient", lambda self, s, g, d, *args: gradient(self, s, g, torch.ones_like(d), *args)
    )
    assert not torch.allclose(getattr(Adapter(standin("2.20")), function)(*arguments, **call), expected)
