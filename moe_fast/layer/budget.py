"""Run a training step whose layers have room for few rows, without dropping rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_fast.layer.layer import in_room
from moe_fast.layer.module import MoELayer

X = TypeVar("X")


def within_budget(layers: Sequence[MoELayer], step: Callable[[], X], reset: Callable[[], Any]) -> X:
    """step(); and a second time, with room for all rows, if any layer on any rank has dropped rows.

    All ranks call it together and decide alike. Before the second run the states of the routers,
    the histories of delayed scaling and torch's random generators are set back to what they were
    before the first, and `reset` is called: it must undo everything else that the first run has
    done, for example by `optimizer.zero_grad`. The step must not update parameters. The host waits
    once, after the step. For the forward of one layer alone see `rerun` of `moe_layer`.

    Args:
        layers: with a `group`, and `LayerConfig.num_rows`; see `rank_budget`.

    Mirrors the rerun of megatron.core.transformer.moe.paged_stash.PagedStashRunner.
    """
    if not layers:
        return step()
    states = [layer.router.state for layer in layers]
    scaled = [linear for layer in layers for linear in layer.experts.scaled]
    histories = [quantizer_state.amax_history for linear in scaled for quantizer_state in linear.state]
    old_histories = [x.clone() for x in histories]
    for layer in layers:
        layer.over_budget.zero_()

    def run(has_budget: bool) -> X:
        if has_budget:
            return step()
        reset()
        for layer, state in zip(layers, states, strict=True):
            layer.router.keep(state)
        for x, old in zip(histories, old_histories, strict=True):
            x.copy_(old)
        return _without_budgets(layers, step)

    def dropped(_: X) -> Tensor:
        return torch.stack([layer.over_budget for layer in layers]).any()

    return in_room(run, dropped, layers[0].group, layers[0].over_budget.device)


def _without_budgets(layers: Sequence[MoELayer], step: Callable[[], X]) -> X:
    """step(), with room for all rows in every layer."""
    configs = [layer.config for layer in layers]
    for layer in layers:
        layer.config = replace(layer.config, num_rows=None)
    try:
        return step()
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config
