"""Calls of all ranks together, whose arguments and results are lists over the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Opaque, Problem
from conformance.interface import named_outputs
from moe_ref.dispatch.ranks import Sum
from moe_ref.dispatch.ranks import play as play_threads

LISTED = ("probs", "scales")  # settings with an entry per rank
CODED = ("rows",)  # outputs that are opaque where a recipe quantises them


def play_together(
    namespace: Any, calls: list[Problem], play: Callable[[Any, Problem], dict[str, Any]]
) -> dict[str, Any]:
    """Run each rank in a thread of its own, with the sums over its groups."""

    def at(rank: int, sum_over: Callable[[Sequence[int]], Sum]) -> dict[str, Any]:
        call = calls[rank]
        ranks = call.settings["ranks"].groups(sum_over)
        return play(namespace, replace(call, settings=call.settings | {"ranks": ranks}))

    results_of_ranks = play_threads(len(calls), at)
    return {
        f"{rank}: {name}": x for rank, rank_results in enumerate(results_of_ranks) for name, x in rank_results.items()
    }


def play_ranks(namespace: Any, calls: list[Problem]) -> dict[str, Any]:
    """Run one call with lists over the ranks, and take the gradients that all ranks want."""
    places = [{name: x.clone() for name, x in call.tensors.items()} for call in calls]
    for call, placed in zip(calls, places, strict=True):
        placed |= {name: placed[name].requires_grad_() for name in call.wanted}
    outputs: dict[str, Any] = {}
    attached, cotangents = [], []
    results = _listed(namespace, calls, places)
    for rank, (call, out) in enumerate(zip(calls, results, strict=True)):
        for name, x in out.items():
            if name in CODED and x is not None and not isinstance(x, Tensor):
                outputs |= {f"{rank}: codes": namespace.codes(x), f"{rank}: scales": namespace.scales(x)}
                x = namespace.dequantize(x)
                out = out | {"dequantized": x}
            outputs[f"{rank}: {name}"] = x
        out = {"ordered": out.get("rows")} | out  # both formulations have the reference's order
        for name, d_x in call.cotangents.items():
            if out[name].requires_grad:
                attached.append(out[name])
                cotangents.append(d_x.to(out[name].dtype))
    wanted = [(rank, name) for rank, call in enumerate(calls) for name in call.wanted]
    inputs = [places[rank][name] for rank, name in wanted]
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    if attached and inputs:
        gradients = torch.autograd.grad(attached, inputs, cotangents, allow_unused=True)
    for (rank, name), x, g in zip(wanted, inputs, gradients, strict=True):
        outputs[f"{rank}: d_{name}"] = torch.zeros_like(x) if g is None else g
    return outputs


def _listed(namespace: Any, calls: list[Problem], places: Sequence[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """The results of each rank by name."""
    first = calls[0]
    handles: list[Any] = []
    if first.producer:
        producers = [call.producer for call in calls if call.producer]
        handles = [out["handle"] for out in _listed(namespace, producers, [producer.tensors for producer in producers])]
    arguments = [
        handles if isinstance(x, Opaque) else [placed[name] for placed in places] if isinstance(x, Tensor) else x
        for name, x in first.required.items()
    ]
    if handles and not any(isinstance(x, Opaque) for x in first.required.values()):
        arguments.append(handles)  # of a script, which passes them itself
    settings = {
        name: [placed[name] for placed in places] if name in LISTED else x for name, x in first.settings.items()
    }
    if "biases" in settings:
        settings["biases"] = [[call.settings["biases"][i] for call in calls] for i in range(len(settings["biases"]))]
    results = getattr(namespace, first.function)(*arguments, **settings)
    return [named_outputs(result, CONTRACTS[first.function].outputs) for result in results]
