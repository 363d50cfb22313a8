"""Transformer Engine's mask permutation as its sources document it, computed by the reference.

Addresses that its kernels would read or write out of bounds raise IndexError here.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from moe_ref.permutation.permute import RowMap
from moe_ref.permutation.rows import PADDING, sum_rows, take_rows
from tests.te.standin.quantized import QuantisedRows


class Cells:
    """The routed (token, expert) cells in the order of their rows: by expert, then by token."""

    def __init__(self, routing_map: Tensor) -> None:
        self.num_tokens, self.num_experts = routing_map.shape
        expert, token = (routing_map != 0).T.nonzero(as_tuple=True)
        self.token, self.expert = token, expert

    @property
    def counts(self) -> Tensor:
        return torch.bincount(self.expert, minlength=self.num_experts)


def wide_map(cells: Cells) -> Tensor:
    """int32 [N, 2E+1]: a token's rows descending, their experts, their number; else undefined."""
    experts = cells.num_experts
    out = torch.empty((cells.num_tokens, 2 * experts + 1), dtype=torch.int32, device=cells.token.device)
    number = torch.bincount(cells.token, minlength=cells.num_tokens)
    out[:, -1] = number.int()
    rows = torch.arange(len(cells.token), device=cells.token.device).flip(0)
    order = cells.token[rows].argsort(stable=True)
    rows = rows[order]
    token = cells.token[rows]
    slot = torch.arange(len(rows), device=rows.device) - (number.cumsum(0) - number)[token]
    out[token, slot] = rows.int()
    out[token, experts + slot] = cells.expert[rows].int()
    return out


def narrow_map(cells: Cells) -> Tensor:
    """int64 [E, N]: the row of an expert's token, or -1."""
    out = torch.full((cells.num_experts, cells.num_tokens), -1, device=cells.token.device)
    out[cells.expert, cells.token] = torch.arange(len(cells.token), device=cells.token.device)
    return out


