"""Permutation and the routing map: results, and the rules that make a call illegal."""

from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config.rules import (
    MAX_EXPERTS,
    check_count,
    check_optional_count,
    check_probs,
    is_count,
    require,
    require_dtype,
    require_shape,
)


class Permuted(NamedTuple):
    """What `permute` returns."""

    rows: Tensor  # [P,H], the tokens' dtype
    probs: Tensor | None  # [P], the probs' dtype; None when no probs were given
    row_map: Any  # opaque: hand it to this implementation's own `unpermute`
    tokens_per_expert: Tensor  # [E] integers: length of each expert's segment of `rows`, its padding included
    pad_offsets: Tensor | None  # [E] integers: padding rows before each expert's segment; None without `align`
    overflow: Tensor  # [] bool: some routed row did not fit into `num_rows` or `capacity`


class SortedChunks(NamedTuple):
    """What `sort_chunks` returns."""

    rows: Tensor  # [R,H]
    probs: Tensor | None  # [R]


class PaddedMap(NamedTuple):
    """What `pad_routing_map` returns."""

    routing_map: Tensor  # [T,E] bool
    unreached: Tensor  # [E] bool: the count is no multiple of `align`


class Multihot(NamedTuple):
    """What `indices_to_multihot` returns."""

    routing_map: Tensor  # [T,E] bool
    probs: Tensor  # [T,E]


class Indices(NamedTuple):
    """What `multihot_to_indices` returns."""

    indices: Tensor  # [T,K] integers, -1 in empty slots
    probs: Tensor  # [T,K], 0 in empty slots
    overflow: Tensor  # [] bool: some token had more than K experts


def check_map(routing_map: Tensor) -> None:
    """A routing map is [T,E], bool or integers (values are not checked), of 1 to MAX_EXPERTS
    experts.
    """
    require_shape(routing_map.dim() == 2, "routing_map", routing_map, "[tokens, experts]")
    kind = not (routing_map.is_floating_point() or routing_map.is_complex())
    require_dtype(kind, "routing_map", routing_map, "bool or integer")
    experts = routing_map.shape[1]
    require_shape(1 <= experts <= MAX_EXPERTS, "routing_map", routing_map, f"of 1 to {MAX_EXPERTS} experts")


def check_align(align: int | None) -> None:
    """`align` is None or a positive integer."""
    check_optional_count("align", align)


def check_permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    align: int | None,
    capacity: int | None,
    num_rows: int | None,
) -> None:
    """The rules of `permute`."""
    require_shape(tokens.dim() == 2, "tokens", tokens, "[tokens, hidden]")
    check_map(routing_map)
    requirement = f"[{tokens.shape[0]}, experts], a row per token"
    require_shape(routing_map.shape[0] == tokens.shape[0], "routing_map", routing_map, requirement)
    requirement = f"on {tokens.device}, where tokens is"
    require(routing_map.device == tokens.device, "routing_map", f"on {routing_map.device}", requirement)
    if probs is not None:
        check_probs(probs, tuple(routing_map.shape), tokens)
    check_align(align)
    check_optional_count("capacity", capacity)
    requirement = "used without align: choose a capacity that is a multiple of it"
    require(capacity is None or align is None, "capacity", f"{capacity} with align {align}", requirement)
    requirement = "None: a capacity fixes the rows at experts × capacity"
    require(capacity is None or num_rows is None, "num_rows", f"{num_rows} with capacity {capacity}", requirement)
    require(num_rows is None or (is_count(num_rows) and num_rows >= 0), "num_rows", num_rows, "None or an integer ≥ 0")
    divides = num_rows is None or align is None or num_rows % align == 0
    require(divides, "num_rows", num_rows, f"a multiple of align {align}, so that every segment is")


def check_unpermute(
    rows: Tensor, row_map_rows: int, row_map_tokens: int, row_map_experts: int, restore_shape: Any, probs: Tensor | None
) -> None:
    """The rules of `unpermute`, given the sizes of the row map."""
    require_shape(rows.dim() == 2, "rows", rows, "[rows, hidden]")
    require_shape(rows.shape[0] == row_map_rows, "rows", rows, f"[{row_map_rows}, hidden], as the row_map was made")
    if restore_shape is not None:
        shape = (row_map_tokens, rows.shape[1])
        requirement = f"{shape}: the row_map's tokens, the rows' hidden size"
        require(tuple(restore_shape) == shape, "restore_shape", tuple(restore_shape), requirement)
    if probs is not None:
        check_probs(probs, (row_map_tokens, row_map_experts), rows)


def check_sort_chunks(rows: Tensor, chunk_sizes: Tensor, order: Tensor, probs: Tensor | None) -> None:
    """The rules of `sort_chunks` that do not read the device."""
    require_shape(rows.dim() == 2, "rows", rows, "[rows, hidden]")
    for name, vector in (("chunk_sizes", chunk_sizes), ("order", order)):
        require_shape(vector.dim() == 1, name, vector, "[chunks]")
        require_dtype(not vector.is_floating_point(), name, vector, "integer")
    requirement = f"of shape {tuple(chunk_sizes.shape)}, as chunk_sizes"
    require_shape(order.shape == chunk_sizes.shape, "order", order, requirement)
    if probs is not None:
        check_probs(probs, (rows.shape[0],), rows)


def check_indices(indices: Tensor, probs: Tensor, num_experts: int) -> None:
    """The rules of `indices_to_multihot` that do not read the device."""
    require_shape(indices.dim() == 2, "indices", indices, "[tokens, slots]")
    require_dtype(not indices.is_floating_point(), "indices", indices, "integer")
    legal = is_count(num_experts) and 1 <= num_experts <= MAX_EXPERTS
    require(legal, "num_experts", num_experts, f"an integer from 1 to {MAX_EXPERTS}")
    check_probs(probs, tuple(indices.shape), indices)


def check_multihot(routing_map: Tensor, probs: Tensor, topk: int) -> None:
    """The rules of `multihot_to_indices`."""
    check_map(routing_map)
    check_probs(probs, tuple(routing_map.shape), routing_map)
    check_count("topk", topk)
