"""Illegal calls of dispatchers, the same on every rank."""

from dataclasses import replace

import torch

from conformance.core.contract import Problem
from conformance.core.illegal import (
    Rule,
    bare,
    flat,
    index_too_large,
    index_too_large_for_a_slot,
    one_more,
    setting,
    together,
)
from moe_ref.config import IndexPolicy, Recipe
from moe_ref.permutation.rows import PADDING


def _probs_too_long(problem: Problem) -> Problem:
    slots = problem.required.get("routing_map", problem.required.get("indices"))
    assert slots is not None
    return replace(
        bare(problem),
        settings=problem.settings | {"probs": torch.ones(len(slots) + 1, slots.shape[1])},
        blame="probs",
    )


def _expert_twice(problem: Problem) -> Problem:
    """Every slot is repeated, under the default policy, which forbids it."""
    indices = problem.required["indices"]
    return replace(bare(problem).with_tensors({"indices": torch.cat([indices, indices], 1)}), blame="indices")


def _slot_empty(problem: Problem) -> Problem:
    """An empty slot, which the policy forbids."""
    empty = bare(problem).with_tensors({"indices": torch.full_like(problem.required["indices"], PADDING)})
    return replace(empty, settings=empty.settings | {"policy": IndexPolicy(empty="reject")}, blame="indices")


def _no_room_for_all(problem: Problem) -> Problem:
    """All tokens go to the first expert.

    Its rank has room for the tokens of one rank, but not for those of all ranks.
    """
    first = bare(problem).with_tensors({"indices": torch.zeros_like(problem.required["indices"])[:, :1]})
    ranks = problem.settings["num_experts"]  # of one expert each; the first has one token more than the last
    return replace(first, settings=first.settings | {"num_worst_tokens": ranks}, blame="num_worst_tokens")


_DISPATCH: dict[str, Rule] = {"tokens_flat": flat("tokens")}


def _slots_too_few(problem: Problem) -> Problem:
    """The last slot, which the dispatch was given, is missing."""
    fewer = {name: problem.tensors[name][:, :-1] for name in ("indices", "probs")}
    return replace(bare(problem).with_tensors(fewer), blame="indices")


_MAPS: dict[str, Rule] = _DISPATCH | {"map_too_long": one_more("routing_map"), "probs_too_long": _probs_too_long}
_SHARDS: dict[str, Rule] = {
    "shards_zero": setting("expert_tensor_parallel", 0),
    "shards_no_divisor": setting("expert_tensor_parallel", 3),
}
_INDICES: dict[str, Rule] = _DISPATCH | {
    "indices_too_long": one_more("indices"),
    "index_too_large": index_too_large,
    "no_experts": setting("num_experts", 0),
    "expert_twice": _expert_twice,
    "slot_empty": _slot_empty,
}
_COMBINE: dict[str, Rule] = {"rows_too_many": one_more("rows")}
_OTHER_TOKENS: dict[str, Rule] = {"tokens_too_many": one_more("tokens")}

DEEPEP_LAYOUT: dict[str, Rule] = {
    "no_experts": setting("num_experts", 0),
    "experts_no_multiple": together("num_experts", num_experts=3, ranks=2),
    "index_too_large": index_too_large_for_a_slot,
}
_BUDGET: dict[str, Rule] = {"num_rows_negative": setting("num_rows", -1)}
FLATTEN_EXPERTS: dict[str, Rule] = {
    "x_flat": flat("x"),
    "groups_zero": setting("expert_parallel", 0),
    "groups_no_divisor": setting("expert_parallel", 3),
    "shards_zero": setting("expert_tensor_parallel", 0),
}
ALLGATHER_DISPATCH: dict[str, Rule] = _MAPS | _SHARDS | _BUDGET
ALLGATHER_COMBINE: dict[str, Rule] = _COMBINE
ALLTOALL_DISPATCH: dict[str, Rule] = (
    _MAPS
    | _SHARDS
    | _BUDGET
    | {
        "capacity_zero": setting("capacity", 0),
        "capacity_negative": setting("capacity", -1),
        "num_rows_and_a_capacity": together("num_rows", num_rows=2, capacity=2),
    }
)
ALLTOALL_COMBINE: dict[str, Rule] = _COMBINE
_PROGRAMS: dict[str, Rule] = {"no_multiprocessor": setting("num_sms", 0), "blocks_negative": setting("num_blocks", -1)}
HYBRIDEP_DISPATCH: dict[str, Rule] = _MAPS | {
    "align_zero": setting("align", 0),
    **_BUDGET,
    **_PROGRAMS,
    "num_rows_no_multiple": lambda problem: replace(
        bare(problem), settings=problem.settings | {"align": 4, "num_rows": 6}, blame="num_rows"
    ),
    "recipe_of_whole_tensors": setting("recipe", Recipe("current")),
    "recipe_of_other_blocks": setting("recipe", Recipe("mxfp8")),
    "recipe_in_words": setting("recipe", "block"),
}
HYBRIDEP_COMBINE: dict[str, Rule] = _COMBINE | _PROGRAMS | {"probs_flat": setting("probs", torch.ones(1, 1))}
HYBRIDEP_CACHED_DISPATCH: dict[str, Rule] = _OTHER_TOKENS
DEEPEP_DISPATCH: dict[str, Rule] = _INDICES | {
    "probs_too_long": _probs_too_long,
    "scales_too_few": setting("scales", torch.ones(0, 1)),
    "alignment_zero": setting("expert_alignment", 0),
    "worst_tokens_negative": setting("num_worst_tokens", -1),
    "worst_tokens_of_one_rank": _no_room_for_all,
}
DEEPEP_COMBINE: dict[str, Rule] = _COMBINE
DEEPEP_CACHED_DISPATCH: dict[str, Rule] = _OTHER_TOKENS
DEEPEP_LOW_LATENCY_DISPATCH: dict[str, Rule] = _INDICES | {
    "slab_of_nothing": setting("max_tokens_per_rank", 0),
    "powers_without_fp8": setting("round_scale", True),
    "fp8_of_half_a_block": setting("use_fp8", True),
}
DEEPEP_LOW_LATENCY_COMBINE: dict[str, Rule] = {"probs_too_long": one_more("probs"), "slots_too_few": _slots_too_few}
