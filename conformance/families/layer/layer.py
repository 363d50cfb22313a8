"""moe_layer: the output, the routing, the losses, the state, and every gradient.

The map is judged exactly, all that follows by a bound that composes the stages' bounds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.mlp_stages import final_bound
from conformance.core.contract import Opaque, Problem, accumulator_of
from conformance.core.ranks import RankContext, Ranked
from conformance.core.signature import Input, Output, Signature
from conformance.families.layer.cases import (
    LayerCase,
    config_of_layer,
    cotangent_of,
    expert_bias_of,
    factors_of,
    local,
    logits_of_rows,
    noise_of,
    padding_of,
    parameters_of,
    route_case,
    shares,
    tokens_of,
)
from conformance.families.layer.rank import Rank
from conformance.families.layer.stages import Layer
from conformance.families.router.cases_route import LOSSES
from conformance.families.router.route_step import Step
from conformance.interface import named_outputs
from conformance.judge import Exact, Expectation
from moe_ref.config import OF_EXPERTS, LayerConfig, LayerParameters, RouteOutput
from moe_ref.layer import route_together

STATE = ("expert_bias", "tokens_per_expert", "global_tokens_per_expert", "global_steps")  # compared
SIGNATURE = Signature(
    inputs=[
        Input("x", "TH", gradient=True),
        Input("router_weight", "EH", gradient=True, part_of="parameters"),
        Input("router_bias", "E", optional="router_bias", gradient=True, part_of="parameters"),
        Input("fc1_weight", "EGN", gradient=True, part_of="parameters"),
        Input("fc2_weight", "ENF", gradient=True, part_of="parameters"),
        Input("fc1_bias", "EG", optional="fc1_bias", gradient=True, part_of="parameters"),
        Input("fc2_bias", "EN", optional="fc2_bias", gradient=True, part_of="parameters"),
        Input("latent_down", "NH", optional="latent", gradient=True, part_of="parameters"),
        Input("latent_up", "HN", optional="latent", gradient=True, part_of="parameters"),
        Input("shared_fc1_weight", "SH", optional="shared", gradient=True, part_of="parameters"),
        Input("shared_fc2_weight", "HS", optional="shared", gradient=True, part_of="parameters"),
        Input("shared_gate_weight", "OH", optional="gate", gradient=True, part_of="parameters"),
        Input("expert_bias", "E", ("float32",), field="", optional="bias", part_of="state"),
        Input("padding_mask", "T", ("bool",), field="", optional="padding"),
        Input("noise", "TH", optional="jitter"),
    ],
    outputs=[Output("output", "TH", of="x"), *(Output(name) for name in ("probs", "routing_map", "losses", "state"))],
    settings=("training", "batch_size", "group"),
    required=("parameters", "state"),
)


class MoeLayer(Ranked[LayerCase]):
    """`moe_layer` in one process, or on several ranks that share the experts."""

    function = "moe_layer"
    case_type = LayerCase
    signature = SIGNATURE
    primary = "output"
    companions = ("new_state", "state_tensors", "state_from")

    def ranks(self, case: LayerCase) -> int:
        return len(case.counts)

    def connected(self, call: Problem, place: RankContext) -> Problem:
        return replace(call, settings=call.settings | {"group": place.group})

    def legal(self, case: LayerCase) -> Problem:
        return self.calls(case)[0]

    def calls(self, case: LayerCase) -> list[Problem]:
        parameters, config, expert_bias = parameters_of(case), config_of_layer(case), expert_bias_of(case)
        wanted = self.signature.wanted(case)
        settings: dict[str, Any] = {"training": False} if case.evaluation else {}
        settings |= {"batch_size": case.sequences} if case.sequences > 1 else {}
        settings |= {"group": Opaque("group")} if case.counts else {}
        cotangents = shares(case, cotangent_of(case)) if self.signature.cotangents(case) else []
        calls = []
        for rank, x in enumerate(shares(case, tokens_of(case, parameters, expert_bias))):
            own = {
                name: local(y, rank, case.world) if name in OF_EXPERTS else y.clone() for name, y in parameters.items()
            }
            required = {"x": x, **own} | ({"expert_bias": expert_bias.clone()} if case.bias else {})
            given = settings | ({"padding_mask": shares(case, padding_of(case))[rank]} if case.padding else {})
            given |= {"noise": shares(case, noise_of(case))[rank]} if case.jitter else {}
            calls.append(layer_call(required, config, given, wanted, {"output": cotangents[rank]} if wanted else {}))
        return [replace(call, layouts={case.layout_of: case.layout}) for call in calls]

    def expected(self, case: LayerCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.judged(case, [problem] if not case.counts else self.calls(case), 0, declared)

    def right_at(
        self, rank: int, case: LayerCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        return self.judged(case, calls, rank, declared)

    def right(self, case: LayerCase, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        return [self.judged(case, calls, rank, declared) for rank in range(len(calls))]

    def judged(
        self, case: LayerCase, calls: list[Problem], rank: int, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        """One rank's expectations; none if rounding could change a choice on any rank."""
        config: LayerConfig = calls[0].required["config"]
        steps, routed = steps_of(case, config, calls, declared)
        if any(step.ambiguous for step in steps):
            return {}
        factors = factors_of(case, calls[rank].settings.get("noise", torch.zeros_like(calls[rank].required["x"])))
        own = Rank(Layer(calls, steps, config, declared), rank, factors)
        no, dtype = torch.zeros((), dtype=torch.bool), calls[0].required["x"].dtype
        right: dict[str, Expectation] = {"output": final_bound(own.output, dtype, no)}
        right |= {name.partition(".")[2]: one for name, one in steps[rank].expectations(None).items()}
        for name, x in state_of(routed[rank]).items():
            right[f"state.{name}"] = Exact(x, "values" if x.is_floating_point() else "integers")
        for name in calls[rank].wanted:
            right[f"d_{name}"] = final_bound(own.gradients[name](), calls[rank].required[name].dtype, no)
        return right