def entries(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """(token, expert, row) in the order of the sum, and the numbers of tokens and experts."""
    if row_id_map.dtype == torch.int64:
        expert, token = (row_id_map >= 0).nonzero(as_tuple=True)
        return token, expert, row_id_map[expert, token], row_id_map.shape[1], row_id_map.shape[0]
    experts = (row_id_map.shape[1] - 1) // 2
    columns = torch.arange(experts, device=row_id_map.device)
    token, slot = (columns < row_id_map[:, -1:]).nonzero(as_tuple=True)
    expert, row = row_id_map[token, experts + slot].long(), row_id_map[token, slot].long()
    return token, expert, row, len(row_id_map), experts


class _Permute(torch.autograd.Function):
    """Rows and their probs at `place`; the backward does not look at the probs."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, probs: Tensor | None, cells: Cells, source: Tensor, behaviour: SimpleNamespace
    ) -> tuple[Tensor, Tensor | None]:
        ctx.cells, ctx.source, ctx.behaviour = cells, source, behaviour
        real = source >= 0
        token, expert = cells.token[source[real]], cells.expert[source[real]]
        rows = take_rows(inp.detach(), torch.where(real, cells.token[source], PADDING))
        row_probs = None
        if probs is not None:
            row_probs = probs.new_zeros(len(source))
            row_probs[real] = probs.detach()[token, expert]
            if behaviour.zero_prob_rows:
                rows[real.nonzero().flatten()[row_probs[real] == 0]] = 0
            ctx.probs_shape = probs.shape
        return rows, row_probs

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_probs: Tensor | None) -> tuple[Any, ...]:
        cells, real = ctx.cells, ctx.source >= 0
        token = torch.where(real, cells.token[ctx.source], PADDING)
        d_inp = grad = None
        if ctx.needs_input_grad[0]:
            if ctx.behaviour.wide_row_id_map:  # by descending expert
                d_rows, token = d_rows.flip(0), token.flip(0)
            d_inp = sum_rows(d_rows, token, cells.num_tokens)
        if ctx.needs_input_grad[1] and (ctx.needs_input_grad[0] or ctx.behaviour.probs_gradient_alone):
            assert d_probs is not None
            grad = d_probs.new_zeros(ctx.probs_shape)
            grad[cells.token[ctx.source[real]], cells.expert[ctx.source[real]]] = d_probs[real]
        return d_inp, grad, None, None, None


class _WithoutGradient(torch.autograd.Function):
    """The same numbers, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> None:
        return None


class Permutation:
    """The functions of one release, with the newest names of their arguments."""

    def __init__(self, behaviour: SimpleNamespace) -> None:
        self.behaviour = behaviour

    def moe_permute(
        self, inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
    ) -> tuple[Tensor, Tensor]:
        """(rows [R,H], row_id_map)."""
        if map_type != "mask":
            raise NotImplementedError(f"map_type is {map_type!r}; the stand-in has 'mask' alone")
        rows, _, row_id_map = self._permuted(inp, None, routing_map, num_out_tokens)
        return rows, row_id_map

    def moe_permute_with_probs(
        self, inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [R,H], probs [R], row_id_map)."""
        return self._permuted(inp, probs, routing_map, num_out_tokens)

    def _permuted(self, inp: Any, probs: Tensor | None, routing_map: Tensor, num_rows: int) -> Any:
        if isinstance(inp, QuantisedRows):
            inp.check(len(routing_map))
            token = Cells(routing_map).token
            _, row_probs, row_id_map = self._permuted(
                inp._rowwise_data.new_zeros((len(routing_map), 1)).float(), probs, routing_map, num_rows
            )
            return inp.moved(lambda x: take_rows(x, token)), row_probs, row_id_map
        if inp.numel() == 0:
            return self._empty(inp, probs, routing_map.shape[1])
        if self.behaviour.asserts_rows:
            assert num_rows > 0, "num_out_tokens must be positive"
        cells = Cells(routing_map)
        needed = len(cells.token)
        if 0 <= num_rows < needed:
            raise IndexError(f"num_out_tokens is {num_rows}; {needed} rows are written")
        rows, row_probs = _Permute.apply(inp, probs, cells, torch.arange(needed, device=inp.device), self.behaviour)
        if num_rows > needed:  # the tail is never written
            rows = torch.cat([rows, rows.new_empty((num_rows - needed, inp.shape[1]))])
            row_probs = None if probs is None else torch.cat([row_probs, probs.new_empty(num_rows - needed)])
        return rows, row_probs, self._map(cells)

    def _map(self, cells: Cells) -> Tensor:
        return wide_map(cells) if self.behaviour.wide_row_id_map else narrow_map(cells)

    def _empty(self, inp: Tensor, probs: Tensor | None, experts: int) -> Any:
        if self.behaviour.typed_empty_maps:
            row_id_map = torch.zeros((0, 2 * experts + 1), dtype=torch.int32, device=inp.device)
            return inp.clone(), None if probs is None else probs.new_zeros(0), row_id_map
        nothing = torch.zeros(0, device=inp.device)
        return inp.clone() if self.behaviour.asserts_rows else inp, nothing, nothing

    def moe_permute_and_pad_with_probs(
        self, inp: Any, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
    ) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor]:
        """(rows [P,H], probs [P], row_id_map, pad_offsets or None, padded counts [E] int64)."""
        assert align_size > 0, "align_size must be positive"
        padded = (tokens_per_expert / align_size).ceil().long() * align_size
        if torch.equal(padded, tokens_per_expert):
            num_rows = int(padded.sum())
            return (*self._permuted(inp, probs, routing_map, num_rows), None, padded)
        padding = padded - tokens_per_expert
        offsets = padding.cumsum(0) - padding
        cells = Cells(routing_map)
        source = torch.full((int(padded.sum()),), PADDING, device=probs.device)
        rows = torch.arange(len(cells.token), device=probs.device)
        source[rows + offsets[cells.expert]] = rows
        is_quantised = isinstance(inp, QuantisedRows)
        plain_rows = torch.zeros(len(routing_map), 1, device=probs.device) if is_quantised else inp
        out, row_probs = _Permute.apply(plain_rows, probs, cells, source, self.behaviour)
        if is_quantised:
            inp.check(len(routing_map))
            token = torch.where(source >= 0, cells.token[source], PADDING)
            out = inp.moved(lambda x: take_rows(x, token))
        return out, row_probs, self._map(cells), offsets, padded

    def moe_unpermute(
        self, inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None, pad_offsets=None
    ):
        """[N,H]: sums in float32, by ascending expert before 2.6 and by descending expert since."""
        merging = merging_probs if probs is None else probs
        if inp.numel() == 0:
            return inp
        token, expert, row, num_tokens, num_experts = entries(row_id_map)
        row = row if pad_offsets is None else row + pad_offsets[expert]
        num_restored = len(inp) if restore_shape is None else restore_shape[0]
        if num_restored != num_tokens or (len(row) and int(row.max()) >= len(inp)):
            raise IndexError(f"{num_restored} tokens of {len(inp)} rows are restored; the map is of {num_tokens}")
        if merging is not None and not inp.requires_grad and not self.behaviour.probs_gradient_alone:
            merging = _WithoutGradient.apply(merging)
        return moe_ref.unpermute(take_rows(inp, row), RowMap(token, expert, num_tokens, num_experts), probs=merging)

    def moe_sort_chunks_by_index(self, inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
        """[M,H]: one tensor, whatever its annotation says."""
        return self._sorted(inp, None, split_sizes, sorted_index)[0]

    def moe_sort_chunks_by_index_with_probs(
        self, inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(rows [M,H], probs [M])."""
        return self._sorted(inp, probs, split_sizes, sorted_index)

    def _sorted(self, inp: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor) -> Any:
        if inp.numel() == 0:
            return inp.clone(), None if probs is None else probs.clone()
        if len(sizes) == 0:
            raise ValueError("split_sizes is empty; a kernel's range must have an end above its start")
        rows, row_probs = moe_ref.sort_chunks(inp, sizes, order, probs=probs)
        total = int(sizes.sum())
        if total < len(inp) and not self.behaviour.keeps_tail:  # its places are undefined
            rows = torch.cat([rows[:total], rows.new_empty((len(inp) - total, *inp.shape[1:]))])
            row_probs = None if probs is None else torch.cat([row_probs[:total], probs.new_empty(len(inp) - total)])
        return rows, row_probs
