"""Illegal calls of parameters."""

from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Problem
from conformance.core.illegal import Rule, bare, flat, one_more, setting


def _on_state(change: Any, blame: str = "state") -> Rule:
    """The call on another state: `change` of the first argument of the legal call."""

    def break_it(problem: Problem) -> Problem:
        function, settings = problem.function, dict(problem.settings)
        legal = next(iter(problem.first.values()))

        def script(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
            shard_argument = [arguments.get("shard")] if function == "expand_shard" else []
            result = implementation.call(function, change(legal), *shard_argument, **settings)
            return {"keys": torch.tensor([len(result)])}

        return replace(bare(problem), script=script, blame=blame)

    return break_it


def _without(key: str) -> Any:
    return lambda state: {name: x for name, x in state.items() if name != key}


def _both_layouts(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"local_experts.0.linear_fc1.weight": torch.zeros(2, 4)}


def _without_expert(expert: int) -> Rule:
    """fc1's weights of three experts, but not this one's."""
    return _on_state(lambda _: {f"linear_fc1.weight{e}": torch.zeros(2, 4) for e in range(3) if e != expert})


def _narrow(state: dict[str, Any]) -> dict[str, Any]:
    key = next(reversed(state))
    return state | {key: state[key] | {"scale_fwd": state[key]["scale_fwd"][1:]}}


_SHARED: dict[str, Rule] = {"no_experts": setting("num_experts", 0), "rows_not_shared": setting("num_experts", 5)}
NORMALIZE_PARAMETERS: dict[str, Rule] = _SHARED | {
    "a_member_missing": _on_state(lambda state: {"weight": [torch.zeros(2)] * 2}),
    "a_number_as_a_weight": _on_state(lambda state: {"weight": torch.zeros(())}),
}
NORMALIZE_MASTER_PARAMETERS: dict[str, Rule] = dict(_SHARED)
CONVERT_EXPERTS: dict[str, Rule] = _SHARED | {
    "unknown_layout": setting("layout", "flat"),
    "in_both_layouts": _on_state(_both_layouts),
    "first_expert_missing": _without_expert(0),
    "last_expert_missing": _without_expert(2),
}
SHARD_PARAMETERS: dict[str, Rule] = {
    "experts_not_divided": setting("ranks", 2),
    "rank_out_of_range": setting("rank", 1),
    "tensor_rank_out_of_range": setting("tensor_rank", 1),
    "rank_negative": setting("rank", -1),
    "unknown_parameter": _on_state(lambda state: state | {"linear_fc3.weight": torch.zeros(3, 2, 2)}, "parameters"),
    "half_a_row_too_many": lambda problem: setting("gated", True)(one_more("fc1_weight", 1)(problem)),
}
EXPAND_SHARD: dict[str, Rule] = {
    "offset_negative": setting("offset", -1),
    "beyond_the_members": setting("offset", 6),
    "shard_not_flat": lambda problem: replace(
        bare(problem).with_tensors({"shard": torch.zeros(1, 1, dtype=problem.required["shard"].dtype)}), blame="shard"
    ),
}
SPLIT_EXTRA_STATE: dict[str, Rule] = {
    "no_experts": setting("num_experts", 0),
    "other_number_of_experts": setting("num_experts", 3),
    "a_column_missing": _on_state(_narrow),
}
MERGE_EXTRA_STATE: dict[str, Rule] = {
    "no_experts": setting("num_experts", 0),
    "a_column_missing": _on_state(_narrow),
}
UPCYCLE: dict[str, Rule] = {
    "granularity_does_not_divide": setting("granularity", 3),
    "granularity_zero": setting("granularity", 0),
    "no_slots": setting("topk", 0),
    "more_slots_than_experts": setting("topk", 5),
    "unknown_kind": setting("kind", "softmax"),
    "a_row_too_many": one_more("fc1_weight"),
    "router_flat": flat("router_weight"),
}
