"""The stages of a layer's case by themselves: each gets the reference's inputs and cotangents.

    one process   gate, route, latent_down, permute, grouped_mlp, unpermute, latent_up,
                  shared_experts
    ranks         the dispatcher's functions in place of permute and unpermute; DeepEP's around them

A stage is judged by its own contract, on these tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.mlp_stages import final_bound
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.ranks import Collective
from conformance.core.tensors import DTYPES
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.dispatch.deepep import DeepEPCombine, DeepEPDispatch
from conformance.families.dispatch.dispatcher import HANDLE, after, free_behind, specified, together
from conformance.families.dispatch.maps import MapCombine, MapDispatch
from conformance.families.experts.cases import GroupedCase
from conformance.families.experts.latent import LatentProjection
from conformance.families.experts.mlp import GroupedMlp
from conformance.families.experts.precision_mlp import with_pairs
from conformance.families.experts.shared import SharedExperts
from conformance.families.layer.cases import LayerCase
from conformance.families.layer.routing import routed_outputs, seen_by_router, state_before, steps_of
from conformance.families.layer.traced import Traced
from conformance.families.permutation.permute import Permute, Unpermute
from conformance.families.router.gating import Gate
from conformance.judge import Expectation
from moe_ref.config import SHARDING
from moe_ref.layer import without_padding

Lists = Mapping[str, Sequence[Any]]  # arguments by name, with an entry per rank
OPTIONS = ("training", "batch_size", "padding_mask", "ranks")


@dataclass(frozen=True)
class SingleStage:
    """One stage: each rank's call, and the contract that judges it."""

    calls: list[Problem]
    contract: Contract[Any] | None  # None: the router, by the layer's own bounds
    case: Any = None

    def right(self, layer: Traced, rank: int, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        if self.contract is None:
            return _right_route(layer, rank, declared)
        if isinstance(self.contract, Collective):
            return self.contract.right(self.case, self.calls, declared)[rank]
        return self.contract.expected(self.case, self.calls[rank], declared)


def single_stage(layer: Traced) -> SingleStage:
    """The stage that the case names."""
    name = layer.case.stage
    makers: dict[str, Callable[[Traced], SingleStage]] = {
        "gate": _gate,
        "route": _route,
        "permute": _permute,
        "unpermute": _unpermute,
        "grouped_mlp": _grouped_mlp,
        "latent_down": _latent,
        "latent_up": _latent,
        "shared_experts": _shared,
    }
    return makers[name](layer) if name in makers else _dispatch(layer, name) if "dispatch" in name else _combine(layer)


def _stage(
    layer: Traced,
    contract: Contract[Any],
    required: Lists,
    settings: Lists,
    wanted: tuple[str, ...],
    cotangents: Mapping[str, str],
    case: Any = None,
) -> SingleStage:
    """The stage with these arguments; settings that are None, False or 0 are not given.

    Args:
        wanted: inputs whose gradients are judged, if given and if the case has any gradient.
        cotangents: the stage's result, whose gradient in the layer an output has.
    """
    calls = []
    for rank in range(len(layer.calls)):
        first = {name: xs[rank] for name, xs in required.items()}
        all_settings = {name: xs[rank] for name, xs in settings.items()}
        present_settings = {name: x for name, x in all_settings.items() if isinstance(x, Tensor) or x}
        wanted_inputs = tuple(name for name in wanted if name in first | present_settings) if layer.case.grads else ()
        backward = {output: layer.gradients[name][rank] for output, name in cotangents.items()} if wanted_inputs else {}
        calls.append(Problem(contract.function, first, present_settings, {}, wanted_inputs, backward))
    return SingleStage(calls, contract, case)


def _same_for_all_ranks(layer: Traced, **settings: Any) -> dict[str, list[Any]]:
    """Settings that all ranks have."""
    return {name: [x] * len(layer.calls) for name, x in settings.items()}


# ---- router


def _gate(layer: Traced) -> SingleStage:
    router_inputs = [seen_by_router(layer.case, call) for call in layer.calls]
    settings = {"bias": layer.given("router_bias")} | _same_for_all_ranks(layer, router_dtype=layer.config.router_dtype)
    required = {"x": router_inputs, "weight": layer.given("router_weight")}
    return _stage(layer, Gate(), required, settings, ("x", "weight", "bias"), {"logits": "logits"})


def _route(layer: Traced) -> SingleStage:
    calls = []
    for rank, call in enumerate(layer.calls):
        required = {"logits": layer.at("logits")[rank], "config": layer.config.router}
        required |= {name: x for name, x in call.required.items() if name == "expert_bias"}
        settings = {name: x for name, x in call.settings.items() if name in OPTIONS}
        settings |= {"ranks": Opaque("ranks")} if layer.case.counts else {}
        wanted = ("logits",) if layer.case.grads else ()
        backward = {"probs": layer.gradients["probs"][rank]} if wanted else {}
        calls.append(Problem("route", required, settings, {}, wanted, backward, script=_script, first=required))
    return SingleStage(calls, None)


def _script(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The router's results by name; padding goes to no expert, as in the layer."""
    state = state_before(implementation, arguments["config"], arguments, arguments["logits"].device)
    settings = {name: arguments[name] for name in OPTIONS if name in arguments}
    result = implementation.call("route", arguments["logits"], arguments["config"], state=state, **settings)
    return routed_outputs(implementation, without_padding(result, arguments.get("padding_mask")))


def _right_route(layer: Traced, rank: int, declared: Mapping[str, Any]) -> dict[str, Expectation]:
    """The expectations of the router's outputs.

    None if rounding could change a choice on any rank.
    """
    steps, _ = steps_of(layer.case, layer.config, layer.calls, declared)
    if any(step.ambiguous for step in steps):
        return {}
    expectations = {name.partition(".")[2]: expectation for name, expectation in steps[rank].expectations(None).items()}
    if layer.case.grads:
        slope, partial = steps[rank].slope(layer.gradients["probs"][rank])
        slope_with_partials = replace(slope, error=slope.error + partial)
        dtype = DTYPES[layer.case.logit_dtype]
        expectations["d_logits"] = final_bound(slope_with_partials, dtype, torch.zeros((), dtype=torch.bool))
    return expectations


# ---- tokens, rows, experts


def _latent(layer: Traced) -> SingleStage:
    down = layer.case.stage == "latent_down"
    x = [call.required["x"] for call in layer.calls] if down else layer.at("combined")
    required = {"x": x, "weight": layer.given(layer.case.stage)}
    backward = {"out": "tokens" if down else "output"}
    case = GroupedCase(function="grouped_linear")
    return _stage(layer, LatentProjection(), required, {}, ("x", "weight"), backward, case)


def _permute(layer: Traced) -> SingleStage:
    required = {"tokens": layer.at("sent"), "routing_map": layer.local_maps}
    settings = {"probs": layer.at("local_probs")} | _same_for_all_ranks(layer, **layer.config.dispatch)
    backward = {"rows": "rows", "probs": "row_probs"}
    return _stage(layer, Permute(), required, settings, ("tokens", "probs"), backward)


def _unpermute(layer: Traced) -> SingleStage:
    shapes = [tuple(x.shape) for x in layer.results["sums"]]
    required: Lists = {"rows": layer.at("expert_rows"), "row_map": [Opaque("row_map")] * len(shapes)}
    stage = _stage(layer, Unpermute(), required, {"restore_shape": shapes}, ("rows",), {"tokens": "sums"})
    calls = []
    for call, chosen in zip(stage.calls, layer.local_maps, strict=True):
        numbers = torch.arange(1, len(chosen) + 1, dtype=torch.float32)[:, None]
        sizes = layer.config.dispatch
        producer = Problem("permute", {"tokens": numbers, "routing_map": chosen}, sizes)
        calls.append(replace(call, producer=producer, produced=moe_ref.permute(numbers, chosen, **sizes)))
    return replace(stage, calls=calls)


def _grouped_mlp(layer: Traced) -> SingleStage:
    required = {
        "rows": layer.at("rows"),
        "tokens_per_expert": [rank_rows.tokens_per_expert for rank_rows in layer.parts],
        "fc1_weight": layer.given("fc1_weight"),
        "fc2_weight": layer.given("fc2_weight"),
    }
    biases = {name: layer.given(name) for name in ("fc1_bias", "fc2_bias")}
    settings = biases | {"probs": layer.at("row_probs")} | _same_for_all_ranks(layer, **layer.config.experts)
    wanted = ("rows", "probs", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")
    stage = _stage(layer, GroupedMlp(), required, settings, wanted, {"out": "expert_rows"})
    states = [{name: x for name, x in call.required.items() if name.startswith("state.")} for call in layer.calls]
    calls = [with_pairs(call, ("out",), linear_states) for call, linear_states in zip(stage.calls, states, strict=True)]
    return replace(stage, calls=calls)


def _shared(layer: Traced) -> SingleStage:
    required = {
        "x": [call.required["x"] for call in layer.calls],
        "fc1_weight": layer.given("shared_fc1_weight"),
        "fc2_weight": layer.given("shared_fc2_weight"),
    }
    settings = {"gate_weight": layer.given("shared_gate_weight")} | _same_for_all_ranks(
        layer, **layer.config.shared_experts
    )
    wanted = ("x", "fc1_weight", "fc2_weight", "gate_weight")
    return _stage(layer, SharedExperts(), required, settings, wanted, {"out": "output"})


# ---- ranks


def _dispatch_case(case: LayerCase, function: str) -> DispatchCase:
    """The ranks, sizes and dtypes of the layer's exchange."""
    held = case.experts * case.shards // case.world
    sizes: dict[str, Any] = {"counts": case.counts, "local_experts": held, "topk": case.experts}
    sizes |= {"shards": case.shards} if case.dispatcher in SHARDING else {}
    return DispatchCase(function=function, dtype=case.dtype, probs=case.logit_dtype, **sizes)


def _dispatch(layer: Traced, function: str) -> SingleStage:
    case, wanted = _dispatch_case(layer.case, function), ("tokens", "probs")
    tokens = {"tokens": layer.at("tokens")}
    if layer.case.dispatcher == "deepep":
        required = tokens | {"indices": [slot.indices for slot in layer.slots]}
        settings = {"probs": layer.at("slot_probs")} | _same_for_all_ranks(
            layer, num_experts=layer.copies[0].probs.shape[1]
        )
        backward = {"rows": "sent", "probs": "sent_probs"}
        return _stage(layer, DeepEPDispatch(), required, settings, wanted, backward, case)
    required = tokens | {"routing_map": [out.routing_map for out in layer.copies]}
    backward = {"rows": "rows", "probs": "row_probs"}
    probs = layer.at("flat_probs" if "flat_probs" in layer.results else "probs")
    settings = {"probs": probs} | _same_for_all_ranks(layer, **layer.config.dispatch)
    return _stage(layer, MapDispatch(function), required, settings, wanted, backward, case)


def _combine(layer: Traced) -> SingleStage:
    """The combine, after the implementation's own dispatch."""
    dispatch_stage = _dispatch(layer, layer.case.stage.replace("combine", "dispatch"))
    calls = [replace(call, wanted=(), cotangents={}) for call in dispatch_stage.calls]
    dispatched, case = together(calls), _dispatch_case(layer.case, layer.case.stage)
    deepep = layer.case.dispatcher == "deepep"
    contract = DeepEPCombine() if deepep else MapCombine(layer.case.stage)
    required: Lists = {"rows": layer.at("sums" if deepep else "expert_rows"), "handle": [HANDLE] * len(calls)}
    settings = _same_for_all_ranks(layer, **layer.config.combine)
    combine_stage = _stage(layer, contract, required, settings, ("rows",), {"tokens": "combined"}, case)
    rows = [free_behind("rows", out.rows, specified(case, out)) for out in dispatched]
    fields = ("required", "settings", "wanted", "cotangents")
    call_fields = [{name: getattr(c, name) for name in fields} for c in combine_stage.calls]
    return replace(combine_stage, calls=after(contract.function, calls, dispatched, rows, call_fields))
