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


def placed_inputs(call: Problem) -> dict[str, Tensor]:
    """Copies of a call's tensors, of which those that want a gradient are leaves."""
    placed = {name: x.clone() for name, x in call.tensors.items()}
    return placed | {name: placed[name].requires_grad_() for name in call.wanted}


def gradients(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each input; zeros where none reaches it."""
    pairs = [(x, d_x.to(x.dtype)) for x, d_x in zip(outputs, cotangents, strict=True) if x.requires_grad]
    results: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs and inputs:
        attached, d_attached = zip(*pairs, strict=True)
        results = torch.autograd.grad(attached, inputs, d_attached, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, results, strict=True)]


def gradients_of_ranks(
    calls: Sequence[Problem], places: Sequence[dict[str, Tensor]], outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients that each rank wants, by rank and name."""
    wanted = [(rank, name) for rank, call in enumerate(calls) for name in call.wanted]
    results = gradients(outputs, cotangents, [places[rank][name] for rank, name in wanted])
    return {f"{rank}: d_{name}": gradient for (rank, name), gradient in zip(wanted, results, strict=True)}


def play_ranks(namespace: Any, calls: list[Problem]) -> dict[str, Any]:
    """Run one call with lists over the ranks, and take the gradients that all ranks want."""
    places = list(map(placed_inputs, calls))
    outputs: dict[str, Any] = {}
    differentiated: list[Tensor] = []
    cotangents: list[Tensor] = []
    results = _listed(namespace, calls, places)
    for rank, (call, out) in enumerate(zip(calls, results, strict=True)):
        for name, x in out.items():
            if name in CODED and x is not None and not isinstance(x, Tensor):
                outputs |= {f"{rank}: codes": namespace.codes(x), f"{rank}: scales": namespace.scales(x)}
                x = namespace.dequantize(x)
                out = out | {"dequantized": x}
            outputs[f"{rank}: {name}"] = x
        out = {"ordered": out.get("rows")} | out  # both formulations have the reference's order
        differentiated += [out[name] for name in call.cotangents]
        cotangents += call.cotangents.values()
    return outputs | gradients_of_ranks(calls, places, differentiated, cotangents)


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
