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


def composed(**replacements: Callable[..., Any]) -> SimpleNamespace:
    """A layer of one process that calls its own stages; the named ones wrap the right ones."""
    stages = {name: getattr(RIGHT, name) for name in (*STAGES, *STATE)}
    layer = SimpleNamespace(**stages | {name: wrapped(stages[name], wrapper) for name, wrapper in replacements.items()})

    def moe_layer(x, parameters, config, *, state, training=True, batch_size=1, padding_mask=None, noise=None):
        p, settings = parameters, {"training": training, "batch_size": batch_size, "padding_mask": padding_mask}
        logits = layer.gate(x, p.router_weight, bias=p.router_bias, router_dtype=config.router_dtype)
        routed = without_padding(layer.route(logits, config.router, state=state, **settings), padding_mask)
        permuted = layer.permute(x, routed.routing_map, probs=routed.probs)
        weights = (permuted.tokens_per_expert, p.fc1_weight, p.fc2_weight)
        rows = layer.grouped_mlp(permuted.rows, *weights, probs=permuted.probs, **config.experts)
        output = layer.unpermute(rows, permuted.row_map)
        if p.shared_fc1_weight is not None:
            output = output + layer.shared_experts(x, p.shared_fc1_weight, p.shared_fc2_weight, **config.shared_experts)
        return SimpleNamespace(output=output, routed=routed)

    layer.moe_layer = moe_layer
    return layer


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **settings: wrapper(original, *arguments, **settings)


def larger(original, *arguments, **settings):
    """One result of the stage is an eighth too large."""
    out = original(*arguments, **settings)
    if not hasattr(out, "_replace"):
        return out * 1.125
    name = "rows" if hasattr(out, "rows") else "probs"
    return out._replace(**{name: getattr(out, name) * 1.125})


def without_gradient(original, rows, *arguments, probs, **settings):
    """The experts' probabilities learn nothing."""
    return original(rows, *arguments, probs=probs.detach(), **settings)


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
