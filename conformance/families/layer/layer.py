"""moe_layer: the output, the routing, the losses, the state, and every gradient.

The map is judged exactly, all that follows by a bound that composes the stages' bounds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import final_bound
from conformance.core.contract import Opaque, Problem
from conformance.core.ranks import RankContext, Ranked
from conformance.core.signature import Input, Output, Signature
from conformance.families.experts.precision_mlp import pairs_from
from conformance.families.layer.cases import (
    LayerCase,
    config_of_layer,
    cotangent_of,
    expert_bias_of,
    factors_of,
    linear_states_of,
    noise_of,
    padding_of,
    parameters_of,
    shares,
    tokens_of,
)
from conformance.families.layer.rank import Rank
from conformance.families.layer.routing import routed_outputs, state_before, state_of, steps_of
from conformance.families.layer.single_stages import single_stage
from conformance.families.layer.stages import Layer
from conformance.families.layer.traced import Traced
from conformance.families.router.route_ranks import summed
from conformance.interface import named_outputs
from conformance.judge import Bounded, Exact, Expectation
from moe_ref.config import (
    DISPATCHERS,
    LayerConfig,
    LayerParameters,
    LinearAmax,
    LinearState,
    RankGroup,
    RouterRanks,
    split_experts,
)

SEEN = 2.0**20  # an amax of an earlier call, larger than any amax of a case
COLLECTIVES = ("moe_layer", *(f"{name}_{step}" for name in DISPATCHERS for step in ("dispatch", "combine")))
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
    settings=("training", "batch_size", "group", "rerun"),
    required=("parameters", "state"),
)


class MoeLayer(Ranked[LayerCase]):
    """`moe_layer` in one process, or on several ranks that share the experts."""

    function = "moe_layer"
    case_type = LayerCase
    signature = SIGNATURE
    primary = "output"
    companions = ("new_state", "state_tensors", "state_from")
    has_stages = True

    def ranks(self, case: LayerCase) -> int:
        return len(case.counts)

    def stages(self, case: LayerCase) -> dict[str, LayerCase]:
        plain_case = replace(case, law="", layout="contiguous", layout_of="")
        plain_case = replace(plain_case, rerun=False, budget=0, roomless=False) if case.rerun else plain_case
        return {} if case.golden or case.illegal else {name: replace(plain_case, stage=name) for name in case.stages}

    def connected(self, call: Problem, context: RankContext) -> Problem:
        if call.function == "route":
            all_ranks = tuple(range(context.ranks))
            ranks = RouterRanks(tp_dp_cp=RankGroup(context.ranks, summed(all_ranks, context)))
            return replace(call, settings=call.settings | {"ranks": ranks})
        if call.function not in COLLECTIVES:
            return call
        group = {"group": context.group}
        producer = call.producer and replace(call.producer, settings=call.producer.settings | group)
        return replace(call, settings=call.settings | group, producer=producer)

    def legal(self, case: LayerCase) -> Problem:
        return self.calls(case)[0]

    def calls(self, case: LayerCase) -> list[Problem]:
        if case.stage:
            return single_stage(self.traced(case)).calls
        parameters, config, expert_bias = parameters_of(case), config_of_layer(case), expert_bias_of(case)
        wanted = self.signature.wanted(case)
        settings: dict[str, Any] = {"training": False} if case.evaluation else {}
        settings |= {"batch_size": case.sequences} if case.sequences > 1 else {}
        settings |= {"group": Opaque("group")} if case.counts else {}
        settings |= {"rerun": True} if case.rerun else {}
        settings |= {name: Opaque(name) for name in case.scales}  # made by the script
        cotangents = shares(case, cotangent_of(case)) if self.signature.cotangents(case) else []
        calls, split = [], split_experts(LayerParameters(**parameters), case.world, config)
        for rank, x in enumerate(shares(case, tokens_of(case, parameters, expert_bias))):
            rank_tensors = {name: getattr(split[rank], name).contiguous().clone() for name in parameters}
            rank_tensors |= {name: x.chunk(case.world)[rank].clone() for name, x in linear_states_of(case).items()}
            required = {"x": x, **rank_tensors} | ({"expert_bias": expert_bias.clone()} if case.bias else {})
            call_settings = settings | ({"padding_mask": shares(case, padding_of(case))[rank]} if case.padding else {})
            call_settings |= {"noise": shares(case, noise_of(case))[rank]} if case.jitter else {}
            calls.append(
                layer_call(required, config, call_settings, wanted, {"output": cotangents[rank]} if wanted else {})
            )
        return [replace(call, layouts={case.layout_of: case.layout}) for call in calls]

    def traced(self, case: LayerCase) -> Traced:
        """The reference's stages."""
        return Traced(case, self.calls(replace(case, stage="")))

    def expected(self, case: LayerCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.judged(case, self.calls(case) if case.counts else [problem], 0, declared)

    def right_at(
        self, rank: int, case: LayerCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        return self.judged(case, calls, rank, declared)

    def right(self, case: LayerCase, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        return [self.judged(case, calls, rank, declared) for rank in range(len(calls))]

    def judged(
        self, case: LayerCase, calls: list[Problem], rank: int, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        """The expectations of one rank.

        There are none if rounding could change a choice on any rank.
        """
        if case.stage:
            layer = self.traced(case)
            return single_stage(layer).right(layer, rank, declared)
        config: LayerConfig = calls[0].required["config"]
        if case.rerun:
            config = replace(config, num_rows=None)
        steps, routed = steps_of(case, config, calls, declared)
        if any(step.ambiguous for step in steps):
            return {}
        factors = factors_of(case, calls[rank].settings.get("noise", torch.zeros_like(calls[rank].required["x"])))
        rank_layer = Rank(Layer(calls, steps, config, declared), rank, factors)
        no, dtype = torch.zeros((), dtype=torch.bool), calls[0].required["x"].dtype
        expectations: dict[str, Expectation] = {"output": final_bound(rank_layer.output, dtype, no)}
        expectations |= {
            name.partition(".")[2]: expectation for name, expectation in steps[rank].expectations(None).items()
        }
        for name, x in state_of(routed[rank]).items():
            expectations[f"state.{name}"] = Exact(x, "values" if x.is_floating_point() else "integers")
        if config.recipe is not None and config.recipe.scaling == "delayed" and not case.counts:
            expectations |= raised(rank_layer.layer.amaxes("x" in calls[rank].wanted))
        for name in calls[rank].wanted:
            expectations[f"d_{name}"] = final_bound(rank_layer.gradients[name](), calls[rank].required[name].dtype, no)
        return expectations

    def drops(self, case: LayerCase, calls: list[Problem], declared: Mapping[str, Any]) -> bool:
        """Whether the budget is too small for a row of some rank."""
        config: LayerConfig = calls[0].required["config"]
        steps, _ = steps_of(case, config, calls, declared)
        routing, unlimited_routing = (
            Layer(calls, steps, config_of_room, declared).routing
            for config_of_room in (config, replace(config, num_rows=None))
        )
        return not torch.equal(routing, unlimited_routing)


def raised(amaxes: dict[str, Bounded]) -> dict[str, Bounded]:
    """The expected amaxes, given the earlier ones of `seen_before`."""
    earlier = {name: SEEN * (torch.arange(len(x.value)) % 2) for name, x in amaxes.items()}
    return {
        name: replace(x, value=x.value.maximum(earlier[name]), bound=torch.where(earlier[name] > 0, 0, x.bound))
        for name, x in amaxes.items()
    }


def layer_call(
    required: dict[str, Tensor],
    config: LayerConfig,
    settings: dict[str, Any],
    wanted: tuple[str, ...] = (),
    cotangents: dict[str, Tensor] | None = None,
) -> Problem:
    """The call of one rank: a script makes the records of its tensors."""
    parameters = {name: x for name, x in required.items() if name in LayerParameters._fields}
    first = {"x": required["x"], "parameters": LayerParameters(**parameters), "config": config}
    return Problem(
        "moe_layer", required | {"config": config}, settings, {}, wanted, cotangents or {}, script=script, first=first
    )


def script(implementation: Any, arguments: dict[str, Any], **extra_settings: Any) -> dict[str, Any]:
    """The layer's results by name; `extra_settings` change none of them."""
    config: LayerConfig = arguments["config"]
    state = state_before(implementation, config.router, arguments, arguments["x"].device)
    parameters = LayerParameters(**{name: arguments[name] for name in LayerParameters._fields if name in arguments})
    settings = {name: arguments[name] for name in (*SIGNATURE.settings, "padding_mask", "noise") if name in arguments}
    scales: Any = pairs_from(arguments).get("state")
    amaxes = tuple(map(seen_before, scales)) if "amaxes" in arguments else None
    settings |= {} if scales is None else {"linear_states": scales}
    settings |= {} if amaxes is None else {"amaxes": amaxes}
    result = implementation.call(
        "moe_layer", arguments["x"], parameters, config, state=state, **settings, **extra_settings
    )
    outputs = named_outputs(result, ("output", "routed"))
    layer_amaxes = enumerate(amaxes or ())
    amax_outputs = {
        f"amaxes.{layer}.{role}": x
        for layer, amaxes_of_layer in layer_amaxes
        for role, x in amaxes_of_layer._asdict().items()
    }
    return {"output": outputs["output"], **routed_outputs(implementation, outputs["routed"]), **amax_outputs}


def seen_before(state: LinearState) -> LinearAmax:
    """The amaxes of an earlier call: larger than this call's for every second expert, else 0.

    The call raises them, and so does its backward pass.
    """
    return LinearAmax(
        *(SEEN * (torch.arange(len(role_state.scale), device=role_state.scale.device) % 2) for role_state in state)
    )
