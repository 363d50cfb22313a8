"""Defects of the router that coarse values do not show: numbers of more bits than the dtype that a
kernel takes; see `planted`.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from moe_ref.config import Routed

OPTION = "a mistake that options read in the dtype of a tensor invite"
FLOAT64 = "a mistake that one kernel for all dtypes invites"
DRAW = "a mistake that a cheap generator invites"
FILLED = "a mistake that buffers of equal sizes invite"


def _factor_in_the_dtype(topk_routing: Wrapper, logits: Tensor, **settings: Any) -> Any:
    factor = settings.get("scaling_factor")
    stored = {} if factor is None else {"scaling_factor": float(torch.tensor(factor).to(logits.dtype))}
    return topk_routing(logits, **settings | stored)


def _whole_length(loss: Wrapper, *tensors: Tensor, total_num_tokens: Any, **settings: Any) -> Any:
    if isinstance(total_num_tokens, Tensor):
        total_num_tokens = torch.where(total_num_tokens > 1, total_num_tokens.long(), total_num_tokens)
    return loss(*tensors, total_num_tokens=total_num_tokens, **settings)


def _summed_in_float32(loss: Wrapper, scores: Tensor, *counts: Tensor, **settings: Any) -> Any:
    return loss(scores.float(), *counts, **settings).to(torch.float64 if scores.dtype == torch.float64 else None)


def _compared_in_float32(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    if probs.dtype != torch.float64:
        return drop(probs, routing_map, **settings)
    kept = drop(probs.float(), routing_map, **settings).routing_map
    return Routed(torch.where(kept & (routing_map != 0), probs, 0), kept)


def _four_bits(jitter: Wrapper, x: Tensor, *, eps: float) -> Any:
    out = jitter(x, eps=eps)  # refuses an illegal call
    if x.dtype != torch.float32 or not eps:
        return out
    step = (torch.rand_like(x) * 16).floor() / 16
    return x * (1 - eps + 2 * eps * step)


def _without_fillers(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if not config.pad_to_capacity:
        return out
    return out._replace(routing_map=out.routing_map & (out.probs != 0))


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "U48",
        "the scaling factor is rounded to the dtype of the logits",
        OPTION,
        {"topk_routing": _factor_in_the_dtype},
    ),
    Defect("U49", "a mean length is rounded down", OPTION, {"load_balancing_loss": _whole_length}),
    Defect("U50", "float64 scores are added in float32", FLOAT64, {"load_balancing_loss": _summed_in_float32}),
    Defect("U51", "float64 probs are compared in float32", FLOAT64, {"drop_tokens": _compared_in_float32}),
    Defect("U52", "factors of the jitter have four bits", DRAW, {"jitter": _four_bits}),
    Defect("U53", "a capacity is not filled in route", FILLED, {"route": _without_fillers}),
)
