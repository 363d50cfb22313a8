"""Each token once to each rank that wants it, and the ranks' results back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.exchange import Exchange, check_handle, counts_of_all, exchange_of, size_and_rank
from moe_fast.permutation.permute import permute
from moe_ref.config import check_tokens, require


@dataclass(frozen=True)
class Sent:
    """The rows that a rank sends: by destination, then by token."""

    exchange: Exchange
    row_map: Any  # of the tokens to those rows
    token_S: Tensor  # the token of each row
    rank_S: Tensor  # where it goes
    num_tokens: int
    most: int  # rows that any rank receives

    def rows(self, tokens_TH: Tensor) -> Tensor:
        """The rows of other tokens, to the same ranks."""
        wanted_TW = torch.zeros((self.num_tokens, len(self.exchange.send)), dtype=torch.bool, device=tokens_TH.device)
        wanted_TW = wanted_TW.index_put((self.token_S, self.rank_S), torch.ones_like(self.token_S, dtype=torch.bool))
        return permute(tokens_TH, wanted_TW).rows

    def cells(self, x: Tensor) -> Tensor:
        """x[token, destination] of each row, of [T,W,…]."""
        return x[self.token_S, self.rank_S]

    def to_tokens(self, x_S: Tensor) -> Tensor:
        """[T,W,…] with x of each row at [token, destination], and 0 elsewhere."""
        out = x_S.new_zeros((self.num_tokens, len(self.exchange.send), *x_S.shape[1:]))
        return out.index_put((self.token_S, self.rank_S), x_S)


def check_resent(tokens_TH: Tensor, handle: Any, kind: type, group: Any) -> None:
    """Raise `ValueError` for tokens that the routing of the handle cannot send again."""
    check_handle(handle, kind, group)
    check_tokens([tokens_TH])
    expected = handle.sent.num_tokens
    require(
        len(tokens_TH) == expected, "tokens", f"of {len(tokens_TH)} rows", f"of {expected} rows, as the handle says"
    )


def send_once(tokens_TH: Tensor, wanted_TW: Tensor, group: Any) -> tuple[Sent, Tensor]:
    """Who wants which token, and the rows to be sent; nothing but counts has been sent yet."""
    _, rank = size_and_rank(group)
    counts = counts_of_all(wanted_TW.sum(0), group).tolist()
    exchange = exchange_of(counts, rank, group)
    permuted = permute(tokens_TH, wanted_TW)
    number_T = torch.arange(len(tokens_TH), device=tokens_TH.device)[:, None]
    token_S = permute(number_T, wanted_TW).rows[:, 0]
    destinations = torch.arange(len(counts), device=tokens_TH.device)
    rank_S = destinations.repeat_interleave(
        torch.tensor(counts[rank], device=tokens_TH.device), output_size=len(token_S)
    )
    return Sent(
        exchange, permuted.row_map, token_S, rank_S, len(tokens_TH), max(map(sum, zip(*counts, strict=True)))
    ), permuted.rows


def add_ranks(rows_SH: Tensor, sent: Sent, biases: list[Tensor], dtype: torch.dtype) -> Tensor:
    """round(biases + Σ_w row of the token on w), by rank, in float32 (float64 for float64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = rows_SH.new_zeros((sent.num_tokens, *rows_SH.shape[1:]), dtype=wide)
    for bias in biases:
        total = total + bias.to(wide)
    sizes = list(sent.exchange.send)
    for rows, tokens in zip(rows_SH.split(sizes), sent.token_S.split(sizes), strict=True):
        total = total.index_add(0, tokens, rows.to(wide))  # a token stands in `tokens` once: no order is left open
    return total.to(dtype)
