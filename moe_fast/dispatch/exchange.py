"""Send rows to other ranks and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.launch.autograd import once_differentiable
from moe_ref.config import require


@dataclass(frozen=True)
class Exchange:
    """How many rows go from each rank to each. Rows are ordered by destination when they leave, and
    by source when they arrive.
    """

    group: Any
    send: tuple[int, ...]  # rows to each rank
    receive: tuple[int, ...]  # rows from each rank

    @property
    def back(self) -> "Exchange":
        return Exchange(self.group, self.receive, self.send)


def size_and_rank(group: Any) -> tuple[int, int]:
    """(number of ranks W, this process's rank).

    Raises:
        ValueError: no process group, or one without this process.
    """
    require(
        group is None or isinstance(group, dist.ProcessGroup),
        "group",
        type(group).__name__,
        "a process group of torch.distributed, or None",
    )
    require(
        dist.is_initialized(),
        "group",
        "of no world",
        "of a world: torch.distributed.init_process_group has not been called",
    )
    return dist.get_world_size(group), dist.get_rank(group)


def counts_of_all(own_N: Tensor, group: Any) -> Tensor:
    """[W,N]: the counts of every rank."""
    ranks, _ = size_and_rank(group)
    counts = torch.empty((ranks, len(own_N)), dtype=torch.int64, device=own_N.device)  # the collective writes all of it
    dist.all_gather(list(counts.unbind(0)), own_N.to(torch.int64).contiguous(), group=group)
    return counts


def exchange_of(count_WW: Sequence[Sequence[int]], rank: int, group: Any) -> Exchange:
    """The rows that this rank sends and receives, if count[s][d] rows go from s to d."""
    return Exchange(group, tuple(count_WW[rank]), tuple(row[rank] for row in count_WW))


def exchanged(exchange: Exchange, *tensors: Tensor | None) -> list[Tensor | None]:
    """The rows of all tensors at their destinations, one record per row; gradients travel back."""
    present_tensors = [tensor for tensor in tensors if tensor is not None]
    arrived = iter(_Exchanged.apply(exchange, *present_tensors))
    return [None if tensor is None else next(arrived) for tensor in tensors]


class _Exchanged(torch.autograd.Function):
    """A permutation of rows over ranks, whose gradient is its inverse."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        out = _move(exchange, tensors)
        ctx.mark_non_differentiable(*(x for x in out if not x.is_floating_point() or x.element_size() == 1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        returned = iter(_move(ctx.exchange.back, [g for g, needed in zip(gradients, wanted, strict=True) if needed]))
        return None, *(next(returned) if needed else None for needed in wanted)


def _move(exchange: Exchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors at their destinations. They travel as bytes: few backends support every dtype."""
    columns = [as_bytes(tensor) for tensor in tensors]
    record = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    # the collective writes all of it
    arrived = torch.empty((sum(exchange.receive), record.shape[1]), dtype=torch.uint8, device=record.device)
    dist.all_to_all_single(arrived, record, list(exchange.receive), list(exchange.send), group=exchange.group)
    pieces = arrived.split([column.shape[1] for column in columns], dim=1)
    return tuple(from_bytes(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True))


def as_bytes(tensor: Tensor) -> Tensor:
    """[R, bytes of a row]: the rows as uint8."""
    # one row or column is contiguous with any stride; a vector is with one
    flat = tensor.detach().resolve_neg().contiguous().flatten()
    return flat.view(torch.uint8).reshape(len(tensor), prod(tensor.shape[1:]) * tensor.element_size())


def from_bytes(piece: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_bytes`."""
    shape = (len(piece), *like.shape[1:])
    return (
        piece.clone(memory_format=torch.contiguous_format).view(like.dtype).reshape(shape)
        if piece.numel()
        else like.new_empty(shape)
    )


def check_handle(handle: Any, kind: type, group: Any) -> None:
    """Raise `ValueError` unless combine gets its own dispatch's handle, and the same group."""
    require(isinstance(handle, kind), "handle", type(handle).__name__, "what the dispatch of this dispatcher returned")
    require(handle.exchange.group is group, "group", group, "the group that dispatch was given")


def check_combined(rows: Tensor, num_rows: int) -> None:
    """Raise `ValueError` unless combine gets as many rows as dispatch gave, and can add them."""
    is_legal = rows.dim() == 2 and len(rows) == num_rows and rows.is_floating_point() and rows.element_size() > 1
    require(
        is_legal,
        "rows",
        f"{tuple(rows.shape)} of {rows.dtype}",
        f"[{num_rows}, hidden], floating point, as dispatch gave them",
    )


def replicated(x_TH: Tensor, times: int) -> Tensor:
    """[times · T, H]: copies of x. The gradients of the copies are added in order, in the dtype of
    x.
    """
    return x_TH if times == 1 else _Replicated.apply(x_TH, times)


def added(parts_NTH: Tensor, between: torch.dtype) -> Tensor:
    """round(parts[0] + parts[1] + …), partial sums in dtype `between`; each has the gradient."""
    return parts_NTH[0] if len(parts_NTH) == 1 else _Added.apply(parts_NTH, between)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.repeat(times, *(1,) * (x.dim() - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _add(gradient.unflatten(0, (ctx.times, -1)), gradient.dtype), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, between: torch.dtype) -> Tensor:
        ctx.num_terms = len(terms)
        return _add(terms, between)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[None].expand(ctx.num_terms, *gradient.shape), None


def _add(terms: Tensor, between: torch.dtype) -> Tensor:
    total = terms[0].to(between)
    for term in terms[1:]:
        total = total + term.to(between)
    return total.to(terms.dtype)
