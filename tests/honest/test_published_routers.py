"""Routers of published models are accepted; gradients and choices near theirs are not."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from conformance.families.router.cases import SPREADS, LogitsCase
from tests.common.suite import assert_accepted, failures, gate_cases
from tests.honest import published_routers
from tests.honest.published_routers import make, qwen3

SCORE_OF = {
    "Qwen3": "softmax",
    "Mixtral": "softmax",
    "Olmoe": "softmax_pre",
    "DeepSeekV3": "sigmoid",
    "Llama4": "sigmoid",
}
ENDS = ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED", "NOT_OFFERED")
SIZES = ((5, 1), (8, 3), (16, 16), (60, 4))  # experts and K


@functools.cache
def fixed_cases(function: str) -> list:
    return gate_cases(function, every=6)


def cases_of(function: str, score: str, sizes) -> list:
    """Every spread with every size, the three dtypes in turn."""
    dtypes = itertools.cycle(("float32", "bfloat16", "float64"))
    return [
        LogitsCase(
            function=function, tokens=6, experts=experts, topk=topk, spread=spread, dtype=dtype, score=score,
            grads="logits",
        )
        for ((experts, topk), spread), dtype in zip(itertools.product(sizes, SPREADS), dtypes, strict=False)
    ]  # fmt: skip


@pytest.mark.parametrize("function", ["topk_routing", "topk_indices"])
@pytest.mark.parametrize("model", SCORE_OF)
def test_the_router_of_a_published_model_is_accepted(model, function):
    sizes = SIZES[:1] if model == "Llama4" else SIZES
    router = getattr(published_routers, model)
    assert_accepted(cases_of(function, SCORE_OF[model], sizes), router)
    assert_accepted(fixed_cases(function), router, statuses=ENDS, share=0)


# ---- wrong in one place


class Leaking(torch.autograd.Function):
    """x; its gradient is a thousandth too large, or has a thousandth of the largest everywhere."""

    @staticmethod
    def forward(ctx, x, everywhere):
        ctx.everywhere = everywhere
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 1e-3 * (g.abs().amax(1, keepdim=True) if ctx.everywhere else g), None


def larger_gradient(logits, topk, **settings):
    return qwen3(Leaking.apply(logits, False), topk, **settings)


def gradient_of_other_experts(logits, topk, **settings):
    return qwen3(Leaking.apply(logits, True), topk, **settings)


def constant_sum(logits, topk, **_):
    """The sum of the chosen scores taken as a constant of the gradient."""
    weights, indices = torch.topk(F.softmax(logits.float(), dim=1), topk, dim=-1)
    return (weights / weights.sum(-1, keepdim=True).detach()).to(logits.dtype), indices


def chosen_in_bfloat16(logits, topk, **_):
    scores = F.softmax(logits.float(), dim=1)
    indices = scores.bfloat16().topk(topk, dim=1).indices
    weights = scores.gather(1, indices)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), indices


def chosen_by_shifted_logits(logits, topk, **_):
    """Shifted by a constant that takes the last bits away."""
    indices = (logits.float() + 1000).topk(topk, dim=1).indices
    return qwen3(logits.gather(1, indices), topk)[0], indices.gather(1, qwen3(logits.gather(1, indices), topk)[1])


CASE = LogitsCase(function="topk_routing", tokens=7, experts=8, topk=2, grads="logits")
WRONG = [
    (CASE, larger_gradient, "d_logits"),
    (CASE, gradient_of_other_experts, "d_logits"),
    (CASE, constant_sum, "d_logits"),
    (replace(CASE, topk=1), constant_sum, "d_logits"),
    (replace(CASE, spread="near"), chosen_in_bfloat16, "routing_map"),
    (replace(CASE, spread="near"), chosen_by_shifted_logits, "routing_map"),
]


@pytest.mark.parametrize(("case", "router", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_router_near_a_published_one_is_found_where_it_is_wrong(case, router, output):
    assert output in (name for name, _ in failures(case, make(router, score_function="softmax"), 8))
