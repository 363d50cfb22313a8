"""Activations as libraries ship them are accepted; a slope off by a thousandth is not."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from conformance.families.experts.cases import CURVES, GATES, VALUES, ActivationCase
from conformance.interface import load
from tests.common.suite import assert_accepted, failures, gate_cases, in_turn
from tests.honest import ACTIVATIONS
from tests.honest.activations import Shipped, Summed, sigmoid_by_tanh
from tests.honest.experts import How, make

KINDS = {"activation": CURVES, "glu": GATES}
SEEDS = 1


@functools.cache
def cases_of(function: str) -> list:
    """Every kind with every style of values in two dtypes, and the gate's own cases."""
    combinations = itertools.product(KINDS[function], VALUES, ("float32", "bfloat16"), range(SEEDS))
    dense = [
        ActivationCase(
            function=function, kind=kind, values=values, dtype=dtype, seed=seed, tokens=5, width=9, probs="float32",
            grads="h+probs",
        )
        for kind, values, dtype, seed in combinations
    ]  # fmt: skip
    return dense + gate_cases(function, every=8)


@pytest.mark.parametrize("function", KINDS)
@pytest.mark.parametrize("shipped", ACTIVATIONS, ids=lambda name: name.partition(":")[2])
def test_a_shipped_activation_is_accepted(shipped, function):
    assert_accepted(in_turn(cases_of(function), shipped, ACTIVATIONS), load(shipped))


def test_the_gradient_of_torchs_gelu_is_accepted_where_its_terms_cancel():
    """oneDNN returns a slope of 0 at -10.9; the exact one is 1e-25."""
    cases = [
        ActivationCase(function="activation", kind="gelu", tokens=4, values="rows", width=5, grads="h", seed=seed)
        for seed in range(20)
    ]
    assert_accepted(cases, load("tests.honest.activations:Eager"))


EVERY = ActivationCase(function="glu", dtype="bfloat16", alpha=250, clamp=56, interleave=3, values="every", grads="h")
OVERFLOWING = (  # a cotangent times -3e38 before it meets a slope of 0; 2 x of squared_relu
    ("Eager", replace(EVERY, tokens=70, width=3, early=True, seed=89)),
    ("TermByTerm", ActivationCase(function="activation", tokens=3, width=129, values="every", grads="h", seed=457)),
    # x (1 + erf) before it is halved
    ("Eager", replace(EVERY, function="activation", kind="gelu", dtype="float32", alpha=0, clamp=0, interleave=0,
                      tokens=2, width=109, seed=839)),
)  # fmt: skip


@pytest.mark.parametrize(("shipped", "case"), OVERFLOWING, ids=["glu", "activation", "gelu"])
def test_a_product_that_overflows_before_a_factor_that_is_small_is_accepted(shipped, case):
    assert_accepted([case], load(f"tests.honest.activations:{shipped}"))


# ---- wrong in one place


class OffByAThousandth(Shipped):
    def curve(self, x, kind, alpha):
        value = super().curve(x, kind, alpha)
        return value + 1e-3 * (value - value.detach())  # the gradient alone


class WithoutTheBell(Summed):
    """gelu's slope without x exp(-x²/2) / √(2π), silu's without x σ(1 - σ)."""

    def slope(self, x, kind, alpha):
        if kind == "gelu":
            return 0.5 + 0.5 * self.erf(x * math.sqrt(0.5))
        return self.sigmoid(x)


class CutTail(Shipped):
    """0 below -9, where silu is -1.1e-3, and gelu -1e-18."""

    def curve(self, x, kind, alpha):
        return torch.where(x < -9, 0, super().curve(x, kind, alpha))


def rounded_sigmoid(x):
    return sigmoid_by_tanh(x).bfloat16().to(x.dtype)


def sigmoid_without_the_last_bits(x):
    return 0.5 * torch.tanh(0.5 * x).mul(2**15).round().div(2**15) + 0.5  # as tanh.approx


WRONG = [
    *((kind, values, OffByAThousandth(), "d_h") for kind in CURVES for values in ("dyadic", "rows", "saturated")),
    ("gelu", "rows", WithoutTheBell(closed=True), "d_h"),
    ("silu", "rows", WithoutTheBell(closed=True), "d_h"),
    ("silu", "rows", CutTail(), "out"),
    ("silu", "dyadic", How(sigmoid=rounded_sigmoid), "out"),
    ("silu", "dyadic", How(sigmoid=sigmoid_without_the_last_bits), "out"),
    ("quick_gelu", "saturated", How(sigmoid=sigmoid_without_the_last_bits), "out"),
]


@pytest.mark.parametrize(("kind", "values", "variant", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_an_activation_that_is_wrong_in_one_place_is_found_there(kind, values, variant, output):
    case = ActivationCase(function="activation", kind=kind, tokens=9, values=values, width=8, grads="h")
    assert (output, "bound") in failures(case, make(variant), 8)
