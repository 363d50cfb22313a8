"""Routers that differ only where the contract leaves room are accepted; others are rejected."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, drawn, strategy
from conformance.families.router.cases import LoadCase, LogitsCase
from conformance.interface import load
from moe_ref.router.sinkhorn import sinkhorn_routing
from tests.common.suite import assert_accepted, failures, in_turn, statuses
from tests.honest import ROUTERS
from tests.honest.activations import sigmoid_by_tanh
from tests.honest.routers import How, ascending, make

FUNCTIONS = [name for name in CONTRACTS if hasattr(make(How()), name)]
EVERY, DRAWS = 6, 10  # every 6th case of a covering array; drawn cases


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("router", ROUTERS, ids=lambda name: name.partition(":")[2])
def test_an_honest_router_is_accepted(router, function):
    cases = [*covering_cases(function, Space()).cases[::EVERY], *drawn(strategy(function, Space()), 11, DRAWS)]
    assert_accepted(in_turn(cases, router, ROUTERS), load(router))


CASE = LogitsCase(function="topk_routing", tokens=7, experts=8, topk=2, grads="logits")
SIGMOID = replace(CASE, score="sigmoid")


def softplus_with_a_kink(x):
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))  # autograd's slope at 0 is not 1/2


def exp_of_half_the_digits(x):
    return torch.exp(x.bfloat16()).to(x.dtype)


def sum_without_the_last(x):
    return ascending(x[..., :-1]) if x.shape[-1] > 1 else ascending(x)


def best_by_bfloat16(keys, count):
    return keys.bfloat16().topk(count, dim=1).indices


def second_best(keys, count):
    return keys.topk(min(count + 1, keys.shape[1]), dim=1).indices[:, -count:]


class Loose(How):
    """softmax without subtracting the maximum."""

    def softmax(self, x):
        return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


WRONG = [
    (replace(CASE, score="sqrtsoftplus", spread="ties"), How(softplus=softplus_with_a_kink), "d_logits"),
    (
        replace(CASE, score="sqrtsoftplus", spread="negative"),
        How(softplus=lambda x: torch.log(1 + torch.exp(x))),
        "probs",
    ),
    (CASE, How(exp=exp_of_half_the_digits), "probs"),
    (SIGMOID, How(sigmoid=lambda x: torch.sigmoid(x.bfloat16()).to(x.dtype)), "probs"),
    (SIGMOID, How(total=sum_without_the_last), "probs"),
    (replace(CASE, spread="near"), How(best=best_by_bfloat16), "routing_map"),
    (SIGMOID, How(best=second_best), "routing_map"),
    (replace(CASE, spread="saturated", score="softmax_pre"), How(dtype=torch.bfloat16), "probs"),
    (replace(CASE, spread="extreme", score="softmax_pre"), Loose(), "probs"),
]


@pytest.mark.parametrize(("case", "variant", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_router_that_is_wrong_in_one_place_is_found_there(case, variant, output):
    assert output in (name for name, _ in failures(case, make(variant), 8))


FOUND = (  # honest, and rejected once
    # torch's softplus is x above 20, by 2e-9 wrong in float64
    replace(SIGMOID, function="topk_indices", score="sqrtsoftplus", dtype="float64", spread="saturated", topk=1),
    # another choice than the reference's, in inference mode
    replace(SIGMOID, function="topk_indices", spread="extreme", experts=64, topk=11, law="inference_mode", grads=""),
    # a mean length in memory that a law overwrites: it must stay a length
    LoadCase(
        function="load_balancing_loss", tokens=9, experts=5, topk=2, total="mean", values="zeros", law="buffer_reuse"
    ),
)


@pytest.mark.parametrize("case", FOUND, ids=["softplus", "inference", "length"])
def test_honest_cases_that_an_earlier_judge_rejected_are_accepted(case):
    assert statuses(case, load(ROUTERS[0]), 3) == {"PASS"}


TANH = How(sigmoid=sigmoid_by_tanh)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_sigmoid_by_tanh_is_wrong_in_a_router(topk):
    case = replace(SIGMOID, topk=topk, spread="negative", grads="")
    assert statuses(case, make(TANH), 4) == {"FAIL"}
    assert {check for _, check in failures(case, make(TANH), 4)} <= {"bound", "choice"}
    logits = torch.tensor([[-20.0, -22.0, -21.0]])
    settings = {"topk": topk, "score_function": "sigmoid"}
    assert make(TANH).topk_routing(logits, **settings).probs.sum() == 0  # the token is lost
    assert make(How()).topk_routing(logits, **settings).probs.sum() > 0


def by_activations(logits, *, topk, training=True):
    return sinkhorn_routing(logits, topk=topk, training=False)


def by_one_round(logits, *, topk, training=True):
    if not training:
        return sinkhorn_routing(logits, topk=topk, training=False)
    cost = logits.detach().float().exp()
    share = 1 / len(cost) / (cost.sum(1) + 1e-8)  # Megatron's epsilon
    plan = cost * share[:, None] / ((cost * share[:, None]).sum(0) + 1e-8) / cost.shape[1]
    routed = sinkhorn_routing(logits, topk=topk, training=True)
    routing_map = torch.zeros_like(plan, dtype=torch.bool).scatter(1, plan.topk(topk, dim=1).indices, True)
    activation = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, -1)
    return routed._replace(probs=torch.where(routing_map, activation, 0), routing_map=routing_map)


@pytest.mark.parametrize("plan", [by_activations, by_one_round])
def test_a_sinkhorn_plan_that_is_not_balanced_is_found(plan):
    case = LogitsCase(function="sinkhorn_routing", tokens=16, experts=6, topk=4)
    assert "routing_map" in (output for output, _ in failures(case, SimpleNamespace(sinkhorn_routing=plan), 12))
    assert statuses(case, moe_ref, 3) == {"PASS"}
