"""Dispatch and combine: settings, results, and the rules that make a call illegal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from moe_ref.config.permutation import check_align, check_map
from moe_ref.config.quantization import Recipe, check_quantize
from moe_ref.config.rules import (
    MAX_EXPERTS,
    check_count,
    check_entries,
    check_optional_count,
    check_probs,
    is_count,
    require,
    require_dtype,
    require_shape,
)

X = TypeVar("X")
PerRank: TypeAlias = Sequence[X]  # one entry per rank, in the order of the ranks

Duplicates = Literal["reject", "count each", "last slot"]
Empty = Literal["skip", "reject"]
ZeroProb = Literal["keep", "drop"]
Values = Literal["checked", "trusted"]

FP8_BLOCK = 128  # columns that share a scale on DeepEP's wire


@dataclass(frozen=True)
class IndexPolicy:
    """The treatment of slots on which real libraries differ."""

    duplicates: Duplicates = "reject"
    """An expert in several slots of a token. DeepEP counts each; HybridEP's map keeps the last."""
    empty: Empty = "skip"
    """A slot that holds -1. DeepEP skips it; HybridEP's index form must not hold one."""
    zero_prob: ZeroProb = "keep"
    """A routed slot of probability 0. Megatron drops it before DeepEP with a capacity factor."""
    values: Values = "checked"
    """Trusted: the caller sees to it that indices are legal and `num_worst_tokens` is enough. As
    DeepEP, an implementation need not read them; the reference checks all the same."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value that is none of those listed."""
        for name, kinds in (("duplicates", Duplicates), ("empty", Empty), ("zero_prob", ZeroProb), ("values", Values)):
            values = kinds.__args__  # type: ignore[attr-defined]
            requirement = f"one of {', '.join(map(repr, values))}"
            require(getattr(self, name) in values, name, repr(getattr(self, name)), requirement)


class Dispatched(NamedTuple):
    """A rank's result of `allgather_dispatch`, `alltoall_dispatch`, `hybridep_dispatch`: rows by
    local expert.
    """

    rows: Any  # [P,H], the tokens' dtype; with a recipe opaque: `quantize` of the rows
    probs: Tensor | None  # [P], the probs' dtype; None when no probs were given
    tokens_per_expert: Tensor  # [L] int64: length of each local expert's segment of `rows`, its padding included
    handle: Any  # opaque: hand it to this implementation's own combine
    overflow: Tensor  # [] bool: some copy that was routed to this rank is not among `rows`


class DeepEPDispatched(NamedTuple):
    """A rank's result of `deepep_dispatch`: each token once, however many of the rank's experts
    want it.
    """

    rows: Tensor  # [D,H], the tokens' dtype; unspecified past the received rows
    scales: Tensor | None  # [D,…], moved like the rows; None when none were given
    indices: Tensor  # [D,K] int64: each slot's local expert, -1 where the slot belongs to another rank or to none
    probs: Tensor | None  # [D,K], 0 where `indices` is -1; None when no probs were given
    tokens_per_expert: Tensor | None  # [L] int64: slots per local expert, aligned; None with `num_worst_tokens`
    handle: Any  # opaque


class LowLatencyDispatched(NamedTuple):
    """A rank's result of `deepep_low_latency_dispatch`: a slab of W·M rows per expert, filled from
    the front.
    """

    rows: Tensor  # [L,W·M,H]; unspecified past an expert's count
    scales: Tensor | None  # [L,W·M,H/128] float32; None without `use_fp8`
    tokens_per_expert: Tensor  # [L] int64: rows of each slab that hold a token
    source_tokens: Tensor  # [L,W·M] int64: each row's token, counted on its own rank; unspecified past the count
    layout_range: Tensor  # [L,W] int64: begin · 2^32 + count of the rows that each source has in the slab
    handle: Any  # opaque


class DeepEPLayout(NamedTuple):
    """What `deepep_layout` returns: the sends of one rank."""

    num_tokens_per_rank: Tensor  # [W] int64: tokens that go to each rank, once each
    num_tokens_per_expert: Tensor  # [E] int64: slots of each expert
    is_token_in_rank: Tensor  # [T,W] bool


class Combined(NamedTuple):
    """A rank's result of `deepep_combine` and `hybridep_combine`."""

    tokens: Tensor  # [T,H], the rows' dtype
    probs: Tensor | None  # [T,K] of DeepEP, [T,E] of HybridEP; None when no probs were given


