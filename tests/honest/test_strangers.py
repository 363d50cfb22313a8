"""Implementations in the styles of other teams are accepted; the same with one mistake are not."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.families.experts.cases_mlp import MlpCase
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import LogitsCase
from conformance.interface import load
from tests.common.suite import assert_accepted, failures, gate_cases, outcome_of, reference
from tests.honest import STRANGERS, layers, routers, strangers
from tests.honest.strangers import permuting

ENDS = ("PASS", "UNINFORMATIVE", "NOT_OFFERED")
NAN = LogitsCase(function="topk_routing", tokens=9, experts=8, topk=2, spread="nan", grads="logits")
TWICE = MlpCase(
    function="grouped_mlp", experts=2, counts=(9, 23), tokens=32, hidden=16, kind="gelu", bias2="bfloat16",
    grads="rows+probs+fc2_bias",
)  # fmt: skip


@functools.cache
def cases_of(function: str) -> list:
    """Every sixteenth of the gate's cases, without recipes."""
    return [case for case in gate_cases(function) if not getattr(case, "scaling", "")][::16]


@pytest.mark.parametrize("name", STRANGERS, ids=lambda name: name.partition(":")[2])
def test_a_stranger_is_accepted(name):
    implementation = load(name)
    for function in vars(implementation.namespace):
        assert_accepted(cases_of(function), implementation, statuses=ENDS, share=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probs_that_are_widened_once_per_use_are_accepted(dtype):
    cases = [TWICE.changed(dtype=dtype, probs=dtype, seed=seed) for seed in range(3)]
    assert_accepted(cases, layers.Twice)


def test_a_row_of_nan_may_be_nan_everywhere_but_holds_no_other_number():
    def spread(number: float) -> Callable[..., Any]:
        def routing(logits, **settings):
            probs, chosen = routers.Autograd.topk_routing(logits, **settings)
            return probs.masked_fill(logits.isnan().any(1, keepdim=True) & ~chosen, number), chosen

        return routing

    assert outcome_of(NAN, SimpleNamespace(topk_routing=spread(torch.nan))).status == "PASS"
    assert failures(NAN, SimpleNamespace(topk_routing=spread(0.25)), 3) == {("probs", "bound")}


def test_the_largest_of_zeros_may_be_minus_zero_but_no_other_number():
    def reading(number: float) -> SimpleNamespace:
        def amax(quantized, **settings):
            right = moe_ref.amax(quantized, **settings)
            return torch.where(right == 0, number, right)

        return reference(amax=amax)

    case = QuantizeCase(function="quantize", scaling="mxfp8", values="zeros")
    assert outcome_of(case, reading(-0.0)).status == "PASS"
    assert failures(case, reading(2.0**-149), 1) == {("amax", "exact")}


def every_slot(rows, token, tokens):
    """Slots past a token's rows are added too."""
    counts = torch.bincount(token, minlength=tokens)
    at = (counts.cumsum(0) - counts)[:, None] + torch.arange(int(counts.max()))
    return rows[token.argsort(stable=True)[at.clamp(max=len(rows) - 1)]].sum(1)


def coarse(x):
    return strangers.fast_exp(x, ulps=2**9)


def without_end(rows, weight, tokens_per_expert):
    return strangers.padded_linear(rows, weight, tokens_per_expert - (tokens_per_expert > 1).long())


COARSE = routers.make(routers.How(exp=coarse, closed=True))
WRONG = [
    (
        cases_of("unpermute"),
        SimpleNamespace(permute=strangers.Slots.permute, unpermute=permuting(every_slot).unpermute),
    ),
    ([replace(NAN, spread="distinct")], SimpleNamespace(topk_routing=COARSE.topk_routing)),
    (cases_of("grouped_linear"), SimpleNamespace(grouped_linear=without_end)),
]


@pytest.mark.parametrize(("cases", "implementation"), WRONG, ids=["slots", "fast", "padded"])
def test_a_stranger_with_a_mistake_is_found(cases, implementation):
    assert "FAIL" in {outcome_of(case, implementation).status for case in cases}