def layer_call(
    required: dict[str, Tensor],
    config: LayerConfig,
    settings: dict[str, Any],
    wanted: tuple[str, ...] = (),
    cotangents: dict[str, Tensor] | None = None,
) -> Problem:
    """The call of one rank: a script makes the records of its tensors."""
    given = {name: x for name, x in required.items() if name in LayerParameters._fields}
    first = {"x": required["x"], "parameters": LayerParameters(**given), "config": config}
    return Problem(
        "moe_layer", required | {"config": config}, settings, {}, wanted, cotangents or {}, script=script, first=first
    )


def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The layer's results by name."""
    config: LayerConfig = given["config"]
    state = implementation.call("new_state", config.router, device=given["x"].device)
    if "expert_bias" in given:
        tensors = implementation.call("state_tensors", state)
        state = implementation.call("state_from", tensors | {"expert_bias": given["expert_bias"].clone()})
    parameters = LayerParameters(**{name: given[name] for name in LayerParameters._fields if name in given})
    settings = {name: given[name] for name in (*SIGNATURE.settings, "padding_mask", "noise") if name in given}
    result = implementation.call("moe_layer", given["x"], parameters, config, state=state, **settings)
    found = named_outputs(result, ("output", "routed"))
    routed = named_outputs(found["routed"], ("probs", "routing_map", "losses", "state"))
    losses = {name: getattr(routed["losses"], name, None) for name in LOSSES}
    tensors = implementation.call("state_tensors", routed["state"])
    return {
        "output": found["output"],
        "probs": routed["probs"],
        "routing_map": routed["routing_map"],
        "losses": torch.tensor([loss is not None for loss in losses.values()]),
        **{name: loss for name, loss in losses.items() if loss is not None},
        **{f"state.{name}": tensors[name].clone() for name in STATE if name in tensors},
    }


def steps_of(
    case: LayerCase, config: LayerConfig, calls: list[Problem], declared: Mapping[str, Any]
) -> tuple[list[Step], list[RouteOutput]]:
    """Each rank's routing of its exact logits, with bounds, and the reference's in float64."""
    given = [call.required for call in calls]
    dtype = torch.float32 if config.router_dtype == "fp32" else given[0]["x"].dtype
    seen = [
        call.required["x"] * factors_of(case, call.settings["noise"]) if case.jitter else call.required["x"]
        for call in calls
    ]
    logits = [
        logits_of_rows(x, own["router_weight"], own.get("router_bias"), dtype)
        for x, own in zip(seen, given, strict=True)
    ]
    states = [moe_ref.new_state(config.router) for _ in given]
    states = [
        s._replace(expert_bias=own.get("expert_bias", s.expert_bias)) for s, own in zip(states, given, strict=True)
    ]
    training = calls[0].settings.get("training", True)
    masks = [call.settings.get("padding_mask") for call in calls]
    options = {"training": training, "batch_size": case.sequences}
    options |= {} if masks[0] is None else {"padding_mask": masks}
    with torch.enable_grad():
        routed = route_together([x.double() for x in logits], config, states, **options)
    steps = []
    for x, state, out, mask in zip(logits, states, routed, masks, strict=True):
        named = {f"0.{name}": loss for name, loss in out.losses._asdict().items() if loss is not None}
        named |= {"0.probs": out.probs, "0.routing_map": out.routing_map}
        named["0.losses"] = torch.tensor([getattr(out.losses, name) is not None for name in LOSSES])
        one = Problem("route", {"logits.0": x}, {} if mask is None else {"padding_mask": mask})
        kind, sums = "train" if training else "eval", accumulator_of(declared, dtype)
        steps.append(Step(route_case(case), config.router, one, 0, kind, state, named, None, sums))
    for step in steps:
        step.sequence, step.every = [step], steps
    return steps, routed


def state_of(routed: RouteOutput) -> dict[str, Tensor]:
    return {name: getattr(routed.state, name) for name in STATE}
