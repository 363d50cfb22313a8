"""The activations of `moe_ref`: worked out by hand, beside torch's own, and their derivatives.

`evidence.formulations.experts` has the same functions once more, for the cases of tests/evidence.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ref.config import GATED
from moe_ref.experts.activations import activation, activation_backward, chosen_activation, glu, glu_backward
from tests.judge.near import near

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu": F.relu,
    "squared_relu": lambda h: F.relu(h).square(),
}
each_plain = pytest.mark.parametrize("kind", PLAIN)
LN3 = math.log(3)  # σ(ln 3) = 3/4


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )


# By hand


def test_swiglu_worked_out():
    h = torch.tensor([[LN3, 0.0, 2.0, 5.0]], dtype=torch.float64)  # u = ln 3, 0; v = 2, 5
    assert near(glu(h), torch.tensor([[1.5 * LN3, 0]], dtype=torch.float64))
    assert near(glu(h, probs=torch.tensor([0.5]).double()), torch.tensor([[0.75 * LN3, 0]], dtype=torch.float64))
    d_h, d_probs = glu_backward(torch.ones(1, 2).double(), h, probs=torch.tensor([0.5]).double())
    # du = p σ (1 + u (1 - σ)) v = ½ · ¾ · (1 + ¼ ln 3) · 2; at 0: ½ · ½ · 5. dv = p u σ. dp = u σ v
    assert near(d_h, torch.tensor([[0.75 * (1 + LN3 / 4), 1.25, 0.375 * LN3, 0]], dtype=torch.float64))
    assert near(d_probs, torch.tensor([1.5 * LN3], dtype=torch.float64))


def test_quick_geglu_with_offset_worked_out():
    h = torch.tensor([[LN3 / 1.702, 2.0]], dtype=torch.float64)
    assert near(glu(h, kind="quick_geglu", offset=1.0), torch.tensor([[0.75 * LN3 / 1.702 * 3]], dtype=torch.float64))


def test_clamp_bounds_the_gate_from_above_and_the_value_from_both_sides():
    u, v = [100.0, -1.0, 0.0, 0.0, 100.0], [1.0, 100.0, 3.0, -3.0, -100.0]
    out = glu(torch.tensor([u + v], dtype=torch.float64), kind="reglu", clamp=7.0, offset=1.0)
    assert out.tolist() == [[14, 0, 0, 0, -42]]  # 7 · 2, 0 · 8, …, 7 · (-7 + 1)
    deep = glu(torch.tensor([[-20.0, 1.0]], dtype=torch.float64), clamp=7.0)
    # -7 would give -0.0064
    assert near(deep, torch.tensor([[-20 / (1 + math.exp(20))]], dtype=torch.float64))


def test_squared_relu_worked_out():
    h, probs = torch.tensor([[-1.0, 0.0, 3.0]]), torch.tensor([2.0])
    assert activation(h, probs=probs).tolist() == [[0, 0, 18]]
    d_h, d_probs = activation_backward(torch.tensor([[5.0, 5.0, 5.0]]), h, probs=probs)
    assert d_h.tolist() == [[0, 0, 60]] and d_probs.tolist() == [45]


def test_interleaved_columns_alternate_in_blocks_that_begin_with_the_gate():
    h = torch.tensor([[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0]])  # u0 u1 v0 v1 u2 u3 v2 v3
    assert glu(h, kind="reglu", interleave=2).tolist() == [[10, 40, 90, 160]]
    assert glu(h, kind="reglu").tolist() == [[3, 8, 300, 800]]  # u is 1 2 10 20, v is 3 4 30 40


@pytest.mark.parametrize(
    ("kind", "at_1"), [("geglu", 0.8411919906), ("geglu_erf", 0.8413447461), ("quick_geglu", 0.8457957659)]
)
def test_the_three_gelus_are_told_apart(kind, at_1):
    """½ (1 + tanh(√(2/π) · 1.044715)), the normal distribution function, and σ(1.702), at 1."""
    assert round(glu(torch.ones(1, 2).double(), kind=kind).item(), 10) == at_1
    assert (
        round(
            activation(
                torch.ones(1, 1).double(), kind={"geglu": "gelu_tanh", "geglu_erf": "gelu"}.get(kind, "quick_gelu")
            ).item(),
            10,
        )
        == at_1
    )


# Derivatives


@pytest.mark.parametrize("kind", GATED)
def test_gradients_of_glu_are_its_derivatives(kind):
    shaped = partial(glu, kind=kind, clamp=0.75, offset=-0.5, interleave=2)
    assert torch.autograd.gradcheck(lambda h, p: shaped(h, probs=p), (numbers(2, 12), numbers(2, seed=1)))
    assert torch.autograd.gradcheck(shaped, numbers(2, 12))


@each_plain
def test_activation_and_its_gradients_are_torchs_own(kind):
    assert torch.autograd.gradcheck(lambda h, p: activation(h, probs=p, kind=kind), (numbers(3, 4), numbers(3, seed=1)))
    h, probs = numbers(3, 4), numbers(3, seed=1)
    out, expected = activation(h, probs=probs, kind=kind), PLAIN[kind](h) * probs[:, None]
    assert near(out, expected)
    g = numbers(3, 4, seed=2)
    for got, want in zip(
        torch.autograd.grad(out, [h, probs], g), torch.autograd.grad(expected, [h, probs], g), strict=True
    ):
        assert near(got, want)
    assert near(activation(h, kind=kind), PLAIN[kind](h))


@each_plain
def test_second_derivatives_of_activation_exist(kind):
    assert torch.autograd.gradgradcheck(
        lambda h, p: activation(h, probs=p, kind=kind), (numbers(2, 2), numbers(2, seed=1))
    )


def test_interleaved_weights_change_nothing_but_their_order():
    halves = numbers(3, 12)
    u, v = halves[:, :6], halves[:, 6:]
    alternating = torch.cat([x for k in range(0, 6, 2) for x in (u[:, k : k + 2], v[:, k : k + 2])], dim=1)
    assert torch.equal(glu(alternating, interleave=2), glu(halves))


def test_public_functions_use_the_gradients_derived_by_hand():
    for dtype in (torch.float64, torch.bfloat16):
        h, probs, g = (
            numbers(4, 12, dtype=dtype),
            numbers(4, seed=1, dtype=torch.float32),
            numbers(4, 6, seed=2, dtype=dtype),
        )
        out = glu(h, probs=probs, clamp=0.75, offset=1.0)
        for got, want in zip(
            torch.autograd.grad(out, [h, probs], g),
            glu_backward(g, h, probs=probs, clamp=0.75, offset=1.0),
            strict=True,
        ):
            assert got.dtype == want.dtype and torch.equal(got, want)


# Shapes


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_compute_is_no_error(rows, width):
    h, probs = torch.zeros(rows, width, requires_grad=True), torch.ones(rows, requires_grad=True)
    out = glu(h, probs=probs)
    d_h, d_probs = torch.autograd.grad(out.sum(), [h, probs])
    assert out.shape == (rows, width // 2) and d_h.shape == h.shape and torch.equal(d_probs, torch.zeros(rows))
    assert activation(h, probs=probs).shape == h.shape


def test_strides_do_not_matter():
    h, probs = numbers(12, 4).detach().T, numbers(4, 2, seed=1).detach()[:, 0]
    g = torch.ones(1, 1).double().expand(4, 6)
    assert near(glu(h, probs=probs), glu(h.contiguous(), probs=probs.contiguous()))
    for got, want in zip(
        glu_backward(g, h, probs=probs),
        glu_backward(g.contiguous(), h.contiguous(), probs=probs.contiguous()),
        strict=True,
    ):
        assert near(got, want)  # the last bit may depend on how torch vectorises


def test_inputs_are_left_as_they_were():
    h, probs = numbers(4, 12).detach(), numbers(4, seed=1).detach()
    copies = h.clone(), probs.clone()
    glu_backward(glu(h, probs=probs, clamp=0.75), h, probs=probs, clamp=0.75)
    assert torch.equal(h, copies[0]) and torch.equal(probs, copies[1])


def test_chosen_activation_is_the_function_of_that_kind():
    h, probs = numbers(4, 12), numbers(4, seed=1)
    assert torch.equal(
        chosen_activation("swiglu", clamp=0.75, interleave=2)(h, probs=probs),
        glu(h, probs=probs, clamp=0.75, interleave=2),
    )
    assert torch.equal(chosen_activation("squared_relu")(h, probs=probs), activation(h, probs=probs))


def test_bounds_that_block_the_gradient_are_noticed():
    """The twin of the test on bounds: comparing with < instead of ≤."""
    h = torch.tensor([[2.0, 2.0]], dtype=torch.float64)
    assert (glu_backward(torch.ones(1, 1).double(), h, clamp=2.0).d_h != 0).all()
    assert (glu_backward(torch.ones(1, 1).double(), h, clamp=math.nextafter(2.0, 1.0)).d_h == 0).all()


# Errors


@pytest.mark.parametrize(
    ("named", "call"),
    [
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
    ],
)
def test_illegal_calls_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} is "):
        call()
