"""Calls that break a rule: each must raise, or be declared unchecked.

A rule's name says what is wrong; `blame` in the problem it makes is the argument at fault.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from conformance.contracts.base import Problem

Rule = Callable[[Problem], Problem]


def _setting(name: str, value: object) -> Rule:
    return lambda problem: replace(_bare(problem), settings=problem.settings | {name: value}, blame=name)


def _bare(problem: Problem) -> Problem:
    """Without gradients, and without settings that exclude each other."""
    return replace(problem, wanted=(), cotangents={}, layouts={})


def _only_setting(name: str, value: object) -> Rule:
    return lambda problem: replace(_bare(problem), settings={name: value}, blame=name)


def _one_more(name: str, dim: int = 0) -> Rule:
    """The input with one entry more than the others go with."""

    def break_it(problem: Problem) -> Problem:
        x = problem.tensors[name]
        extra = torch.zeros([1 if d == dim else n for d, n in enumerate(x.shape)], dtype=x.dtype)
        return replace(_bare(problem).with_tensors({name: torch.cat([x, extra], dim)}), blame=name)

    return break_it


def _flat(name: str) -> Rule:
    return lambda problem: replace(_bare(problem).with_tensors({name: problem.tensors[name].reshape(-1)}), blame=name)


def _restore_one_more(problem: Problem) -> Problem:
    tokens, hidden = problem.settings["restore_shape"]
    return replace(_bare(problem), settings=problem.settings | {"restore_shape": (tokens + 1, hidden)}, blame="restore_shape")


def _wrong_probs(problem: Problem) -> Problem:
    shape = problem.required["routing_map"].shape
    return replace(_bare(problem), settings=problem.settings | {"probs": torch.ones(shape[0] + 1, shape[1])}, blame="probs")


def _sizes_too_large(problem: Problem) -> Problem:
    return replace(_bare(problem).with_tensors({"chunk_sizes": problem.required["chunk_sizes"] + 1 + len(problem.required["rows"])}), blame="chunk_sizes")


def _index_too_large(problem: Problem) -> Problem:
    too_large = torch.full_like(problem.required["indices"], problem.settings["num_experts"])
    return replace(_bare(problem).with_tensors({"indices": too_large}), blame="indices")


RULES: dict[str, dict[str, Rule]] = {
    "permute": {
        "num_rows_negative": _only_setting("num_rows", -1),
        "align_zero": _only_setting("align", 0),
        "capacity_negative": _only_setting("capacity", -4),
        "map_longer_than_tokens": _one_more("routing_map"),
        "map_flat": _flat("routing_map"),
        "probs_longer_than_map": _wrong_probs,
    },
    "unpermute": {"rows_too_many": _one_more("rows"), "restore_shape_wrong": _restore_one_more},
    "sort_chunks": {"order_longer_than_sizes": _one_more("order"), "sizes_beyond_rows": _sizes_too_large},
    "pad_routing_map": {"align_zero": _setting("align", 0), "align_negative": _setting("align", -16)},
    "indices_to_multihot": {"no_experts": _setting("num_experts", 0), "probs_longer_than_indices": _one_more("probs"), "index_too_large": _index_too_large},
    "multihot_to_indices": {"no_slots": _setting("topk", 0), "probs_longer_than_map": _one_more("probs")},
}
