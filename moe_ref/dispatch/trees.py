"""The reduction trees: how rows of many ranks become tokens again. A tree is an order, the dtype it adds in, and where it rounds."""

import torch
from torch import Tensor

from moe_ref.config import PerRank
from moe_ref.permutation.permute import sum_rows
from moe_ref.rounding import round_to


def sum_flat(rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...]) -> list[Tensor]:
    """y[g] = round(Σ_w Σ_i rows_w[i] over the rows i of g): ranks ascending, in a rank rows ascending, one rounding."""
    total_GH = sum_rows(torch.cat(list(rows)), torch.cat(list(row_tokens)), sum(tokens))
    return list(total_GH.split(list(tokens)))


def sum_experts_then_ranks(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...], between: torch.dtype
) -> list[Tensor]:
    """y[g] = round(Σ_w round(Σ_i rows_w[i])): inside a rank in the accumulator dtype, between ranks in the dtype `between`."""
    parts = [sum_rows(own, own_tokens, sum(tokens)) for own, own_tokens in zip(rows, row_tokens, strict=True)]
    return list(sum_ranks(parts, between).split(list(tokens)))


def sum_ranks(parts: PerRank[Tensor], between: torch.dtype) -> Tensor:
    """round(Σ_w parts_w): ranks ascending, every partial sum in the dtype `between`."""
    total = round_to(parts[0], between)
    for part in parts[1:]:
        total = total + round_to(part, between)
    return round_to(total, parts[0].dtype)
