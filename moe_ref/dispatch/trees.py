"""The reduction trees: how rows of many ranks become tokens again.

A tree is an order of additions, the dtype of each addition, and the places where it rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ref.config import PerRank
from moe_ref.permutation.rows import sum_rows
from moe_ref.rounding import round_to


def sum_flat(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...], biases: Sequence[PerRank[Tensor]] = ()
) -> list[Tensor]:
    """y[g] = round(biases[g] + Σ_w Σ_i rows_w[i] over the rows i of g): ranks ascending, rows
    ascending, one rounding.
    """
    joined_biases = [torch.cat(list(bias)) for bias in biases]
    total_GH = sum_rows(torch.cat(list(rows)), torch.cat(list(row_tokens)), sum(tokens), joined_biases)
    return list(total_GH.split(list(tokens)))


def sum_experts_then_ranks(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...], between: torch.dtype
) -> list[Tensor]:
    """y[g] = round(Σ_w round(Σ_i rows_w[i])): in a rank in the accumulator dtype, between ranks in
    `between`.
    """
    partial_sums = [sum_rows(rows_P, tokens_P, sum(tokens)) for rows_P, tokens_P in zip(rows, row_tokens, strict=True)]
    return list(sum_ranks(partial_sums, between).split(list(tokens)))


def sum_ranks(partial_sums: PerRank[Tensor], between: torch.dtype) -> Tensor:
    """round(Σ_w partial_sums_w): ranks ascending, every partial sum in the dtype `between`."""
    total = round_to(partial_sums[0], between)
    for partial_sum in partial_sums[1:]:
        total = total + round_to(partial_sum, between)
    return round_to(total, partial_sums[0].dtype)
