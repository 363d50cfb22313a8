"""Which cases of parameters run: small ones, because nothing is computed."""

from dataclasses import replace
from functools import partial
from typing import Any

from conformance.core.scope import Scope
from conformance.core.shapes import Shapes

SHARE = 0.4  # the share of a run: a case takes a millisecond, because nothing is computed

# more than ten experts, whose keys have another order when sorted as text
_MANY: dict[str, Any] = {"experts": 12, "rows": 2, "columns": 3}


def _every_state(scope: Scope) -> list[dict[str, Any]]:
    """Each row of the table of early returns; one expert; parameters without elements."""
    storages = ("indexed", "packed", "both", "some", "none", "flat", "members")
    states: list[dict[str, Any]] = [
        {"packed": packed, "weights": word, "biases": word if word != "members" else "flat", "bias": True}
        | {"experts": 3, "rows": 2, "columns": 4, "others": "packed" if packed else "indexed"}
        for packed in (False, True)
        for word in storages
    ]
    single_expert: dict[str, Any] = {"experts": 1, "rows": 3, "columns": 2}
    many = [_MANY | {"packed": packed, "weights": word} for packed, word in ((True, "indexed"), (False, "packed"))]
    # one value of a bias for each expert
    least: dict[str, Any] = {"experts": 3, "rows": 1, "columns": 2, "weights": "flat", "biases": "flat", "bias": True}
    states += [single_expert, single_expert | {"weights": "packed", "packed": False}, *many, least | {"packed": False}]
    return [*states, {"experts": 2, "rows": 0, "weights": "packed"}]


def _every_master(scope: Scope) -> list[dict[str, Any]]:
    """Keys that match several times, and names that are longer than the parameter's."""
    sizes = {"experts": 3, "rows": 2, "columns": 4}
    words = [("indexed", "indexed"), ("indexed", "rest"), ("some", "rest"), ("packed", "packed"), ("packed", "rest")]
    words += [("packed", "indexed"), ("none", "packed"), ("none", "none")]
    many = [_MANY | {"packed": packed, "first": word} for packed, word in ((True, "indexed"), (False, "packed"))]
    return many + [
        sizes | {"packed": packed, "first": first, "second": second, "longer": longer}
        for packed in (False, True)
        for first, second in words
        for longer in ("none", "indexed" if packed else "packed")
    ]


def _every_world(scope: Scope) -> list[dict[str, Any]]:
    """Each rank of a world; halves over three tensor ranks."""
    sizes = {"experts": 2, "rows": 2, "columns": 3, "ranks": 2, "tensor_ranks": 3, "gated": True, "has_bias": True}
    return [sizes | {"place": position, "singleton": bool(position % 2)} for position in range(6)]


def _every_shard(scope: Scope) -> list[dict[str, Any]]:
    """Shards at and between the ends of members, empty ones among them."""
    sizes = (3, 0, 1, 4)
    return [{"sizes": sizes, "begin": begin, "length": length} for begin in range(9) for length in (0, 1, 3, 8)] + [
        {"sizes": (40, 40), "length": 80}
    ]


def _every_extra(scope: Scope) -> list[dict[str, Any]]:
    words = ("whole", "split", "gap", "first", "empty", "empty_first", "listed", "plain")
    states: list[dict[str, Any]] = [
        {"kept": word, "experts": 3, "history": 2, "others": True, "prefixed": True} for word in words
    ]
    states += [{"kept": word, "experts": 3, "history": 2, "no_variables": True} for word in words[:2]]
    return [*states, *({"kept": word, "experts": 12, "history": 2} for word in words[:2])]


_on_host = partial(Shapes, weight=SHARE, kernels=False)
_SIZES = {"experts": 3, "rows": 2, "columns": 4}
NORMALIZE_PARAMETERS = _on_host(covered=_SIZES, always=_every_state, illegal=_SIZES | {"weights": "packed"})
NORMALIZE_MASTER_PARAMETERS = replace(NORMALIZE_PARAMETERS, always=_every_master, illegal=_SIZES | {"first": "packed"})
CONVERT_EXPERTS = _on_host(covered=_SIZES, illegal=_SIZES | {"fc1": "packed", "fc2": "packed"})
SHARD_PARAMETERS = _on_host(covered=_SIZES, always=_every_world, illegal=_SIZES)
EXPAND_SHARD = _on_host(covered={"sizes": (3, 0, 1, 4)}, always=_every_shard, illegal={"sizes": (2, 3)})
SPLIT_EXTRA_STATE = _on_host(
    covered={"experts": 3, "history": 2},
    always=_every_extra,
    illegal={"experts": 2, "kept": "whole"},
)
MERGE_EXTRA_STATE = replace(SPLIT_EXTRA_STATE, illegal={"experts": 2, "kept": "split"})
UPCYCLE = _on_host(
    covered={"width": 3, "hidden": 5},
    illegal={"copies": 2, "granularity": 2, "width": 3, "hidden": 2},
)