def check_expert_split(num_experts: int, ranks: int, expert_tensor_parallel: int = 1) -> None:
    """Ranks divide into groups that share experts, and experts divide evenly among the groups."""
    check_count("ranks", ranks)
    legal = is_count(expert_tensor_parallel) and expert_tensor_parallel >= 1 and ranks % expert_tensor_parallel == 0
    require(legal, "expert_tensor_parallel", expert_tensor_parallel, f"a positive divisor of the {ranks} ranks")
    divides = (
        is_count(num_experts)
        and 1 <= num_experts <= MAX_EXPERTS
        and num_experts % (ranks // expert_tensor_parallel) == 0
    )
    require(
        divides,
        "num_experts",
        num_experts,
        f"from 1 to {MAX_EXPERTS} and a multiple of {ranks // expert_tensor_parallel}, the groups that hold experts",
    )


def check_flatten_experts(x_TE: Tensor, expert_parallel: int, expert_tensor_parallel: int) -> None:
    """A matrix of experts' columns, groups that divide them, and at least one rank per group."""
    require_shape(x_TE.dim() == 2 and x_TE.shape[1] >= 1, "x", x_TE, "[tokens, experts]")
    experts = x_TE.shape[1]
    legal = is_count(expert_parallel) and expert_parallel >= 1 and experts % expert_parallel == 0
    require(legal, "expert_parallel", expert_parallel, f"a positive divisor of the {experts} experts")
    legal = is_count(expert_tensor_parallel) and expert_tensor_parallel >= 1
    require(legal, "expert_tensor_parallel", expert_tensor_parallel, "a positive integer")


def check_tokens(tokens: PerRank[Tensor]) -> None:
    """[T,H] of each rank: its own T; H, dtype and device the same on all."""
    require(len(tokens) >= 1, "tokens", "an empty list", "a list with an entry per rank")
    first = tokens[0]
    for rank, tokens_TH in enumerate(tokens):
        require_shape(tokens_TH.dim() == 2, f"tokens[{rank}]", tokens_TH, "[tokens, hidden]")
        same = (tokens_TH.shape[1], tokens_TH.dtype, tokens_TH.device) == (first.shape[1], first.dtype, first.device)
        form = f"[tokens, {first.shape[1]}] of {first.dtype} on {first.device}, as tokens[0]"
        require(same, f"tokens[{rank}]", f"{tuple(tokens_TH.shape)} of {tokens_TH.dtype} on {tokens_TH.device}", form)


def check_rows_per_token(name: str, values: PerRank[Tensor] | None, tokens: PerRank[Tensor]) -> None:
    """`values` has an entry per rank, with a row for each of its tokens; or there are none."""
    if values is None:
        return
    check_entries(name, values, len(tokens))
    for rank, (value, tokens_TH) in enumerate(zip(values, tokens, strict=True)):
        requirement = f"[{len(tokens_TH)}, …] on {tokens_TH.device}, a row per token"
        require_shape(value.dim() >= 1 and len(value) == len(tokens_TH), f"{name}[{rank}]", value, requirement)
        require(value.device == tokens_TH.device, f"{name}[{rank}]", f"on {value.device}", requirement)


def check_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    probs: PerRank[Tensor] | None,
    expert_tensor_parallel: int = 1,
    capacity: int | None = None,
) -> None:
    """The rules of the dispatchers that read a routing map."""
    check_tokens(tokens)
    check_rows_per_token("routing_map", routing_map, tokens)
    for map_TE in routing_map:
        check_map(map_TE)
        experts = routing_map[0].shape[1]
        require_shape(map_TE.shape[1] == experts, "routing_map", map_TE, f"[tokens, {experts}], as the first rank's")
    check_expert_split(routing_map[0].shape[1], len(tokens), expert_tensor_parallel)
    check_rank_probs(probs, routing_map)
    check_optional_count("capacity", capacity)


def check_rank_probs(probs: PerRank[Tensor] | None, like: PerRank[Tensor]) -> None:
    """`probs` is None, or floating point of the shapes of `like`, of one dtype."""
    if probs is None:
        return
    check_entries("probs", probs, len(like))
    for rank_probs, shaped in zip(probs, like, strict=True):
        check_probs(rank_probs, tuple(shaped.shape), shaped)
        require_dtype(rank_probs.dtype == probs[0].dtype, "probs", rank_probs, f"{probs[0].dtype}, as the first rank's")


def check_budget(align: int | None, num_rows: int | None) -> None:
    """`align` is None or positive; `num_rows` is None or whole blocks of it."""
    check_align(align)
    require(num_rows is None or (is_count(num_rows) and num_rows >= 0), "num_rows", num_rows, "None or an integer ≥ 0")
    requirement = f"a multiple of align {align}, so that every segment is"
    require(num_rows is None or num_rows % (align or 1) == 0, "num_rows", num_rows, requirement)


def check_programs(num_sms: int | None, num_blocks: int | None) -> None:
    """Each is None, for the implementation's own choice, or a positive integer."""
    for name, most in (("num_sms", num_sms), ("num_blocks", num_blocks)):
        check_optional_count(name, most)


