"""Experts that differ where the contract is open are accepted; other differences are located."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.analysis.curves import CURVES, GATES, Curve, erf, sigmoid, sigmoid_gated, tanh
from conformance.analysis.products import Product, experts_of_rows
from conformance.analysis.running import Running
from conformance.core.space import Space
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.interface import load
from conformance.judge.bound import FLOAT32
from moe_ref.experts.activations import CURVES as REFERENCE
from tests.common.suite import assert_accepted, failures, gate_cases, in_turn, outcome_of, statuses
from tests.honest.experts import How, make

FUNCTIONS = ("glu", "activation", "grouped_linear", "grouped_dgrad", "grouped_wgrad")
EXPERTS = ("Autograd", "BaseTwo", "Wide", "Backwards")
RECIPE = frozenset({"recipe", "state", "noise"})  # products in low precision: test_precision
cases_of = functools.cache(
    functools.partial(gate_cases, space=Space(without=dict.fromkeys(FUNCTIONS, RECIPE)), every=6)
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_honest_experts_are_accepted(experts, function):
    assert_accepted(in_turn(cases_of(function), experts, EXPERTS), load(f"tests.honest.experts:{experts}"))


# ---- what is wrong in one place


def changed(function: str, wrapper) -> SimpleNamespace:
    honest = make(How())
    original = getattr(honest, function)
    return SimpleNamespace(**vars(honest) | {function: lambda *args, **settings: wrapper(original, *args, **settings)})


def in_half(curve):
    return lambda x: curve(x.bfloat16()).to(x.dtype)


def sum_of_the_first_half(x: Tensor, y: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2 + 1] @ y[: x.shape[-1] // 2 + 1]


def added_in_half(x: Tensor, y: Tensor) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], y.shape[-1])).bfloat16()
    for k in range(x.shape[-1]):
        total = total + (x[..., k, None] * y[k]).bfloat16()
    return total.to(x.dtype)


def with_settings(**changes: Any):
    return lambda original, h, **settings: original(h, **settings | changes)


def without(name: str):
    return lambda original, h, **settings: original(h, **{key: x for key, x in settings.items() if key != name})


def bounded_from_below(original, h, *, clamp=None, **settings):
    return original(
        h if clamp is None else torch.maximum(h, torch.tensor(-clamp, dtype=h.dtype)), clamp=clamp, **settings
    )


def stops_on_the_bound(original, h, *, clamp=None, **settings):
    """The gradient passes below the bound only."""
    if clamp is None or not h.requires_grad:
        return original(h, clamp=clamp, **settings)
    return original(torch.where(h.abs() == clamp, h.detach(), h), clamp=clamp, **settings)


def rounds_the_probs(original, h, *, probs=None, **settings):
    return original(h, probs=None if probs is None else probs.to(h.dtype).to(probs.dtype), **settings)


def rounds_twice(original, h, *, probs=None, **settings):
    out = original(h, **settings)
    return out if probs is None else (out.double() * probs[:, None].double()).to(h.dtype)


def wrong_where_a_prob_is_negative(original, h, *, probs=None, **settings):
    return original(h, probs=None if probs is None else probs.clamp(min=0), **settings)


def nothing_for_nan(original, h, **settings):
    return original(h, **settings).nan_to_num()


def reads_past_the_end(original, x, weight, counts, **settings):
    out = original(x, weight, counts, **settings)
    return out + 0 * x[int(counts.sum()) :].sum().to(out.dtype)


def adds_bias_after_rounding(original, rows, weight, counts, *, bias=None, **settings):
    out = original(rows, weight, counts, **settings)
    if bias is None:
        return out
    experts = experts_of_rows(counts, len(rows))
    return torch.where(
        (experts < len(counts))[:, None], out + bias[experts.clamp(max=len(counts) - 1)].to(out.dtype), out
    )


def rounds_before_adding(original, d_out, rows, counts, *, accumulate_into=None, **settings):
    out = original(d_out, rows, counts, **settings)
    return out if accumulate_into is None else (out + accumulate_into).to(accumulate_into.dtype)


def neighbours_weight(original, rows, weight, counts, **settings):
    return original(rows, weight.roll(1, 0), counts, **settings)


GLU = ActivationCase(function="glu", tokens=9, width=8, grads="h")
WEIGHTED = replace(GLU, probs="float32", grads="h+probs", weights="signed")
SQUARED = ActivationCase(function="activation", tokens=9, width=8, probs="float32", dtype="bfloat16")
LINEAR = GroupedCase(function="grouped_linear", tokens=60, experts=3, hidden=40, width=30, grads="rows+weight")
HALF = replace(LINEAR, dtype="bfloat16", hidden=64, width=64, tokens=96, grads="")
WGRAD = GroupedCase(
    function="grouped_wgrad", tokens=60, experts=3, hidden=20, width=30, into="float32", dtype="bfloat16"
)

WRONG = [
    (GLU, make(How(sigmoid=in_half(torch.sigmoid))), "out"),
    (replace(GLU, kind="geglu"), make(How(tanh=in_half(torch.tanh))), "out"),
    (replace(GLU, kind="geglu_erf"), make(How(erf=in_half(torch.erf))), "out"),
    (replace(GLU, kind="geglu"), changed("glu", with_settings(kind="geglu_erf")), "out"),
    (replace(GLU, alpha=1702), changed("glu", without("alpha")), "out"),
    (replace(GLU, offset=8), changed("glu", without("offset")), "out"),
    (replace(GLU, interleave=4), changed("glu", without("interleave")), "out"),
    (replace(GLU, clamp=4), changed("glu", without("clamp")), "out"),
    (replace(GLU, clamp=4), changed("glu", bounded_from_below), "out"),
    (replace(GLU, clamp=56, values="bounds", grads="h"), changed("glu", stops_on_the_bound), "d_h"),
    (replace(WEIGHTED, dtype="bfloat16"), changed("glu", rounds_the_probs), "out"),
    (replace(WEIGHTED, dtype="bfloat16"), changed("glu", rounds_twice), "out"),
    (replace(WEIGHTED, dtype="bfloat16", early=True), changed("glu", without("round_before_probs")), "out"),
    (replace(WEIGHTED, grads=""), changed("glu", wrong_where_a_prob_is_negative), "out"),
    (replace(GLU, values="special", grads=""), changed("glu", nothing_for_nan), "out"),
    (replace(SQUARED, weights="signed"), changed("activation", rounds_twice), "out"),
    (replace(SQUARED, early=True), changed("activation", without("round_before_probs")), "out"),
    (LINEAR, make(How(product=sum_of_the_first_half)), "out"),
    (LINEAR, changed("grouped_linear", neighbours_weight), "out"),
    (replace(LINEAR, tail=3, grads=""), changed("grouped_linear", reads_past_the_end), "out"),
    (replace(HALF, bias="bfloat16", tokens=30), changed("grouped_linear", adds_bias_after_rounding), "out"),
    (HALF, make(How(product=added_in_half)), "out"),
    (WGRAD, changed("grouped_wgrad", rounds_before_adding), "d_weight"),
]


@pytest.mark.parametrize(("case", "implementation", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_every_mistake_is_found_where_it_is(case, implementation, output):
    assert (output, "bound") in failures(case, implementation, 8)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_honest_experts_pass_the_cases_that_find_mistakes(case):
    assert statuses(case, make(How()), 2) == {"PASS"}


def truncated(x: Tensor, y: Tensor) -> Tensor:
    """A product whose last eight bits are cut off: within the bound, and always towards zero."""
    return ((x @ y).view(torch.int32) & ~0xFFFF).view(torch.float32)


def test_a_result_that_is_cut_off_instead_of_rounded_is_found_by_its_bias():
    """The bound of one rounding is twice half an ulp away: only the mean shows it."""
    outcome = outcome_of(HALF, make(How(product=truncated)))
    assert outcome.status == "FAIL" and outcome.finding["check"] in ("bound", "ratio")


# ---- the analysis itself

X = torch.cat(
    [
        torch.linspace(-30, 30, 1201, dtype=torch.float64),
        torch.tensor([-5000.0, -200, -104, -89, -88, 88, 89, 104, 200, 5000], dtype=torch.float64),
    ]
)


@pytest.mark.parametrize("kind", CURVES)
def test_values_and_slopes_are_those_of_the_reference(kind):
    """Two formulas in float64: what separates them is a few roundings of 1, times x."""
    ours, theirs = CURVES[kind], REFERENCE[kind]
    x = Running.of(X, torch.float64)
    for analysed, value in ((ours.value(x), theirs.value(X)), (ours.slope(x), theirs.slope(X))):
        assert bool(
            ((analysed.value - value).abs() <= 4 * analysed.error + 1e-290).all()
        )  # why: below, exp(-x) has no digits left to compare


@pytest.mark.parametrize("kind", CURVES)
def test_the_bound_of_a_curve_holds_in_float32_and_is_worth_something(kind):
    x, analysis = X.float(), Running.of(X.float(), torch.float32)
    ours, theirs = CURVES[kind], REFERENCE[kind]
    for analysed, computed in ((ours.value(analysis), theirs.value(x)), (ours.slope(analysis), theirs.slope(x))):
        assert bool(((computed.double() - analysed.value).abs() <= analysed.error).all())
        allowed = analysed.error / analysed.value.abs().clamp(min=1)
        assert allowed.max() < 1e-3  # why: a bfloat16 slope is off by 2⁻⁸ = 4e-3, must be found


def test_curves_are_exact_where_the_exponential_is_lost():
    far = Running.of(torch.tensor([40.0, 5000.0]), torch.float32)
    for curve in (sigmoid, tanh, erf):
        assert (curve(far).error < 1e-10).all()  # why: 1 - σ(40) = 4e-18; half an ulp of 1 is 6e-8
    near = Running.of(torch.tensor([3.0]), torch.float32)
    assert all(float(curve(near).error) > 1e-8 for curve in (sigmoid, tanh, erf))


def test_a_rounded_number_is_known_unless_it_lies_at_a_boundary():
    x = Running(
        torch.tensor([1.001, 1 + 2.0**-8], dtype=torch.float64),
        torch.full((2,), 1e-6, dtype=torch.float64),
        torch.float32,
    )
    rounded = x.rounded_to(torch.bfloat16)
    assert rounded.value.tolist() == [1, 1]
    assert rounded.error.tolist() == [0, 2.0**-7]


def test_an_alpha_makes_its_own_gate():
    x = Running.of(torch.tensor([math.log(3) / 2]), torch.float64)
    assert float(sigmoid_gated(2.0).value(x).value) == pytest.approx(0.75 * math.log(3) / 2)
    assert isinstance(GATES["swiglu"], Curve)


def test_a_product_with_a_nan_or_an_infinity_bounds_only_the_other_elements():
    first = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    second = torch.tensor([[3.0, 4.0], [0.0, torch.inf]])
    product = Product.of(first, second)
    assert product.value.isnan().tolist() == [[False, False], [True, True], [False, False]]
    assert product.free.tolist() == [[False, True], [False, False], [True, True]]
    assert product.value[0, 0] == 11 and product.magnitude[0, 0] == 11
    bounded = product.bounded(3, torch.float32, FLOAT32)
    assert bounded.bound.isinf().tolist() == product.free.tolist()


def test_rows_past_the_last_segment_belong_to_one_more_expert():
    assert experts_of_rows(torch.tensor([2, 0, 1]), 5).tolist() == [0, 0, 2, 3, 3]
