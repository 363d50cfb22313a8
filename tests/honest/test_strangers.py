"""Implementations in the styles of other teams are accepted; the same with one mistake are not."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.ranks import ranks_of
from conformance.families.experts.cases_mlp import MlpCase
from conformance.families.permutation.cases import RoutingCase
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import LogitsCase
from conformance.interface import load
from tests.common.suite import assert_accepted, failures, gate_cases, outcome_of, reference, statuses
from tests.honest import STRANGERS, choices, codes, layers, routers, rows, strangers
from tests.honest.strangers import permuting

ENDS = ("PASS", "UNINFORMATIVE", "NOT_OFFERED")
NAN = LogitsCase(function="topk_routing", tokens=9, experts=8, topk=2, spread="nan", grads="logits")
TWICE = MlpCase(
    function="grouped_mlp", experts=2, counts=(9, 23), tokens=32, hidden=16, kind="gelu", bias2="bfloat16",
    grads="rows+probs+fc2_bias",
)  # fmt: skip


@functools.cache
def cases_of(function: str) -> list:
    """Every sixteenth of the gate's cases, on one rank; recipes in `quantize` alone, and of FP8."""
    recipes = ("delayed", "current", "block", "mxfp8") if function == "quantize" else ("",)
    cases = [case for case in gate_cases(function) if (getattr(case, "scaling", "") or "") in recipes]
    return [case for case in cases if ranks_of(CONTRACTS[function], case) <= 1][::16]


@pytest.mark.parametrize("name", STRANGERS, ids=lambda name: name.partition(":")[2])
def test_a_stranger_is_accepted(name):
    implementation = load(name)
    for function in CONTRACTS.keys() & vars(implementation.namespace):
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
    assert set(failures(NAN, SimpleNamespace(topk_routing=spread(0.25)), 3)) == {("probs", "bound")}


ONE_PRODUCT = CONTRACTS["grouped_linear"].case_type(
    function="grouped_linear", dtype="float64", tokens=3, hidden=1, width=1, grads="rows+weight"
)
DOUBLES = [
    RoutingCase(
        function="unpermute", dtype="float64", tokens=2, hidden=3, experts=2, probs="float64", grads="rows+probs"
    ),
    ONE_PRODUCT,
    replace(ONE_PRODUCT, hidden=9, width=5, law="autocast"),
]


@pytest.mark.parametrize("case", DOUBLES, ids=["sum", "product", "autocast"])
def test_float64_may_be_summed_in_float32_if_declared(case):
    assert statuses(case, rows.Narrow, 3) == {"PASS"}
    undeclared = SimpleNamespace(**{k: f for k, f in vars(rows.Narrow).items() if k != "declares"})
    assert statuses(case, undeclared, 3) == {"FAIL"}


def test_declared_float32_sums_are_no_sums_in_bfloat16():
    def narrower(x, weight, tokens_per_expert):
        return rows.linear_in_float32(x.bfloat16(), weight.bfloat16(), tokens_per_expert).to(x.dtype)

    mistaken = SimpleNamespace(grouped_linear=narrower, declares=rows.in_float32)
    assert statuses(ONE_PRODUCT, mistaken, 3) == {"FAIL"}


def test_an_activation_of_float64_is_in_float64_whatever_is_declared():
    def activation(h, *, kind):
        return moe_ref.activation(h.float(), kind=kind).to(h.dtype)

    case = CONTRACTS["activation"].case_type(function="activation", dtype="float64", tokens=3, width=4, kind="silu")
    mistaken = SimpleNamespace(activation=activation, declares=rows.in_float32)
    assert statuses(case, mistaken, 3) == {"FAIL"}
    assert statuses(case, moe_ref, 3) == {"PASS"}


def test_the_largest_of_zeros_may_be_minus_zero_but_no_other_number():
    def reading(number: float) -> SimpleNamespace:
        def amax(quantized, **settings):
            amax_of_reference = moe_ref.amax(quantized, **settings)
            return torch.where(amax_of_reference == 0, number, amax_of_reference)

        return reference(amax=amax)

    case = QuantizeCase(function="quantize", scaling="mxfp8", values="zeros")
    assert outcome_of(case, reading(-0.0)).status == "PASS"
    assert set(failures(case, reading(2.0**-149), 1)) == {("amax", "exact")}


def every_slot(rows, token, tokens):
    """Slots past a token's rows are added too."""
    counts = torch.bincount(token, minlength=tokens)
    at = (counts.cumsum(0) - counts)[:, None] + torch.arange(int(counts.max()))
    return rows[token.argsort(stable=True)[at.clamp(max=len(rows) - 1)]].sum(1)


def coarse(x):
    return strangers.fast_exp(x, ulps=2**9)


def without_end(rows, weight, tokens_per_expert, *, bias=None):
    return strangers.padded_linear(rows, weight, tokens_per_expert - (tokens_per_expert > 1).long(), bias=bias)


def rolled(tokens, routing_map, **settings):
    out = rows.permute_by_cumsum(tokens, routing_map, **settings)
    return replace(out, rows=out.rows.roll(1, 0))


def unsorted_drops(probs, routing_map, *, capacity):
    """By place, whatever the policy."""
    return choices.drop_tokens(probs, routing_map, capacity=capacity, drop_policy="position")


def larger(x, recipe, **settings):
    return codes.quantize(torch.where(x.isfinite(), x * (1 + 2.0**-7), x).to(x.dtype), recipe, **settings)


COARSE = routers.make(routers.How(exp=coarse, closed=True))
WRONG = [
    (
        cases_of("unpermute"),
        SimpleNamespace(permute=strangers.Slots.permute, unpermute=permuting(every_slot).unpermute),
    ),
    ([replace(NAN, spread="distinct")], SimpleNamespace(topk_routing=COARSE.topk_routing)),
    (cases_of("grouped_linear"), SimpleNamespace(grouped_linear=without_end)),
    (cases_of("permute"), SimpleNamespace(permute=rolled)),
    (cases_of("drop_tokens"), SimpleNamespace(drop_tokens=unsorted_drops)),
    (cases_of("quantize"), SimpleNamespace(**vars(codes.Bits) | {"quantize": larger})),
]


@pytest.mark.parametrize(
    ("cases", "implementation"), WRONG, ids=["slots", "fast", "padded", "rolled", "by place", "larger"]
)
def test_a_stranger_with_a_mistake_is_found(cases, implementation):
    assert "FAIL" in {outcome_of(case, implementation).status for case in cases}
