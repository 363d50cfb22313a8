"""A training step whose layers have room for few rows, and which drops none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_fast.layer.module import MoELayer

X = TypeVar("X")


def within_budget(layers: Sequence[MoELayer], step: Callable[[], X], reset: Callable[[], Any]) -> X:
    """step(); and once more, with room for all rows, if any layer on any rank has dropped some.

    All ranks call it together and decide alike. Before the second run the routers have their states
    of before the first, and `reset` is called: it must undo what else the first run has done, as by
    `optimizer.zero_grad`. The step must not update parameters. The host waits once, after the step.

    Args:
        layers: with a `group`, and `LayerConfig.num_rows`; see `rank_budget`.

    Mirrors the rerun of megatron.core.transformer.moe.paged_stash.PagedStashRunner.
    """
    states = [layer.router.state for layer in layers]
    for layer in layers:
        layer.over_budget = torch.zeros_like(layer.over_budget)
    result = step()
    if not _dropped(layers):
        return result
    reset()
    configs = [layer.config for layer in layers]
    for layer, state in zip(layers, states, strict=True):
        layer.router.keep(state)
        layer.config = replace(layer.config, num_rows=None)
    try:
        return step()
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config


def _dropped(layers: Sequence[MoELayer]) -> bool:
    """Whether any rank has dropped rows in any layer."""
    if not layers:
        return False
    over = torch.stack([layer.over_budget for layer in layers]).any().to(torch.int32)
    dist.all_reduce(over, op=dist.ReduceOp.MAX, group=layers[0].group)
    return bool(over)
