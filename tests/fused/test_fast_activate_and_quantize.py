"""Fused activations that are quantised: what they return is what the two steps return, whatever the tiles and the layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_fast
import moe_ref
from moe_fast.launch import tuning
from moe_ref.config import Recipe

WALK = tuning.Walk(tokens=32, columns=32, num_warps=4, steps=2, stages=1)
SMALL = replace(
    tuning.INTERPRETER.activate_quantize,
    rows=WALK,
    columns=WALK,
    backward=WALK,
    low=WALK,
    low_backward=WALK,
    groups=WALK,
)
SPLITS = torch.tensor([32, 0, 64])
READ = ("amax", "scales", "codes", "dequantize")


@pytest.fixture(params=["large", "small"])
def tiles(request, monkeypatch):
    if request.param == "small":
        monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, activate_quantize=SMALL))


def equal(one: Any, other: Any) -> None:
    for name in READ:
        for columnwise in (False, True):
            assert torch.equal(
                *(getattr(moe_fast, name)(quantized, columnwise=columnwise) for quantized in (one, other))
            ), (name, columnwise)


@pytest.mark.parametrize(
    "settings",
    [{}, {"clamp": 1.0, "offset": 1.0, "interleave": 1}, {"interleave": 8, "kind": "geglu"}],
    ids=["halves", "pairs", "blocks"],
)
@pytest.mark.parametrize("scaling", ["current", "block", "mxfp8", "nvfp4"])
def test_rounded_before_it_is_the_two_steps_one_after_the_other(scaling, settings, tiles):
    h, d_out, probs = torch.randn(99, 256).bfloat16(), torch.randn(99, 128).bfloat16(), torch.rand(99)
    recipe = Recipe("nvfp4", hadamard=False, stochastic_rounding=False) if scaling == "nvfp4" else Recipe(scaling)
    h, d_out, probs = (x[:96] if scaling in ("mxfp8", "nvfp4") else x for x in (h, d_out, probs))
    forms: dict[str, Any] = {"splits": SPLITS, "columnwise": True}
    made = moe_fast.glu_and_quantize(h, recipe, probs=probs, **settings, **forms, round_before_quantize=True).quantized
    equal(made, moe_fast.quantize(moe_fast.glu(h, probs=probs, **settings), recipe, **forms).quantized)
    back = moe_fast.glu_backward_and_quantize(
        d_out, h, recipe, probs=probs, **settings, **forms, round_before_quantize=True
    )
    gradients = moe_fast.glu_backward(d_out, h, probs=probs, **settings)
    equal(back.quantized, moe_fast.quantize(gradients.d_h, recipe, role="grad_output", **forms).quantized)
    torch.testing.assert_close(
        back.d_probs[:96], gradients.d_probs[:96], rtol=1e-5, atol=1e-4
    )  # why: float32 sums in another order
    assert not back.d_probs[96:].any()


def test_the_gradient_is_that_of_glu_and_runs_repeat():
    h, probs = torch.randn(40, 64, requires_grad=True), torch.rand(40, requires_grad=True)
    first, second = (
        moe_fast.dequantize(moe_fast.glu_and_quantize(h, Recipe("block"), probs=probs).quantized) for _ in range(2)
    )
    assert torch.equal(first, second)
    d_h, d_probs = torch.autograd.grad(first, [h, probs], torch.ones_like(first))
    right = moe_fast.glu_backward(torch.ones_like(first), h.detach(), probs=probs.detach())
    assert torch.equal(d_h, right.d_h) and torch.equal(d_probs, right.d_probs)


def test_delayed_scaling_learns_and_leaves_the_state_it_was_given():
    recipe, h = Recipe("delayed", amax_history_len=3), torch.randn(9, 16)
    state = moe_ref.new_quantizer_state(recipe)
    _, after = moe_fast.glu_and_quantize(h, recipe, state=state)
    assert not state.amax_history.any()
    assert torch.equal(after.amax_history[:, 0], moe_fast.glu(h).abs().amax().reshape(1))


def test_probs_that_no_kernel_reads_are_declared():
    h = torch.zeros(2, 4)
    assert moe_fast.supports("glu_and_quantize", h, Recipe("current"), probs=torch.zeros(2)) is None
    assert "probs" in moe_fast.supports(
        "glu_and_quantize", h, Recipe("current"), probs=torch.zeros(2).to(torch.float8_e4m3fn)
    )
