"""The layer's calls: each rank's parameters as a record, and its state."""

from collections.abc import Sequence
from typing import Any

import torch

from conformance.core.contract import Problem
from conformance.families.experts.precision_mlp import pairs_from
from conformance.families.layer.routing import routed_outputs, state_before
from conformance.interface import Implementation
from evidence.formulations.worlds import gradients_of_ranks, placed_inputs
from moe_ref.config import LayerParameters


def play_layer(namespace: Any, calls: Sequence[Problem]) -> dict[str, Any]:
    """The layer on all ranks, and the gradients of what they want."""
    implementation, config = Implementation(namespace), calls[0].required["config"]
    places = list(map(placed_inputs, calls))
    parameters = [
        LayerParameters(**{n: x for n, x in placed.items() if n in LayerParameters._fields}) for placed in places
    ]
    states = [state_before(implementation, config.router, placed, torch.device("cpu")) for placed in places]
    layer_settings = {n: x for n, x in calls[0].settings.items() if n in ("training", "batch_size", "rerun")}
    layer_settings |= {n: [placed[n] for placed in places] for n in ("padding_mask", "noise") if n in places[0]}
    scales = [pairs_from(placed).get("state") for placed in places]
    layer_settings |= {} if scales[0] is None else {"linear_states": scales}
    out = namespace.moe_layer([placed["x"] for placed in places], parameters, config, states=states, **layer_settings)
    results: dict[str, Any] = {}
    for rank, routed in enumerate(out.routed):
        results |= {f"{rank}: {name}": x for name, x in routed_outputs(implementation, routed).items()}
        results[f"{rank}: output"] = out.output[rank]
    with_cotangent = [rank for rank, call in enumerate(calls) if call.cotangents]
    cotangents = [calls[rank].cotangents["output"] for rank in with_cotangent]
    outputs = [out.output[rank] for rank in with_cotangent]
    return results | gradients_of_ranks(calls, places, outputs, cotangents)
