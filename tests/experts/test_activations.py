"""The activations of `moe_ref` beyond values: where they round, second derivatives, refusals.

`evidence.formulations.experts` has the same functions once more, for the cases of tests/evidence.
Results that were worked out by hand, bounds and special numbers are golden cases of the suite.
"""

import math

import pytest
import torch

from moe_ref.config import GATED, PLAIN
from moe_ref.experts.activations import activation, activation_backward, chosen_activation, glu, glu_backward
from tests.common.fast import normal


@pytest.mark.parametrize("kind", PLAIN)
def test_second_derivatives_of_activation_exist(kind):
    leaves = [normal(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate(((2, 2), (2,)))]
    assert torch.autograd.gradgradcheck(lambda h, p: activation(h, probs=p, kind=kind), leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_public_functions_use_the_gradients_derived_by_hand(dtype):
    h, probs, g = normal(4, 12, dtype=dtype), normal(4, seed=1), normal(4, 6, seed=2, dtype=dtype)
    out = glu(h.requires_grad_(), probs=probs.requires_grad_(), clamp=0.75, offset=1.0)
    expected = glu_backward(g, h.detach(), probs=probs.detach(), clamp=0.75, offset=1.0)
    for got, gradient in zip(torch.autograd.grad(out, [h, probs], g), expected, strict=True):
        assert got.dtype == gradient.dtype and torch.equal(got, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_large_numbers_make_no_nan(dtype):
    largest = torch.finfo(dtype).max
    for magnitude in (1e3, 1e13, 1e20, largest):
        for sign in (-1, 1):
            h = torch.tensor([[sign * magnitude, 1.0]], dtype=dtype)
            for kind in GATED:
                out, d_h = glu(h, kind=kind), glu_backward(torch.ones(1, 1, dtype=dtype), h, kind=kind).d_h
                assert out.isfinite().all() and d_h.isfinite().all(), (kind, magnitude)
                assert d_h[0, 0] == (sign > 0), (kind, magnitude)  # f is u or 0 this far out


# ---- rounding


def test_probs_are_not_rounded_to_the_dtype_of_h():
    # 129.504; the prob would round to 1
    h, probs = torch.tensor([[1.0, 129.0]]).bfloat16(), torch.tensor([1 + 2**-8])
    assert glu(h, probs=probs, kind="reglu").item() == 130


def test_gradient_of_h_is_rounded_once():
    h, probs = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.tensor([1 + 2**-8])
    g = torch.tensor([[129.0]]).bfloat16()  # g p = 129.504, · 3 = 388.51; rounded first, 390
    assert glu_backward(g, h, probs=probs, kind="reglu").d_h[0, 0].item() == 388
    assert glu_backward(g, h, probs=probs, kind="reglu", round_before_probs=True).d_h[0, 0].item() == 390


def test_gradient_of_the_probs_is_summed_in_float32_and_rounded_once():
    values = torch.tensor([[256.0, *[1.0] * 8]]).bfloat16()  # in bfloat16, 256 + 1 = 256
    ones, probs = torch.ones_like(values), torch.ones(1).bfloat16()
    for d_probs in (
        glu_backward(ones, torch.cat([ones, values], dim=1), probs=probs, kind="reglu").d_probs,
        activation_backward(ones, values, probs=probs, kind="relu").d_probs,
    ):
        assert d_probs.dtype == torch.bfloat16 and d_probs.tolist() == [264]


def test_gradient_of_the_probs_meets_the_activation_as_it_was_multiplied():
    h, probs, g = torch.tensor([[5.0, 103.0]]).bfloat16(), torch.tensor([1.5]), torch.ones(1, 1).bfloat16()
    assert glu_backward(g, h, probs=probs, kind="reglu").d_probs.item() == 515
    assert glu_backward(g, h, probs=probs, kind="reglu", round_before_probs=True).d_probs.item() == 516


def test_sigmoid_is_taken_in_float32():
    h = torch.tensor([[3.0, 134.0]]).bfloat16()  # 382.93; with σ(3) = 0.95257 → 0.95312, 383.16
    assert glu(h).item() == 382


def test_float64_is_never_narrowed():
    fine = 1 + 2.0**-50
    h, probs = torch.tensor([[1.0, fine]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert glu(h, probs=probs, kind="reglu").item() == fine
    d_h, d_probs = glu_backward(torch.ones(1, 1).double(), h, probs=probs, kind="reglu")
    assert d_h[0, 0].item() == d_probs.item() == fine


def test_float64_probs_make_a_float64_product():
    # in float32 the prob would be 1
    h, probs = torch.tensor([[1.0, 1 + 2**-23]]), torch.tensor([1 + 2**-24], dtype=torch.float64)
    out = glu(h, probs=probs, kind="reglu")
    assert out.dtype == torch.float32 and out.item() == 1 + 2**-22  # 1 + 3·2^-24 (tie) + 2^-47


# ---- refusals


@pytest.mark.parametrize(("named", "call"), [
    ("h", lambda: glu(torch.zeros(2, 3))),
    ("h", lambda: glu(torch.zeros(4))),
    ("h", lambda: glu(torch.zeros(2, 4, dtype=torch.int64))),
    ("h", lambda: activation(torch.zeros(2, 4).to(torch.float8_e4m3fn))),
    ("probs", lambda: glu(torch.zeros(2, 4), probs=torch.zeros(3))),
    ("probs", lambda: glu(torch.zeros(2, 4), probs=torch.zeros(2, 1))),
    ("kind", lambda: glu(torch.zeros(2, 4), kind="silu")),
    ("kind", lambda: activation(torch.zeros(2, 4), kind="swiglu")),
    ("clamp", lambda: glu(torch.zeros(2, 4), clamp=0.0)),
    ("clamp", lambda: glu(torch.zeros(2, 4), clamp=-7.0)),
    ("clamp", lambda: glu(torch.zeros(2, 4), clamp=math.inf)),
    ("offset", lambda: glu(torch.zeros(2, 4), offset=math.nan)),
    ("alpha", lambda: glu(torch.zeros(2, 4), alpha=0.0)),
    ("alpha", lambda: glu(torch.zeros(2, 4), kind="geglu", alpha=1.0)),
    ("interleave", lambda: glu(torch.zeros(2, 12), interleave=4)),
    ("interleave", lambda: glu(torch.zeros(2, 12), interleave=0)),
    ("d_out", lambda: glu_backward(torch.zeros(2, 4), torch.zeros(2, 4))),
    ("d_out", lambda: glu_backward(torch.zeros(2, 2).double(), torch.zeros(2, 4))),
    ("kind", lambda: chosen_activation("tanh")),
    ("offset", lambda: chosen_activation("relu", offset=1.0)),
    ("clamp", lambda: chosen_activation("relu", clamp=1.0)),
    ("interleave", lambda: chosen_activation("relu", interleave=1)),
    ("fp8_input_store", lambda: glu(torch.zeros(2, 4), kind="geglu", fp8_input_store=True)),
    ("fp8_input_store", lambda: chosen_activation("relu", fp8_input_store=True)),
])  # fmt: skip
def test_illegal_calls_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} is "):
        call()
