"""What the dispatchers share: the mover between ranks, and the handle that dispatch leaves for
combine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import PerRank, check_rows, check_tokens, require
from moe_ref.config.rules import check_entries
from moe_ref.dispatch.plan import RoutePlan
from moe_ref.permutation.rows import take_rows

Tree = Callable[[PerRank[Tensor]], list[Tensor]]  # rows of all ranks to sums of all ranks


@dataclass(frozen=True)
class Handle:
    """What combine needs of one rank's dispatch; each dispatcher has a subclass."""

    rank: int
    plan: RoutePlan
    row_tokens: tuple[Tensor, ...]  # of each rank: the token (numbered over all ranks) of each row, or PADDING


def move(x: PerRank[Tensor], row_tokens: PerRank[Tensor], transpose: Tree | None = None) -> list[Tensor]:
    """Send rows: out_w[i] = x[row_tokens_w[i]], or zeros for PADDING; x is all ranks' tensors, one
    below the other.

    The gradient is `transpose`, by default the flat sum over ranks and their rows, ascending,
    rounded once.
    """
    lengths = [len(tokens_P) for tokens_P in row_tokens]

    def back(d_rows: Tensor) -> Tensor:
        assert transpose is not None
        return torch.cat(transpose(d_rows.split(lengths)))

    rows = take_rows(torch.cat(list(x)), torch.cat(list(row_tokens)), None if transpose is None else back)
    return list(rows.split(lengths))


def move_probs(probs: PerRank[Tensor] | None, plan: RoutePlan) -> list[Tensor | None]:
    """out_w[i] = probs[token of row i, expert of row i], or 0 for padding; probs are [T,E] of each
    rank.
    """
    if probs is None:
        return [None] * plan.ranks
    cells = [plan.row_cells(rank) for rank in range(plan.ranks)]
    return list(move([probs_TE.flatten() for probs_TE in probs], cells))


def plan_of(handles: PerRank[Any], kind: type[Handle], rows: PerRank[Tensor] | None = None) -> RoutePlan:
    """The plan that the handles of all ranks share; the rows are checked against it."""
    require(len(handles) >= 1, "handles", "an empty list", "a list with an entry per rank")
    for rank, handle in enumerate(handles):
        value, requirement = type(handle).__name__, f"{kind.__name__} of rank {rank}, of the same call as the others"
        require(isinstance(handle, kind), f"handles[{rank}]", value, requirement)
        value += f" of rank {handle.rank}" if handle.plan is handles[0].plan else " of another call"
        require(value == f"{kind.__name__} of rank {rank}", f"handles[{rank}]", value, requirement)
    ranks = handles[0].plan.ranks
    check_entries("handles", handles, ranks)
    if rows is not None:
        check_rows(rows, [tuple(tokens_P.shape) for tokens_P in handles[0].row_tokens])
    return handles[0].plan


def check_resent(tokens: PerRank[Tensor], plan: RoutePlan) -> None:
    """Other tokens of the same routing: as many on each rank as the plan has."""
    check_tokens(tokens)
    value = f"of {[len(tokens_TH) for tokens_TH in tokens]} rows"
    requirement = f"of {list(plan.tokens)} rows, as the handles have"
    require(tuple(map(len, tokens)) == plan.tokens, "tokens", value, requirement)
