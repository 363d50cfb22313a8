"""Send each token once to each rank that wants it, and bring back the ranks' results."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.budget import into_slabs
from moe_fast.dispatch.exchange import Exchange, check_handle, counts_of_all, exchange_of, size_and_rank
from moe_fast.permutation.permute import permute
from moe_ref.config import check_tokens, require


@dataclass(frozen=True)
class Sent:
    """The rows that a rank sends, ordered by destination, then by token. With a budget they lie in
    slabs; a free row of a slab has the token number T, which no token has.
    """

    exchange: Exchange
    token_S: Tensor  # the token of each row
    rank_S: Tensor  # the rank that each row goes to
    num_tokens: int
    num_rows: int | None = None  # the budget, which is the rows of each slab

    def rows(self, tokens_TH: Tensor) -> Tensor:
        """The rows of other tokens that go to the same ranks."""
        return _rows(tokens_TH, self.to_tokens(torch.ones_like(self.token_S, dtype=torch.bool)), self.num_rows)

    def cells(self, x: Tensor) -> Tensor:
        """For each row x[its token, its destination], where x is [T,W,…]; 0 for free rows."""
        longer = x if self.num_rows is None else torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
        return longer[self.token_S, self.rank_S]

    def of_tokens(self, x_T: Tensor, nothing: int = 0) -> Tensor:
        """For each row x[its token]; `nothing`, which is 0 unless x is of integers, for
        free rows.
        """
        return taken(x_T if self.num_rows is None else longer(x_T, 1, nothing), self.token_S)

    def to_tokens(self, x_S: Tensor) -> Tensor:
        """[T,W,…]: x of each row at [its token, its destination], and 0 elsewhere."""
        out = x_S.new_zeros((self.num_tokens + 1, len(self.exchange.send), *x_S.shape[1:]))
        return out.index_put((self.token_S, self.rank_S), x_S)[:-1]


def taken(x: Tensor, index_N: Tensor) -> Tensor:
    """x[index]. Not every version of torch can index fp8 tensors, and they have no gradient."""
    return x.view(torch.uint8)[index_N].view(x.dtype) if x.element_size() == 1 else x[index_N]


def longer(x: Tensor, rows: int, fill: int = 0) -> Tensor:
    """x, extended by `rows` rows of `fill`."""
    narrow = x.element_size() == 1
    padding = torch.full((rows, *x.shape[1:]), fill, dtype=torch.uint8 if narrow else x.dtype, device=x.device)
    return torch.cat([x, padding.view(x.dtype) if narrow else padding])


def check_resent(tokens_TH: Tensor, handle: Any, kind: type, group: Any) -> None:
    """Raise `ValueError` for tokens that the routing of the handle cannot send again."""
    check_handle(handle, kind, group)
    check_tokens([tokens_TH])
    expected = handle.sent_rows.num_tokens
    require(
        len(tokens_TH) == expected, "tokens", f"of {len(tokens_TH)} rows", f"of {expected} rows, as the handle says"
    )


def send_once(tokens_TH: Tensor, wanted_TW: Tensor, group: Any, num_rows: int | None = None) -> tuple[Sent, Tensor]:
    """(which rows are sent where, the rows). Only counts have been exchanged so far, and with a
    budget not even counts: no rank wants more of this rank's tokens than it keeps rows.
    """
    _, rank = size_and_rank(group)
    if num_rows is not None:
        return _in_slabs(tokens_TH, wanted_TW, group, num_rows), _rows(tokens_TH, wanted_TW, num_rows)
    counts = counts_of_all(wanted_TW.sum(0), group).tolist()
    exchange = exchange_of(counts, rank, group)
    number_T = torch.arange(len(tokens_TH), device=tokens_TH.device)[:, None]
    token_S = permute(number_T, wanted_TW).rows[:, 0]
    destinations = torch.arange(len(counts), device=tokens_TH.device)
    rank_S = destinations.repeat_interleave(
        torch.tensor(counts[rank], device=tokens_TH.device), output_size=len(token_S)
    )
    return Sent(exchange, token_S, rank_S, len(tokens_TH)), _rows(tokens_TH, wanted_TW, None)


def _in_slabs(tokens_TH: Tensor, wanted_TW: Tensor, group: Any, num_rows: int) -> Sent:
    """The rows to send in slabs, one for each wanted token; the host reads nothing."""
    num_tokens, ranks = wanted_TW.shape
    rank_W = torch.arange(ranks, device=wanted_TW.device)
    nowhere = ranks * num_rows
    row_TW = torch.where(wanted_TW, rank_W * num_rows + wanted_TW.cumsum(0) - 1, nowhere)
    number_TW = torch.arange(num_tokens, device=wanted_TW.device)[:, None].expand(num_tokens, ranks)
    token_S = torch.full((nowhere + 1,), num_tokens, device=wanted_TW.device)
    token_S = token_S.scatter(0, row_TW.flatten(), number_TW.flatten())[:-1]
    exchange = exchange_of([[num_rows] * ranks] * ranks, 0, group)
    return Sent(exchange, token_S, rank_W.repeat_interleave(num_rows), num_tokens, num_rows)


def _rows(tokens_TH: Tensor, wanted_TW: Tensor, num_rows: int | None) -> Tensor:
    """The wanted tokens by destination; with a budget they lie in slabs."""
    if num_rows is None:
        return permute(tokens_TH, wanted_TW).rows
    permuted = permute(tokens_TH, wanted_TW, num_rows=wanted_TW.shape[1] * num_rows)
    return into_slabs(permuted.rows, wanted_TW.sum(0), num_rows).rows


def add_ranks(
    rows_SH: Tensor, sent_rows: Sent, biases: list[Tensor], dtype: torch.dtype, between: torch.dtype | None = None
) -> Tensor:
    """out[t] = round(Σ biases[t] + Σ over ranks w of the row of t on w), the ranks in ascending
    order. Partial sums have the dtype `between`; if it is None, float32, or float64 for float64.
    """
    sum_dtype = between or (torch.float64 if dtype == torch.float64 else torch.float32)
    # the last entry is for no token
    total = rows_SH.new_zeros((sent_rows.num_tokens + 1, *rows_SH.shape[1:]), dtype=sum_dtype)
    for bias in biases:
        total = total + torch.nn.functional.pad(bias.to(sum_dtype), (0, 0, 0, 1))
    sizes = list(sent_rows.exchange.send)
    for rows, tokens in zip(rows_SH.split(sizes), sent_rows.token_S.split(sizes), strict=True):
        # a token is in `tokens` once, so that the order of the sum is fixed
        total = total.index_add(0, tokens, rows.to(sum_dtype))
    return total[:-1].to(dtype)
