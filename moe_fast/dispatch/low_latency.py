"""DeepEP's low-latency mode: one copy per slot, to slabs of fixed size, and a weighted combine."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.deduplicated import longer, taken
from moe_fast.dispatch.exchange import Exchange, check_handle, counts_of_all, exchange_of, exchanged, size_and_rank
from moe_fast.dispatch.indices import EMPTY, apply_index_policy
from moe_fast.launch.autograd import once_differentiable
from moe_ref.config import (
    FP8_BLOCK,
    IndexPolicy,
    LowLatencyDispatched,
    check_rank_indices,
    check_rows,
    check_slab,
    require,
)

E4M3_MAX = 448.0  # OCP OFP8 1.0
SMALLEST_AMAX = 1e-4  # DeepEP's: a block of zeros still has a scale


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    exchange: Exchange
    row_D: Tensor  # where each arrived row stands in the slabs; one past them if it is free
    slot_TK: Tensor  # the row, of those that come back, that each slot reads; or -1
    shape: tuple[int, int]  # L, rows of a slab


def deepep_low_latency_dispatch(
    tokens_TH: Tensor, indices_TK: Tensor,
    *, num_experts: int, max_tokens_per_rank: int, use_fp8: bool = False, round_scale: bool = False,
    policy: IndexPolicy | None = None, group: Any = None,
) -> LowLatencyDispatched:  # fmt: skip
    """Send a copy of each token per slot to the slab of its expert.

    From each rank to each travel as many rows as all slots of all tokens may fill. The host reads
    no count, and nothing at all if the policy trusts values.
    """
    ranks, rank = size_and_rank(group)
    check_rank_indices([tokens_TH] * ranks, [indices_TK] * ranks, None, num_experts)
    check_slab([tokens_TH], max_tokens_per_rank, use_fp8, round_scale)
    policy = policy or IndexPolicy()
    kept_TK, _ = apply_index_policy(indices_TK, None, num_experts, policy)
    local, slab = num_experts // ranks, ranks * max_tokens_per_rank
    own_E = (kept_TK.flatten()[:, None] == torch.arange(num_experts, device=kept_TK.device)).sum(0)
    count_SE = counts_of_all(own_E, group)
    slots = kept_TK.shape[1] if policy.duplicates == "count each" else min(kept_TK.shape[1], local)
    most = max_tokens_per_rank * slots  # copies from one rank to one
    exchange = exchange_of([[most] * ranks] * ranks, rank, group)
    place_TK = _places(kept_TK, own_E.unflatten(0, (ranks, local)).sum(1), most)
    token_N = _tokens(place_TK, ranks * most)
    if use_fp8:
        codes, scale = (taken(longer(x, 1), token_N) for x in _for_the_wire(tokens_TH, round_scale))
    else:
        codes, scale = _Copied.apply(tokens_TH, token_N, place_TK), None
    arrived = exchanged(exchange, codes, scale, token_N)
    count_SL = count_SE[:, rank * local : (rank + 1) * local]
    begin_LS = count_SL.T.cumsum(1) - count_SL.T
    row_D = _rows(count_SL, begin_LS, most, slab)
    rows, scales, numbers = (None if x is None else _placed(x, row_D, (local, slab)) for x in arrived)
    assert rows is not None and numbers is not None
    same_TKK = (kept_TK[:, :, None] == kept_TK[:, None, :]) & (kept_TK != EMPTY)[:, :, None]
    # of a repeated expert, the later row
    last_TK = torch.where(same_TKK, place_TK[:, None, :], EMPTY).amax(2) if kept_TK.shape[1] else place_TK
    handle = Handle(exchange, row_D, last_TK, (local, slab))
    return LowLatencyDispatched(rows, scales, count_SL.sum(0), numbers, begin_LS * 2**32 + count_SL.T, handle)


def deepep_low_latency_combine(
    rows: Tensor, indices_TK: Tensor, probs: Tensor, handle: Handle, *, group: Any = None
) -> Tensor:
    """Send each row back and add each token's rows, weighted.

    Raises:
        ValueError: rows of another shape than dispatch's, another group, or other numbers of tokens
            or slots.
    """
    check_handle(handle, Handle, group)
    check_rows([rows], [handle.shape])
    for name, tensor in (("indices", indices_TK), ("probs", probs)):
        require(
            tensor.shape == handle.slot_TK.shape,
            name,
            f"of shape {tuple(tensor.shape)}",
            f"of shape {tuple(handle.slot_TK.shape)}, as dispatch's",
        )
    sum_dtype = torch.float64 if torch.float64 in (rows.dtype, probs.dtype) else torch.float32
    (home,) = exchanged(handle.exchange.back, longer(rows.flatten(0, 1), 1)[handle.row_D])
    assert home is not None
    home = torch.cat(
        [home.to(sum_dtype), home.new_zeros((1, rows.shape[2]), dtype=sum_dtype)]
    )  # the last row is for empty slots
    total = home.new_zeros((len(indices_TK), rows.shape[2]))
    for row_T, prob_T in zip(handle.slot_TK.unbind(1), probs.to(sum_dtype).unbind(1), strict=True):
        total = total + torch.where(row_T == EMPTY, 0.0, prob_T)[:, None] * home[row_T]
    return total.to(rows.dtype)


class _Copied(torch.autograd.Function):
    """out[i] = tokens[token_N[i]]. The gradients of a token's copies are added in order, in
    float32, or in float64 for float64.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_N: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return taken(longer(tokens, 1), token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        sum_dtype = torch.float64 if d_rows.dtype == torch.float64 else torch.float32
        rows = torch.cat([d_rows.to(sum_dtype), d_rows.new_zeros((1, d_rows.shape[1]), dtype=sum_dtype)])
        total = rows.new_zeros((len(place_TK), d_rows.shape[1]))
        for place_T in place_TK.where(place_TK != EMPTY, len(d_rows)).sort(1).values.unbind(1):
            total = total + rows[place_T]
        return total.to(d_rows.dtype), None, None


def _places(kept_TK: Tensor, count_W: Tensor, most: int) -> Tensor:
    """[T,K]: the row in which each slot's copy leaves, or -1. The rows for each rank begin at a
    multiple of `most`; they are ordered by expert, then by token and slot.
    """
    order_N = kept_TK.flatten().sort(stable=True).indices  # empty slots in front
    number_N = torch.empty_like(order_N)  # the next line writes all of it
    number_N[order_N] = torch.arange(len(order_N), device=kept_TK.device) - (len(order_N) - count_W.sum())
    ends_W = count_W.cumsum(0)
    rank_N = torch.searchsorted(ends_W, number_N, right=True).clamp(max=len(count_W) - 1)
    row_N = rank_N * most + number_N - (ends_W - count_W)[rank_N]
    return torch.where(number_N < 0, EMPTY, row_N).reshape(kept_TK.shape)


def _tokens(place_TK: Tensor, rows: int) -> Tensor:
    """[rows]: the token of each row that leaves; T for free rows."""
    number_TK = torch.arange(len(place_TK), device=place_TK.device)[:, None].expand(place_TK.shape)
    token_N = torch.full((rows + 1,), len(place_TK), device=place_TK.device)  # the last entry is for empty slots
    return token_N.scatter(0, place_TK.where(place_TK != EMPTY, rows).flatten(), number_TK.flatten())[:-1]


def _rows(count_SL: Tensor, begin_LS: Tensor, most: int, slab: int) -> Tensor:
    """[W · most]: the position of each arrived row in the slabs; one past the slabs for
    a free row.
    """
    ranks, local = count_SL.shape
    ends_SL = count_SL.cumsum(1)
    number_SM = torch.arange(most, device=count_SL.device).repeat(ranks, 1)
    local_SM = torch.searchsorted(ends_SL, number_SM, right=True)
    free_SM, held_SM = local_SM == local, local_SM.clamp(max=local - 1)
    start_SM = (begin_LS.T - (ends_SL - count_SL)).gather(1, held_SM)
    return torch.where(free_SM, local * slab, held_SM * slab + start_SM + number_SM).flatten()


def _placed(x_D: Tensor, row_D: Tensor, shape: tuple[int, int]) -> Tensor:
    """[L, rows of a slab, …]: each row at its position, and 0 elsewhere; free rows are left out."""
    if x_D.element_size() == 1:  # fp8 has no indexing on every torch, and no gradient here
        return _placed(x_D.view(torch.uint8).to(torch.int16), row_D, shape).to(torch.uint8).view(x_D.dtype)
    slabs = x_D.new_zeros((shape[0] * shape[1] + 1, *x_D.shape[1:])).index_put((row_D,), x_D)
    return slabs[:-1].unflatten(0, shape)


def _for_the_wire(x_TH: Tensor, round_scale: bool) -> list[Tensor]:
    """The E4M3 codes, and a scale for each block of 128 columns, by DeepEP's rule."""
    blocks = x_TH.detach().to(torch.float32).unflatten(1, (-1, FP8_BLOCK))
    amax = torch.where(torch.isnan(blocks), 0, blocks.abs()).amax(2).clamp(min=SMALLEST_AMAX)
    scale, inverse = amax * (1 / E4M3_MAX), torch.full_like(amax, E4M3_MAX) / amax  # number / tensor would round twice
    if round_scale:
        mantissa, exponent = torch.frexp(scale)  # mantissa · 2^exponent, from ½ to 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale, inverse = torch.ldexp(torch.ones_like(scale), exponent), torch.ldexp(torch.ones_like(scale), -exponent)
    codes = (blocks * inverse[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return [codes.view(torch.uint8).flatten(1).view(torch.float8_e4m3fn), scale]
