"""The routing of a layer's calls: how it is read from an implementation, and what is right."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core.contract import Problem, accumulator_of
from conformance.families.layer.cases import LayerCase, factors_of, logits_of_rows, route_case
from conformance.families.router.cases_route import LOSSES
from conformance.families.router.route_step import Step
from conformance.interface import named_outputs
from moe_ref.config import LayerConfig, RouteOutput, RouterConfig
from moe_ref.layer import route_together

STATE = ("expert_bias", "tokens_per_expert", "global_tokens_per_expert", "global_steps")  # compared
ROUTED = ("probs", "routing_map", "losses", "state")


def state_before(implementation: Any, router: RouterConfig, arguments: Mapping[str, Any], device: torch.device) -> Any:
    """The implementation's state with the given expert bias, and counts of earlier tokens."""
    state = implementation.call("new_state", router, device=device)
    if "expert_bias" not in arguments:
        return state
    tensors = implementation.call("state_tensors", state)
    counts = counted_before(router).to(device)
    changed = {"expert_bias": arguments["expert_bias"].clone(), "tokens_per_expert": counts}
    return implementation.call("state_from", tensors | changed)


def counted_before(router: RouterConfig) -> Tensor:
    """[E] int64, 3 5 7 …"""
    return 2 * torch.arange(router.num_experts) + 3


def routed_outputs(implementation: Any, result: Any) -> dict[str, Any]:
    """A router's results by name."""
    routed = named_outputs(result, ROUTED)
    losses = {name: getattr(routed["losses"], name, None) for name in LOSSES}
    tensors = implementation.call("state_tensors", routed["state"])
    return {
        "probs": routed["probs"],
        "routing_map": routed["routing_map"],
        "losses": torch.tensor([loss is not None for loss in losses.values()]),
        **{name: loss for name, loss in losses.items() if loss is not None},
        **{f"state.{name}": tensors[name].clone() for name in STATE if name in tensors},
    }


def seen_by_router(case: LayerCase, call: Problem) -> Tensor:
    """[T,H] the tokens, times their jitter."""
    x = call.required["x"]
    return x * factors_of(case, call.settings["noise"]) if case.jitter else x


def routing_of(
    case: LayerCase, config: LayerConfig, calls: list[Problem]
) -> tuple[list[Tensor], list[Any], dict[str, Any]]:
    """Each rank's exact logits and state, and the settings of `route_together`."""
    tensors_of_ranks = [call.required for call in calls]
    dtype = torch.float32 if config.router_dtype == "fp32" else tensors_of_ranks[0]["x"].dtype
    logits = [
        logits_of_rows(seen_by_router(case, call), tensors["router_weight"], tensors.get("router_bias"), dtype)
        for call, tensors in zip(calls, tensors_of_ranks, strict=True)
    ]
    fresh = [moe_ref.new_state(config.router) for _ in tensors_of_ranks]
    pairs = zip(fresh, tensors_of_ranks, strict=True)
    states = [
        state._replace(expert_bias=tensors["expert_bias"], tokens_per_expert=counted_before(config.router))
        if "expert_bias" in tensors
        else state
        for state, tensors in pairs
    ]
    options = {"training": calls[0].settings.get("training", True), "batch_size": case.sequences}
    masks = [call.settings.get("padding_mask") for call in calls]
    return logits, states, options | ({} if masks[0] is None else {"padding_mask": masks})


def steps_of(
    case: LayerCase, config: LayerConfig, calls: list[Problem], declared: Mapping[str, Any]
) -> tuple[list[Step], list[RouteOutput]]:
    """Each rank's routing of its exact logits, with bounds, and the reference's in float64."""
    logits, states, options = routing_of(case, config, calls)
    masks = options.get("padding_mask", [None] * len(calls))
    with torch.enable_grad():
        routed = route_together([x.double() for x in logits], config, states, **options)
    steps = []
    for x, state, out, mask in zip(logits, states, routed, masks, strict=True):
        named = {f"0.{name}": loss for name, loss in out.losses._asdict().items() if loss is not None}
        named |= {"0.probs": out.probs, "0.routing_map": out.routing_map}
        named["0.losses"] = torch.tensor([getattr(out.losses, name) is not None for name in LOSSES])
        call = Problem("route", {"logits.0": x}, {} if mask is None else {"padding_mask": mask})
        kind, sums = "train" if options["training"] else "eval", accumulator_of(declared, x.dtype)
        steps.append(Step(route_case(case), config.router, call, 0, kind, state, named, None, sums))
    for step in steps:
        step.sequence, step.every = [step], steps
    return steps, routed


def state_of(routed: RouteOutput) -> dict[str, Tensor]:
    return {name: getattr(routed.state, name) for name in STATE}
