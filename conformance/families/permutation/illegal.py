"""Illegal calls of permutation."""

from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Problem
from conformance.core.illegal import (
    Rule,
    bare,
    flat,
    index_too_large_for_a_slot,
    on_device,
    one_more,
    only_setting,
    setting,
)


def _restore_one_more(problem: Problem) -> Problem:
    tokens, hidden = problem.produced.row_map.num_tokens, problem.required["rows"].shape[1]
    return replace(
        bare(problem), settings=problem.settings | {"restore_shape": (tokens + 1, hidden)}, blame="restore_shape"
    )


def _wrong_probs(problem: Problem) -> Problem:
    shape = problem.required["routing_map"].shape
    return replace(
        bare(problem), settings=problem.settings | {"probs": torch.ones(shape[0] + 1, shape[1])}, blame="probs"
    )


def _sizes_too_large(problem: Problem) -> Problem:
    return replace(
        bare(problem).with_tensors(
            {"chunk_sizes": problem.required["chunk_sizes"] + 1 + len(problem.required["rows"])}
        ),
        blame="chunk_sizes",
    )


def _index_too_large_with_gradient(problem: Problem) -> Problem:
    """The gradient of a slot that may be read as empty is then 0, and that of no other expert."""
    illegal_call, probs = index_too_large_for_a_slot(problem), problem.required["probs"]
    assert illegal_call.same_as is not None
    shape = (len(probs), problem.settings["num_experts"])
    learns: dict[str, Any] = {"wanted": ("probs",), "cotangents": {"probs": torch.ones(shape, dtype=probs.dtype)}}
    return replace(illegal_call, same_as=replace(illegal_call.same_as, **learns), **learns)


PERMUTE: dict[str, Rule] = {
    "num_rows_negative": only_setting("num_rows", -1),
    "align_zero": only_setting("align", 0),
    "capacity_negative": only_setting("capacity", -4),
    "map_longer_than_tokens": one_more("routing_map"),
    "map_flat": flat("routing_map"),
    "probs_longer_than_map": _wrong_probs,
}


UNPERMUTE: dict[str, Rule] = {"rows_too_many": one_more("rows"), "restore_shape_wrong": _restore_one_more}
SORT_CHUNKS: dict[str, Rule] = {
    "order_longer_than_sizes": one_more("order"),
    "sizes_beyond_rows": on_device(_sizes_too_large),
}
PAD_ROUTING_MAP: dict[str, Rule] = {"align_zero": setting("align", 0), "align_negative": setting("align", -16)}
INDICES_TO_MULTIHOT: dict[str, Rule] = {
    "no_experts": setting("num_experts", 0),
    "probs_longer_than_indices": one_more("probs"),
    "index_too_large": index_too_large_for_a_slot,
    "index_too_large_with_gradient": _index_too_large_with_gradient,
}
MULTIHOT_TO_INDICES: dict[str, Rule] = {"no_slots": setting("topk", 0), "probs_longer_than_map": one_more("probs")}
