"""Activations in `moe_fast` beyond the gate: the backward functions, refusals and errors."""

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_fast.experts.activations import Settings, activated
from moe_ref.config import GATED, PLAIN
from tests.common.fast import assert_same_error, interpreted, normal

pytestmark = interpreted


@pytest.mark.parametrize("kind", [*GATED, *PLAIN])
def test_backward_functions_are_the_gradients(kind):
    name = "glu" if kind in GATED else "activation"
    h, probs, d_out = normal(5, 12).bfloat16(), normal(5, seed=1), normal(5, 6 if kind in GATED else 12).bfloat16()
    leaves = [h.requires_grad_(), probs.requires_grad_()]
    gradients = torch.autograd.grad(getattr(moe_fast, name)(h, probs=probs, kind=kind), leaves, d_out)
    result = getattr(moe_fast, f"{name}_backward")(d_out, h.detach(), probs=probs.detach(), kind=kind)
    assert all(torch.equal(*pair) for pair in zip(gradients, result, strict=True))


ILLEGAL = [
    ("glu_backward", (torch.zeros(2, 4), torch.zeros(2, 4)), {}),
    ("glu_backward", (torch.zeros(2, 2).double(), torch.zeros(2, 4)), {}),
    ("glu_backward", (torch.zeros(2, 2), torch.zeros(2, 4)), {"clamp": -1.0}),
    ("activation_backward", (torch.zeros(2, 2), torch.zeros(2, 4)), {}),
]


@pytest.mark.parametrize(("function", "arguments", "settings"), ILLEGAL)
def test_an_illegal_call_raises_what_the_reference_raises(function, arguments, settings):
    assert_same_error(function, *arguments, **settings)


def test_probs_of_eight_bits_are_not_supported_and_raise():
    h, probs = torch.zeros(2, 4), torch.zeros(2).to(torch.float8_e5m2)
    for function, arguments in (
        ("glu", (h,)),
        ("activation", (h,)),
        ("glu_backward", (h[:, :2], h)),
        ("activation_backward", (h, h)),
    ):
        assert "float8" in moe_fast.supports(function, *arguments, probs=probs)
        assert moe_fast.supports(function, *arguments, probs=probs.float()) is None
        with pytest.raises(ValueError, match="float8"):
            getattr(moe_fast, function)(*arguments, probs=probs)


def test_rows_past_the_experts_are_left_out():
    """By a plan's totals, tiles and rows. The twin: without, what is there enters the gradient."""
    h, probs = normal(7, 12, seed=1), normal(7, seed=2)
    h[3:] = torch.nan

    def of_probs(rows: int, totals: Tensor | None) -> tuple[Tensor, Tensor]:
        p = probs[:rows].clone().requires_grad_()
        settings = Settings("swiglu", gated=True, round_first=False)
        out = activated(h[:rows].clone().requires_grad_(), settings, probs=p, totals=totals)
        return out.detach(), *torch.autograd.grad(out, [p], torch.ones_like(out))

    expected, without = of_probs(3, None), of_probs(7, None)
    out, gradient = of_probs(7, torch.tensor([1, 3]))
    assert torch.equal(out[:3], expected[0]) and torch.equal(gradient, torch.nn.functional.pad(expected[1], (0, 4)))
    assert without[1][3:].isnan().all()
