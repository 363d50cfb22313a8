"""HybridEP: each token travels once to each rank that wants it, and permute and unpermute are part of the way."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.deduplicated import Sent, add_ranks, send_once
from moe_fast.dispatch.exchange import check_combined, check_handle, exchanged, size_and_rank
from moe_fast.permutation import permute, unpermute
from moe_ref.config import Combined, Dispatched, check_budget, check_dispatch, check_probs, check_tokens, require


@dataclass(frozen=True)
class Handle:
    """What combine needs of its dispatch."""

    sent: Sent
    map_DL: Tensor  # which of the rank's experts each received token goes to
    row_map: Any  # of the permutation there
    align: int | None
    num_rows: int | None
    rows: int

    @property
    def exchange(self) -> Any:
        return self.sent.exchange


def hybridep_dispatch(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    align: int | None = None,
    num_rows: int | None = None,
    group: Any = None,
) -> Dispatched:
    """Send each token to the ranks that want it, and write its copies where the experts read them.

    Slots, padding, budget and the tree of the gradient are those of `moe_ref.hybridep_dispatch`.

    Args:
        tokens_TH: this rank's, any dtype.
        routing_map_TE: this rank's.
        group: whose ranks hold the experts; None for all.

    Returns:
        `Dispatched` of this rank.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_budget; of this rank's own arguments.
    """
    ranks, _ = size_and_rank(group)
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks)
    check_budget(align, num_rows)
    map_TWL = (routing_map_TE != 0).unflatten(1, (ranks, -1))
    sent, rows = send_once(tokens_TH, map_TWL.any(2), group)
    own_probs = None if probs is None else sent.own(probs.unflatten(1, (ranks, -1)))
    rows_DH, map_DL, probs_DL = exchanged(sent.exchange, rows, sent.own(map_TWL), own_probs)
    assert rows_DH is not None and map_DL is not None
    permuted = permute(rows_DH, map_DL, probs=probs_DL, align=align, num_rows=num_rows)
    handle = Handle(sent, map_DL, permuted.row_map, align, num_rows, len(permuted.rows))
    return Dispatched(permuted.rows, permuted.probs, permuted.tokens_per_expert, handle, permuted.overflow)


def hybridep_cached_dispatch(tokens_TH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """The rows of `hybridep_dispatch` for other tokens of the same routing.

    Raises:
        ValueError: another dispatcher's handle, another group, or another number of tokens.
    """
    check_handle(handle, Handle, group)
    check_tokens([tokens_TH])
    require(len(tokens_TH) == handle.sent.num_tokens, "tokens", f"of {len(tokens_TH)} rows", f"of {handle.sent.num_tokens} rows, as the handle says")
    (rows_DH,) = exchanged(handle.sent.exchange, handle.sent.rows(tokens_TH))
    assert rows_DH is not None
    return permute(rows_DH, handle.map_DL, align=handle.align, num_rows=handle.num_rows).rows


def hybridep_combine(rows_PH: Tensor, handle: Handle, *, probs: Tensor | None = None, group: Any = None) -> Combined:
    """Add each token's rows on every rank, send the sums back, and add those. No probability is applied.

    Trees and rounding are those of `moe_ref.hybridep_combine`.

    Args:
        probs: [P] floating point, or None; they come back as [T,E].

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    check_handle(handle, Handle, group)
    check_combined(rows_PH, handle.rows)
    if probs is not None:
        check_probs(probs, (len(rows_PH),), rows_PH)
    parts_DH = unpermute(rows_PH, handle.row_map, restore_shape=(len(handle.map_DL), rows_PH.shape[1]))
    home, home_probs = exchanged(handle.sent.exchange.back, parts_DH, None if probs is None else _to_cells(probs, handle))
    assert home is not None
    tokens = add_ranks(home, handle.sent, [], rows_PH.dtype)
    return Combined(tokens, None if home_probs is None else handle.sent.to_tokens(home_probs).flatten(1))


def _to_cells(probs_P: Tensor, handle: Handle) -> Tensor:
    """[D,L]: the prob of the row that stands for each (token, expert), 0 where there is none."""
    received, local = handle.map_DL.shape
    cells = received * local
    number_DL = torch.arange(1, cells + 1, dtype=torch.float64, device=probs_P.device).reshape(received, local)
    nothing = probs_P.new_zeros((received, 1))
    number_P = permute(nothing, handle.map_DL, probs=number_DL, align=handle.align, num_rows=handle.num_rows).probs
    assert number_P is not None
    return probs_P.new_zeros(cells + 1).index_put((number_P.long(),), probs_P)[1:].reshape(received, local)  # padding falls on 0
