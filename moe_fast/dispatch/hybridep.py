"""HybridEP: each token travels once to each rank that wants it; permute and unpermute are parts of
dispatch and combine.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch import wire
from moe_fast.dispatch.budget import kept_copies
from moe_fast.dispatch.deduplicated import Sent, add_ranks, check_resent, send_once
from moe_fast.dispatch.exchange import check_combined, check_handle, exchanged, size_and_rank
from moe_fast.launch.autograd import once_differentiable
from moe_fast.permutation.permute import permute, sum_rows, unpermute
from moe_ref.config import (
    Combined,
    Dispatched,
    Recipe,
    check_budget,
    check_dispatch,
    check_probs,
    check_programs,
    check_wire_recipe,
)


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    sent_rows: Sent
    map_DL: Tensor  # which of the rank's experts each received token goes to
    row_map: Any  # of the permutation there
    align: int | None
    num_rows: int | None
    rows: int

    @property
    def exchange(self) -> Any:
        return self.sent_rows.exchange


def hybridep_dispatch(
    tokens_TH: Tensor, routing_map_TE: Tensor,
    *, probs: Tensor | None = None, align: int | None = None, num_rows: int | None = None,
    recipe: Recipe | None = None, num_sms: int | None = None, num_blocks: int | None = None, group: Any = None,
) -> Dispatched:  # fmt: skip
    """Send each token once to each rank that wants it, and write its copies where the experts read.

    With a recipe each token is quantised once, on the rank that sends it, and its codes and scales
    travel as bytes: the bits are the same as if rows were quantised on arrival. The host reads the
    counts, unless `num_rows` bounds them; `budget` describes what travels then. `num_sms` and
    `num_blocks` have no effect, because the group's collectives and `permute` choose their own
    numbers of programs.
    """
    ranks, _ = size_and_rank(group)
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks)
    check_budget(align, num_rows)
    check_programs(num_sms, num_blocks)
    check_wire_recipe(recipe, [tokens_TH])
    payload, of_zeros = (tokens_TH, None) if recipe is None else wire.packed(tokens_TH, recipe)
    copies = None if num_rows is None else kept_copies(routing_map_TE, num_rows, group, align=align or 1)
    map_TWL = (routing_map_TE != 0 if copies is None else copies.map_TE).unflatten(1, (ranks, -1))
    sent_rows, payload = send_once(payload, map_TWL.any(2), group, num_rows)
    sent_probs = None if probs is None else sent_rows.cells(probs.unflatten(1, (ranks, -1)))
    rows_DH, map_DL, probs_DL = exchanged(sent_rows.exchange, payload, sent_rows.cells(map_TWL), sent_probs)
    assert rows_DH is not None and map_DL is not None
    permuted = permute(rows_DH, map_DL, probs=probs_DL, align=align, num_rows=num_rows)
    handle = Handle(sent_rows, map_DL, permuted.row_map, align, num_rows, len(permuted.rows))
    rows: Any = permuted.rows
    if recipe is not None and of_zeros is not None:
        form, source = wire.unpacked(rows, of_zeros, tokens_TH.shape[1]), _Place.apply(tokens_TH, handle)
        rows = wire.rows_of(form, recipe, tokens_TH.dtype, permuted.tokens_per_expert, source)
    overflow = permuted.overflow if copies is None else copies.overflow
    return Dispatched(rows, permuted.probs, permuted.tokens_per_expert, handle, overflow)


class _Place(torch.autograd.Function):
    """The node in autograd's graph of rows that arrived as codes. Its values are never read; its
    gradient is a combine.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        return tokens.new_empty(()).expand(handle.rows, tokens.shape[1])  # it takes no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        sent_rows: Sent = ctx.handle.sent_rows
        (home,) = exchanged(ctx.handle.exchange.back, sum_rows(d_rows, None, None, ctx.handle.row_map)[0])
        assert home is not None
        return add_ranks(home, sent_rows, [], d_rows.dtype), None


def hybridep_cached_dispatch(tokens_TH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """The rows of `hybridep_dispatch` for other tokens of the same routing.

    Raises:
        ValueError: another dispatcher's handle, another group, or another number of tokens.
    """
    check_resent(tokens_TH, handle, Handle, group)
    (rows_DH,) = exchanged(handle.sent_rows.exchange, handle.sent_rows.rows(tokens_TH))
    assert rows_DH is not None
    return permute(rows_DH, handle.map_DL, align=handle.align, num_rows=handle.num_rows).rows


def hybridep_combine(
    rows_PH: Tensor, handle: Handle,
    *, probs: Tensor | None = None, num_sms: int | None = None, num_blocks: int | None = None, group: Any = None,
) -> Combined:  # fmt: skip
    """Add each token's rows on every rank, send the sums back, and add them; no probability is
    applied.

    Probs, [P] or None, come back as [T,E]. `num_sms` and `num_blocks`: as in dispatch.

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    check_handle(handle, Handle, group)
    check_combined(rows_PH, handle.rows)
    check_programs(num_sms, num_blocks)
    if probs is not None:
        check_probs(probs, (len(rows_PH),), rows_PH)
    parts_DH = unpermute(rows_PH, handle.row_map, restore_shape=(len(handle.map_DL), rows_PH.shape[1]))
    home, home_probs = exchanged(
        handle.sent_rows.exchange.back, parts_DH, None if probs is None else _to_cells(probs, handle)
    )
    assert home is not None
    tokens = add_ranks(home, handle.sent_rows, [], rows_PH.dtype)
    return Combined(tokens, None if home_probs is None else handle.sent_rows.to_tokens(home_probs).flatten(1))


def _to_cells(probs_P: Tensor, handle: Handle) -> Tensor:
    """[D,L]: the prob of the row that stands for each (token, expert), 0 where there is none."""
    received, local = handle.map_DL.shape
    cells = received * local
    number_DL = torch.arange(1, cells + 1, dtype=torch.float64, device=probs_P.device).reshape(received, local)
    nothing = probs_P.new_zeros((received, 1))
    number_P = permute(nothing, handle.map_DL, probs=number_DL, align=handle.align, num_rows=handle.num_rows).probs
    assert number_P is not None
    # padding is written to position 0
    return probs_P.new_zeros(cells + 1).index_put((number_P.long(),), probs_P)[1:].reshape(received, local)