def check_one_size(capacity: int | None, num_rows: int | None) -> None:
    """A budget of rows, or a capacity that gives every size, or neither."""
    check_budget(None, num_rows)
    requirement = f"None with a capacity, {capacity}, which gives all sizes"
    require(capacity is None or num_rows is None, "num_rows", num_rows, requirement)


def check_wire_recipe(recipe: Recipe | None, tokens: PerRank[Tensor]) -> None:
    """`recipe` is None, or one whose scales depend on the token's row alone and are as wide as the
    wire's.
    """
    if recipe is None:
        return
    by_blocks = isinstance(recipe, Recipe) and recipe.scaling == "block"
    requirement = f"None, or a Recipe of scaling 'block', which gives each {FP8_BLOCK} columns of a token a scale"
    require(by_blocks, "recipe", repr(recipe), requirement)
    for tokens_TH in tokens:
        check_quantize(tokens_TH, recipe, "input", None, True, False, None, None)


def check_rank_indices(
    tokens: PerRank[Tensor], indices: PerRank[Tensor], probs: PerRank[Tensor] | None, num_experts: int
) -> None:
    """The rules of the dispatchers that read indices."""
    check_tokens(tokens)
    check_rows_per_token("indices", indices, tokens)
    check_expert_split(num_experts, len(tokens))
    for index_TK in indices:
        slots = indices[0].shape[-1]
        requirement = f"[tokens, {slots}], as the first rank's"
        require_shape(index_TK.dim() == 2 and index_TK.shape[1] == slots, "indices", index_TK, requirement)
        legal = not (index_TK.is_floating_point() or index_TK.is_complex()) and index_TK.dtype != torch.bool
        require_dtype(legal, "indices", index_TK, "integer")
    check_rank_probs(probs, indices)


def check_index_values(indices: Tensor, num_experts: int) -> None:
    """Indices are from -1 to E - 1. This reads the device; an implementation may declare it
    unchecked.
    """
    index_TK = indices.to(torch.int64)  # E may be more than a narrow dtype holds
    illegal = (index_TK < -1) | (index_TK >= num_experts)
    require(not bool(illegal.any()), "indices", indices[illegal].tolist()[:4], f"from -1 to {num_experts - 1}")


def check_deepep_sizes(expert_alignment: int, num_worst_tokens: int | None, largest: int) -> None:
    """A positive alignment; and room for the `largest` number of rows that a rank receives."""
    check_count("expert_alignment", expert_alignment)
    requirement = f"None or at least {largest}, the rows that a rank receives"
    legal = num_worst_tokens is None or (is_count(num_worst_tokens) and num_worst_tokens >= largest)
    require(legal, "num_worst_tokens", num_worst_tokens, requirement)


def check_slab(tokens: PerRank[Tensor], max_tokens_per_rank: int, use_fp8: bool, round_scale: bool) -> None:
    """No rank has more tokens than the slabs were made for, and with FP8 rows are whole blocks."""
    most = max(len(tokens_TH) for tokens_TH in tokens)
    requirement = f"a positive integer, at least {most}, the most tokens of a rank"
    legal = is_count(max_tokens_per_rank) and max_tokens_per_rank >= max(most, 1)
    require(legal, "max_tokens_per_rank", max_tokens_per_rank, requirement)
    require(use_fp8 or not round_scale, "round_scale", round_scale, "False without use_fp8: nothing is scaled")
    hidden = tokens[0].shape[1]
    requirement = f"a multiple of {FP8_BLOCK}, so that blocks are whole"
    require(not use_fp8 or hidden % FP8_BLOCK == 0, "tokens", f"of hidden size {hidden}", requirement)


def check_rows(rows: PerRank[Tensor], shapes: PerRank[tuple[int, ...]]) -> None:
    """The rows of combine have the shapes that dispatch returned, up to the hidden size, and one
    dtype.
    """
    check_entries("rows", rows, len(shapes))
    for rank, (rank_rows, shape) in enumerate(zip(rows, shapes, strict=True)):
        requirement = f"[{', '.join(map(str, shape))}, hidden], as dispatch gave them"
        legal = rank_rows.dim() == len(shape) + 1 and tuple(rank_rows.shape[:-1]) == shape
        require_shape(legal, f"rows[{rank}]", rank_rows, requirement)
        same = (
            rank_rows.dtype == rows[0].dtype
            and rank_rows.shape[-1] == rows[0].shape[-1]
            and rank_rows.is_floating_point()
        )
        requirement = f"{rows[0].dtype} and floating point, of hidden size {rows[0].shape[-1]}, as rows[0]"
        require(same, f"rows[{rank}]", f"{rank_rows.dtype} of hidden size {rank_rows.shape[-1]}", requirement)
