"""Defects of plans of many rounds, of a choice by a plan in `route`, of masks that change, and of
float64 logits; see `planted`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import with_gradient
from defects.router.fine import FLOAT64
from moe_ref.config import Routed

ROUNDS = "a mistake that plans of few rounds do not show"
PLANNED = "a mistake that a choice by top-k does not show"
MASKS = "a mistake that one mask for all steps does not show"


def _plan(logits: Tensor, rounds: int, least: float) -> Tensor:
    cost = logits.detach().float().exp()
    columns, change = torch.ones_like(cost[0]), torch.inf
    rows = torch.ones_like(cost[:, 0])
    while change > least and rounds:
        before, rounds = columns, rounds - 1
        rows = 1 / len(cost) / ((cost * columns).sum(1) + 1e-8)
        columns = 1 / cost.shape[1] / ((cost * rows[:, None]).sum(0) + 1e-8)
        change = float((before - columns).abs().mean())
    return columns * cost * rows[:, None]


def _stopped(rounds: int = -1, least: float = 1e-4) -> Wrapper:
    """A plan of so many rounds at most, or with another end."""

    def planted(sinkhorn: Wrapper, logits: Tensor, *, topk: int, training: bool = True) -> Any:
        right = sinkhorn(logits, topk=topk, training=training)
        if not training or not len(logits):
            return right
        chosen = _plan(logits, rounds, least).topk(topk, dim=1).indices
        routing_map = torch.zeros_like(right.routing_map).scatter(1, chosen, True)
        weights = logits.float().sigmoid() if topk == 1 else logits.float().softmax(1)
        return Routed(torch.where(routing_map, weights, 0).to(logits.dtype), routing_map)

    return planted


def _by_topk(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    return route(logits, replace(config, sinkhorn=False), **settings)


def _plan_in_evaluations(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    records = settings.get("training", True) and torch.is_grad_enabled()
    if records or not config.sinkhorn:
        return route(logits, config, **settings)
    with torch.enable_grad():
        out = route(logits.detach(), replace(config, z_loss_coeff=0.0), **settings | {"training": True})
    return out._replace(state=settings["state"])


_masks: dict[int, Tensor] = {}  # of the first step, by the number of tokens


def _new_masks(new_state: Wrapper, *arguments: Any, **settings: Any) -> Any:
    _masks.clear()
    return new_state(*arguments, **settings)


def _first_mask(route: Wrapper, logits: Tensor, *rest: Any, **settings: Any) -> Any:
    mask = settings.get("padding_mask")
    kept = {} if mask is None else {"padding_mask": _masks.setdefault(len(mask), mask.clone())}
    return route(logits, *rest, **settings | kept)


def _through_float32(change: Callable[[Tensor, Change], Tensor]) -> Change:
    return lambda x: change(x, lambda v: v.float().double()) if x.dtype == torch.float64 else x


def _results_in_float32(function: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out = function(logits, **settings)
    rounded = _through_float32(with_values)
    if isinstance(out, Tensor):
        return rounded(out)
    return out._replace(**{name: rounded(x) for name, x in out._asdict().items()})


def _gradient_in_float32(function: Wrapper, logits: Tensor, **settings: Any) -> Any:
    return function(_through_float32(with_gradient)(logits), **settings)


def _length_in_float32(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """For torch an integer over a number is float32; so is the mean length of padded sequences."""
    out, mask = route(logits, config, **settings), settings.get("padding_mask")
    loss = out.losses.seq_aux_loss
    if loss is None or mask is None or logits.dtype != torch.float64 or settings.get("ranks"):
        return out
    length = float((mask == 0).sum()) / settings.get("batch_size", 1)
    rounded = float(torch.tensor(length, dtype=torch.float32)) or 1.0
    return out._replace(losses=out.losses._replace(seq_aux_loss=loss * (length / rounded) ** 2))


TOPK = ("topk_indices", "topk_routing")
DEFECTS: tuple[Defect, ...] = (
    Defect("U54", "a plan has at most three rounds", ROUNDS, {"sinkhorn_routing": _stopped(3)}),
    Defect("U55", "a plan has at most 32 rounds", ROUNDS, {"sinkhorn_routing": _stopped(32)}),
    Defect("U56", "a plan ends where it still changes by 0.05", ROUNDS, {"sinkhorn_routing": _stopped(least=0.05)}),
    Defect("U57", "route chooses the largest logits where a plan is asked for", PLANNED, {"route": _by_topk}),
    Defect("U58", "an evaluation of route chooses by the plan", PLANNED, {"route": _plan_in_evaluations}),
    Defect("U59", "route keeps the mask of its first step", MASKS, {"route": _first_mask, "new_state": _new_masks}),
    Defect("U60", "weights of float64 logits in float32", FLOAT64, dict.fromkeys(TOPK, _results_in_float32)),
    Defect("U61", "gradients of float64 logits in float32", FLOAT64, dict.fromkeys(TOPK, _gradient_in_float32)),
    Defect("U62", "scores of float64 logits in float32", FLOAT64, {"aux_loss_scores": _results_in_float32}),
    Defect("U63", "a loss of float64 logits in float32", FLOAT64, {"z_loss": _results_in_float32}),
    Defect("U67", "the mean length of sequences with padding in float32", FLOAT64, {"route": _length_in_float32}),
)
