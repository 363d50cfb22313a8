"""The router in Transformer Engine's tests, read from its source: choices, weights, losses and
their gradients.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import Comparison, compare
from evidence.oracles.random_inputs import generator
from evidence.oracles.source import load

PEER = "the router in Transformer Engine's tests"
PACKAGES: tuple[str, ...] = ()
SOURCE = "NVIDIA/TransformerEngine"

SHAPES = ((1, 2, 1), (3, 8, 2), (16, 32, 4), (7, 64, 8), (32, 256, 8))  # tokens, experts, chosen
GROUPS = ((None, None), (4, 2))
RULE = "within (E + 8) · 2^-23 of the largest value in the row"


def comparisons(source: Path) -> Iterator[Comparison]:
    """Routing, scores for the loss, and the loss."""
    names = ("topk_score_function_pytorch", "compute_scores_for_aux_loss_pytorch", "aux_loss_pytorch")
    theirs = load(source / "tests/pytorch/test_fused_router.py", (*names, "group_limited_topk"))
    for (tokens, experts, topk), score in product(SHAPES, ("softmax", "sigmoid", "sqrtsoftplus")):
        logits = torch.randn(tokens, experts, generator=generator(tokens))  # no ties
        text = f"T={tokens} E={experts} K={topk} {score}"
        yield from routing(theirs.topk_score_function_pytorch, logits, topk, score, text)
        yield from scores(theirs.compute_scores_for_aux_loss_pytorch, logits, topk, score, text)
        yield loss(theirs.aux_loss_pytorch, logits, topk, text)


def bounded(subject: str, ours: Tensor, theirs: Tensor, text: str) -> Comparison:
    """Compare the result of a softmax or a normalisation, in which the same float32 operations have
    another order.
    """
    largest = theirs.abs().amax(-1, keepdim=True) if theirs.dim() else theirs.abs()
    room = (ours.shape[-1] if ours.dim() else 1) + 8
    return compare(
        subject, ours, theirs, case=lambda at, _: f"{text} at {at}", bound=room * 2.0**-23 * largest, rule=RULE
    )


def both(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Each function's value and gradient, for one random cotangent."""
    results = []
    for function in (ours, theirs):
        inputs = x.clone().requires_grad_()
        value = function(inputs)
        cotangent = torch.randn(value.shape, generator=generator(7))
        results.append((value, torch.autograd.grad(value, inputs, cotangent)[0]))
    return results[0], results[1]


def first(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """The first of the function's results."""
    return lambda x: function(x)[0]


def placed(text: str, at: tuple[int, ...], cause: str) -> str:
    """The text of a case, with a position in its result."""
    return f"{text} at {at}"


def routing(theirs: Callable[..., Any], logits: Tensor, topk: int, score: str, text: str) -> Iterator[Comparison]:
    """Every setting of the choice."""
    experts = logits.shape[1]
    bias = torch.linspace(-0.2, 0.2, experts) if score != "softmax" else None
    for pre, (groups, group_topk), scale in product((False, True), GROUPS, (None, 2.5)):
        if (pre and score != "softmax") or (groups and (topk % 2 or experts % 4 or topk // 2 > experts // 4)):
            continue
        settings: dict[str, Any] = {
            "num_groups": groups,
            "group_topk": group_topk,
            "scaling_factor": scale,
            "score_function": score,
        }
        settings["expert_bias"] = bias
        mine = partial(moe_ref.topk_routing, topk=topk, pre_softmax=pre, **settings)
        their_routing = partial(theirs, topk=topk, use_pre_softmax=pre, **settings)
        (probs, gradient), (their_probs, their_gradient) = both(first(mine), first(their_routing), logits)
        own_map, their_map = mine(logits).routing_map, their_routing(logits)[1]
        case = f"{text} groups={groups} pre_softmax={pre}"
        yield compare("choice, without ties", own_map, their_map, case=partial(placed, case))
        yield bounded("weights", probs, their_probs, case)
        yield bounded("gradient of the logits", gradient, their_gradient, case)


def scores(theirs: Callable[..., Any], logits: Tensor, topk: int, score: str, text: str) -> Iterator[Comparison]:
    """The scores of the balancing loss, and the map that is counted."""
    our_scores = moe_ref.aux_loss_scores(logits, topk=topk, score_function=score)
    yield compare(
        "counted map", our_scores.routing_map, theirs(logits, topk, score)[0], case=lambda at, _: f"{text} at {at}"
    )
    mine = first(partial(moe_ref.aux_loss_scores, topk=topk, score_function=score))
    (value, gradient), (their_value, their_gradient) = both(mine, lambda x: theirs(x, topk, score)[1], logits)
    yield bounded("scores of the loss", value, their_value, text)
    yield bounded("gradient of the scores", gradient, their_gradient, text)


def loss(theirs: Callable[..., Any], logits: Tensor, topk: int, text: str) -> Comparison:
    """The balancing loss; counts and scores are the same for both."""
    scored = moe_ref.aux_loss_scores(logits, topk=topk)
    counts, tokens, experts = scored.routing_map.sum(0), len(logits), logits.shape[1]
    our_loss = moe_ref.load_balancing_loss(
        scored.scores, counts, total_num_tokens=tokens, topk=topk, num_experts=experts, coeff=0.01
    )
    their_loss = theirs(scored.scores, counts, tokens, topk, experts, 0.01)
    room = (experts + tokens + 8) * 2.0**-23 * their_loss.abs()
    return compare(
        "balancing loss",
        our_loss,
        their_loss,
        case=lambda at, _: text,
        bound=room,
        rule="within (E + T + 8) · 2^-23 of it",
    )
