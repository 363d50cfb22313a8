"""The activations of `moe_ref` at bounds, at infinities and NaN, and where they round."""

import math

import pytest
import torch

from moe_ref.config import GATED
from moe_ref.experts.activations import activation, activation_backward, glu, glu_backward
from tests.experts.test_activations import LN3, numbers

# Bounds


def test_gradient_passes_at_the_bounds_and_not_beyond():
    above, below = math.nextafter(2.0, 3.0), math.nextafter(2.0, 1.0)
    u, v = [2.0, above, below, -9.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 2.0, above, -2.0, -above]
    h = torch.tensor([u + v], dtype=torch.float64, requires_grad=True)
    (d_h,) = torch.autograd.grad(glu(h, clamp=2.0), h, torch.ones(1, 8).double())
    passes = (d_h != 0).flatten().tolist()
    assert passes[:8] == [True, False, True, True, True, True, True, True]
    assert passes[8:] == [True, True, True, True, True, False, True, False]


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


def test_infinities_within_a_clamp_are_bounds():
    h = torch.tensor([[math.inf, -math.inf]])
    assert torch.equal(glu(h, clamp=3.0), glu(torch.tensor([[3.0, -3.0]])))
    assert glu_backward(torch.ones(1, 1), h, clamp=3.0).d_h.tolist() == [[0, 0]]


def test_nan_stays_in_its_row():
    for bad in (math.nan, math.inf, -math.inf):
        h = numbers(3, 4).detach()
        spoilt = torch.cat([h[:1], torch.full((1, 4), bad).double(), h[2:]])
        probs = torch.tensor([1.0, 0.0, 2.0]).double()
        clean, got = glu(h, probs=probs), glu(spoilt, probs=probs)
        assert torch.equal(clean[[0, 2]], got[[0, 2]]) and got[1].isnan().all()  # prob 0 keeps NaN
        clean, got = (glu_backward(torch.ones(3, 2).double(), x, probs=probs) for x in (h, spoilt))
        assert torch.equal(clean.d_h[[0, 2]], got.d_h[[0, 2]]) and torch.equal(
            clean.d_probs[[0, 2]], got.d_probs[[0, 2]]
        )


def test_prob_of_zero_keeps_its_own_gradient():
    h = torch.tensor([[LN3, 2.0]], dtype=torch.float64)
    d_h, d_probs = glu_backward(torch.ones(1, 1).double(), h, probs=torch.zeros(1).double())
    assert d_h.tolist() == [[0, 0]] and d_probs.item() == pytest.approx(1.5 * LN3)


def test_relu_has_slope_zero_at_zero():
    assert activation_backward(torch.ones(1, 1), torch.zeros(1, 1), kind="relu").d_h.item() == 0
    assert glu_backward(torch.ones(1, 1), torch.tensor([[0.0, 1.0]]), kind="reglu").d_h.tolist() == [[0, 0]]


# Rounding


def test_activation_is_not_rounded_before_it_is_multiplied():
    h, probs = (
        torch.tensor([[5.0, 103.0]]).bfloat16(),
        torch.tensor([1.5]),
    )  # 515 · 1.5 = 772.5; but 515 → 516, and 516 · 1.5 = 774
    assert glu(h, probs=probs, kind="reglu").item() == 772
    assert glu(h, probs=probs, kind="reglu", round_before_probs=True).item() == 776
    assert glu(h, kind="reglu").item() == glu(h, kind="reglu", round_before_probs=True).item() == 516


def test_squared_relu_is_not_rounded_before_it_is_multiplied():
    h, probs = (
        torch.tensor([[23.0]]).bfloat16(),
        torch.tensor([1.5]),
    )  # 529 · 1.5 = 793.5; but 529 → 528, and 528 · 1.5 = 792
    assert (
        activation(h, probs=probs).item() == 792 and activation(h, probs=torch.tensor([1.51])).item() == 800
    )  # 798.79
    # 797.28 → 796
    assert activation(h, probs=torch.tensor([1.51]), round_before_probs=True).item() == 796


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
    h, probs = (
        torch.tensor([[1.0, 1 + 2**-23]]),
        torch.tensor([1 + 2**-24], dtype=torch.float64),
    )  # in float32 the prob is 1
    out = glu(h, probs=probs, kind="reglu")
    assert out.dtype == torch.float32 and out.item() == 1 + 2**-22  # 1 + 3·2^-24 (tie) + 2^-47
