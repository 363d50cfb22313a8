"""DeepEP's low-latency mode: one copy per slot, to slabs of fixed size, and a weighted combine."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """What combine needs of its dispatch."""

    exchange: Exchange
    row_D: Tensor  # where each arrived row stands in the slabs
    slot_TK: Tensor  # which of the rows that come back each slot reads, or -1
    shape: tuple[int, int]  # L, rows of a slab


def deepep_low_latency_dispatch(
    tokens_TH: Tensor, indices_TK: Tensor,
    *, num_experts: int, max_tokens_per_rank: int, use_fp8: bool = False, round_scale: bool = False,
    policy: IndexPolicy | None = None, group: Any = None,
) -> LowLatencyDispatched:  # fmt: skip
    """Send a copy of each token per slot to the slab of its expert. The host reads the counts."""
    ranks, rank = size_and_rank(group)
    check_rank_indices([tokens_TH] * ranks, [indices_TK] * ranks, None, num_experts)
    check_slab([tokens_TH], max_tokens_per_rank, use_fp8, round_scale)
    kept_TK, _ = apply_index_policy(indices_TK, None, num_experts, policy)
    local, slab = num_experts // ranks, ranks * max_tokens_per_rank
    own_E = (kept_TK.flatten()[:, None] == torch.arange(num_experts, device=kept_TK.device)).sum(0)
    count_SE = counts_of_all(own_E, group)
    exchange = exchange_of(count_SE.unflatten(1, (ranks, local)).sum(2).tolist(), rank, group)
    # by expert, in an expert by token and slot; empty slots in front
    copy_N = kept_TK.flatten().sort(stable=True).indices
    copy_N = copy_N[kept_TK.numel() - sum(exchange.send) :]
    token_N = copy_N // max(kept_TK.shape[1], 1)
    place_TK = _places(kept_TK, copy_N)
    if use_fp8:
        codes, scale = _for_the_wire(tokens_TH, round_scale)
        codes, scale = codes.view(torch.uint8)[token_N].view(codes.dtype), scale[token_N]
    else:
        codes, scale = _Copied.apply(tokens_TH, token_N, place_TK), None
    arrived = exchanged(exchange, codes, scale, token_N)
    count_SL = count_SE[:, rank * local : (rank + 1) * local]
    begin_LS = count_SL.T.cumsum(1) - count_SL.T
    chunk_of_D = torch.arange(ranks * local, device=kept_TK.device).repeat_interleave(
        count_SL.flatten(), output_size=sum(exchange.receive)
    )
    place_in_chunk = (
        torch.arange(len(chunk_of_D), device=kept_TK.device)
        - (count_SL.flatten().cumsum(0) - count_SL.flatten())[chunk_of_D]
    )
    source_D, local_D = chunk_of_D // local, chunk_of_D % local
    row_D = local_D * slab + begin_LS[local_D, source_D] + place_in_chunk
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
    for name, given in (("indices", indices_TK), ("probs", probs)):
        require(
            given.shape == handle.slot_TK.shape,
            name,
            f"of shape {tuple(given.shape)}",
            f"of shape {tuple(handle.slot_TK.shape)}, as dispatch's",
        )
    wide = torch.float64 if torch.float64 in (rows.dtype, probs.dtype) else torch.float32
    (home,) = exchanged(handle.exchange.back, rows.flatten(0, 1)[handle.row_D])
    assert home is not None
    home = torch.cat([home.to(wide), home.new_zeros((1, rows.shape[2]), dtype=wide)])  # the last row is for empty slots
    total = home.new_zeros((len(indices_TK), rows.shape[2]))
    for row_T, prob_T in zip(handle.slot_TK.unbind(1), probs.to(wide).unbind(1), strict=True):
        total = total + torch.where(row_T == EMPTY, 0.0, prob_T)[:, None] * home[row_T]
    return total.to(rows.dtype)


class _Copied(torch.autograd.Function):
    """tokens[token of each copy]; a token's gradients are added in order, in float32 or float64."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_N: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return tokens.view(torch.uint8)[token_N].view(tokens.dtype) if tokens.element_size() == 1 else tokens[token_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        wide = torch.float64 if d_rows.dtype == torch.float64 else torch.float32
        rows = torch.cat([d_rows.to(wide), d_rows.new_zeros((1, d_rows.shape[1]), dtype=wide)])
        total = rows.new_zeros((len(place_TK), d_rows.shape[1]))
        for place_T in place_TK.where(place_TK != EMPTY, len(d_rows)).sort(1).values.unbind(1):
            total = total + rows[place_T]
        return total.to(d_rows.dtype), None, None


def _places(kept_TK: Tensor, copy_N: Tensor) -> Tensor:
    """[T,K]: which of the copies is each slot's, or -1."""
    places = torch.full((kept_TK.numel(),), EMPTY, device=kept_TK.device)
    return places.index_put((copy_N,), torch.arange(len(copy_N), device=kept_TK.device)).reshape(kept_TK.shape)


def _placed(x_D: Tensor, row_D: Tensor, shape: tuple[int, int]) -> Tensor:
    """[L, rows of a slab, …] with each row where it belongs, and 0 elsewhere."""
    if x_D.element_size() == 1:  # fp8 has no indexing on every torch, and no gradient here
        return _placed(x_D.view(torch.uint8).to(torch.int16), row_D, shape).to(torch.uint8).view(x_D.dtype)
    return x_D.new_zeros((shape[0] * shape[1], *x_D.shape[1:])).index_put((row_D,), x_D).unflatten(0, shape)


def _for_the_wire(x_TH: Tensor, round_scale: bool) -> list[Tensor]:
    """Codes in E4M3 and a scale for each block of 128 columns, by DeepEP's rule."""
    blocks = x_TH.detach().to(torch.float32).unflatten(1, (-1, FP8_BLOCK))
    amax = torch.where(torch.isnan(blocks), 0, blocks.abs()).amax(2).clamp(min=SMALLEST_AMAX)
    scale, inverse = amax * (1 / E4M3_MAX), torch.full_like(amax, E4M3_MAX) / amax  # number / tensor would round twice
    if round_scale:
        mantissa, exponent = torch.frexp(scale)  # mantissa · 2^exponent, from ½ to 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale, inverse = torch.ldexp(torch.ones_like(scale), exponent), torch.ldexp(torch.ones_like(scale), -exponent)
    codes = (blocks * inverse[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return [codes.view(torch.uint8).flatten(1).view(torch.float8_e4m3fn), scale]
