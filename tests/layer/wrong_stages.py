"""Layers of given stages, which may be wrong."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from conformance.interface import load
from moe_ref.layer import without_padding

RIGHT = load("moe_ref").namespace
STAGES = ("gate", "route", "permute", "grouped_mlp", "unpermute", "shared_experts")
STATE = ("new_state", "finish_batch", "state_tensors", "state_from")


def composed(**wrong: Callable[..., Any]) -> SimpleNamespace:
    """A layer of one process that calls its own stages; the named ones wrap the right ones."""
    stages = {name: getattr(RIGHT, name) for name in (*STAGES, *STATE)}
    own = SimpleNamespace(**stages | {name: wrapped(stages[name], how) for name, how in wrong.items()})

    def moe_layer(x, parameters, config, *, state, training=True, batch_size=1, padding_mask=None, noise=None):
        p, settings = parameters, {"training": training, "batch_size": batch_size, "padding_mask": padding_mask}
        logits = own.gate(x, p.router_weight, bias=p.router_bias, router_dtype=config.router_dtype)
        routed = without_padding(own.route(logits, config.router, state=state, **settings), padding_mask)
        part = own.permute(x, routed.routing_map, probs=routed.probs)
        weights = (part.tokens_per_expert, p.fc1_weight, p.fc2_weight)
        rows = own.grouped_mlp(part.rows, *weights, probs=part.probs, **config.experts)
        output = own.unpermute(rows, part.row_map)
        if p.shared_fc1_weight is not None:
            output = output + own.shared_experts(x, p.shared_fc1_weight, p.shared_fc2_weight, **config.shared_experts)
        return SimpleNamespace(output=output, routed=routed)

    own.moe_layer = moe_layer
    return own


def wrapped(right: Callable[..., Any], how: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **settings: how(right, *arguments, **settings)


def larger(right, *arguments, **settings):
    """One result of the stage is an eighth too large."""
    out = right(*arguments, **settings)
    if not hasattr(out, "_replace"):
        return out * 1.125
    name = "rows" if hasattr(out, "rows") else "probs"
    return out._replace(**{name: getattr(out, name) * 1.125})


def without_gradient(right, rows, *arguments, probs, **settings):
    """The experts' probabilities learn nothing."""
    return right(rows, *arguments, probs=probs.detach(), **settings)


class WrongCombine:
    """The reference over ranks, and a combine that forgets the last token of rank 1."""

    def __getattr__(self, name: str) -> Any:
        return getattr(RIGHT, name)

    @staticmethod
    def alltoall_combine(rows, handle, *, group=None):
        out = RIGHT.alltoall_combine(rows, handle, group=group)
        keeps = out.new_ones(len(out), 1)
        keeps[-1] = float(dist.get_rank(group) != 1)
        return out * keeps


wrong_combine = WrongCombine()
