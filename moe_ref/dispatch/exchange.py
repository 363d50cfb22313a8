"""The mover, and what dispatch remembers for combine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import PerRank, check_rows, require
from moe_ref.dispatch.plan import NOWHERE, RoutePlan
from moe_ref.permutation.permute import sum_rows

Map = Callable[[list[Tensor]], list[Tensor]]  # tensors of all ranks to tensors of all ranks


@dataclass(frozen=True)
class Handle:
    """What one rank's combine needs of its dispatch."""

    dispatcher: str
    rank: int
    plan: RoutePlan
    row_tokens: tuple[Tensor, ...]  # of each rank: the token (of all ranks' tokens) that each row came from, or NOWHERE
    reduce_dtype: torch.dtype | None = (
        None  # what is sent between ranks when they add; None where the dispatcher has no choice
    )
    expert_tensor_parallel: int = 1


class _Linear(torch.autograd.Function):
    """A linear map of the tensors of all ranks, whose gradient is the transpose that is given with it."""

    @staticmethod
    def forward(ctx: Any, forward: Map, transpose: Map, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.transpose = transpose
        return tuple(forward(list(inputs)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.transpose(list(gradients))


def take_rows(x: Tensor, source: Tensor) -> Tensor:
    """out[i] = x[source[i]], or 0 where source[i] is NOWHERE; a bit copy for every dtype. No gradient passes."""
    bits = x.detach()
    bits = bits.view(torch.uint8) if x.element_size() == 1 else bits  # fp8 cannot be indexed on every torch
    real = source != NOWHERE
    out = bits.new_zeros((len(source), *x.shape[1:])).index_copy(0, real.nonzero().flatten(), bits[source[real]])
    return out.view(x.dtype)


def move(x: PerRank[Tensor], row_tokens: PerRank[Tensor], transpose: Map | None = None) -> list[Tensor]:
    """out_w[i] = x[row_tokens_w[i]], or 0 where that is NOWHERE; x is the tensors of all ranks, one below the other.

    The gradient is `transpose`, or else the flat sum over the ranks w, ascending, and their rows, ascending, rounded once:

        dx[g] = Σ_w Σ_{i: row_tokens_w[i] = g} dout_w[i]
    """
    lengths = [len(own) for own in x]
    wanted = [len(rows) for rows in row_tokens]
    source = torch.cat(list(row_tokens))

    def spread(inputs: list[Tensor]) -> list[Tensor]:
        return list(take_rows(torch.cat(inputs), source).split(wanted))

    def add_flat(gradients: list[Tensor]) -> list[Tensor]:
        return list(sum_rows(torch.cat(gradients), source, sum(lengths)).split(lengths))

    return list(_Linear.apply(spread, transpose or add_flat, *x))


def move_probs(probs: PerRank[Tensor] | None, plan: RoutePlan) -> list[Tensor | None]:
    """out_w[i] = probs[token of the row i, expert of the row i], or 0 for padding; probs are [T,E] of each rank."""
    if probs is None:
        return [None] * plan.ranks
    cells = [row_cells(plan, rank) for rank in range(plan.ranks)]
    return list(move([own.reshape(-1) for own in probs], cells))


def row_cells(plan: RoutePlan, rank: int) -> Tensor:
    """[P]: token · E + expert of each row of the rank's buffer, or NOWHERE."""
    copy_P = plan.copies(rank)
    num_experts = plan.ranks * plan.local_experts
    real = copy_P != NOWHERE
    cell_R = plan.token_R * num_experts + plan.expert_R
    return copy_P.masked_scatter(real, cell_R[copy_P[real]])


def plan_of(handles: PerRank[Any], dispatcher: str, rows: PerRank[Tensor] | None = None) -> RoutePlan:
    """The plan that the handles of all ranks share, with the rows of all ranks checked against it."""
    require(len(handles) >= 1, "handles", "an empty list", "a list with an entry for each rank")
    for rank, handle in enumerate(handles):
        right = f"rank {rank}'s, of the same {dispatcher} dispatch as the others"
        own = (
            isinstance(handle, Handle)
            and (handle.dispatcher, handle.rank) == (dispatcher, rank)
            and handle.plan is handles[0].plan
        )
        require(
            own,
            f"handles[{rank}]",
            f"{handle.dispatcher}'s, of rank {handle.rank}" if isinstance(handle, Handle) else type(handle).__name__,
            right,
        )
    require(
        len(handles) == handles[0].plan.ranks,
        "handles",
        f"a list of {len(handles)}",
        f"a list of {handles[0].plan.ranks}, an entry for each rank",
    )
    if rows is not None:
        check_rows(rows, [tuple(own.shape) for own in handles[0].row_tokens])
    return handles[0].plan
