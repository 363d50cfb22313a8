"""DeepEP's low-latency mode: a copy per slot, into slabs of a fixed size, and a weighted combine.

    layout   a slab of W·M rows per expert, filled by source, then token and slot
    mover    each slot's copy to the rank of its expert
    tree     Σ slots of prob · row → round

Mirrors `low_latency_dispatch` and `low_latency_combine` of deep_ep.Buffer. Differs:
docs/differences.md#dispatchers.
"""

import torch
from torch import Tensor

from moe_ref.config import (
    FP8_BLOCK,
    IndexPolicy,
    LowLatencyDispatched,
    PerRank,
    check_rank_indices,
    check_rank_probs,
    check_rows,
    check_slab,
    require,
)
from moe_ref.dispatch.exchange import Handle, move, plan_of
from moe_ref.dispatch.indices import apply_index_policy
from moe_ref.dispatch.plan import Layout, RoutePlan, exclusive_sum, owners, plan_of_indices
from moe_ref.permutation.rows import PADDING, take_rows
from moe_ref.quantization.recipes import nearest32
from moe_ref.rounding import accumulator_dtype, round_to

E4M3_MAX = 448.0  # OCP OFP8 1.0
SMALLEST_AMAX = 1e-4  # DeepEP's: a block of zeros still has a scale


class LowLatencyHandle(Handle):
    """`Handle` of `deepep_low_latency_dispatch`."""


def deepep_low_latency_dispatch(
    tokens: PerRank[Tensor], indices: PerRank[Tensor],
    *, num_experts: int, max_tokens_per_rank: int, use_fp8: bool = False, round_scale: bool = False,
    policy: IndexPolicy | None = None,
) -> list[LowLatencyDispatched]:  # fmt: skip
    """Send a copy of each token per slot, into the slab of the slot's expert.

        rows_w[l] = [tokens_s[t] for s in ranks for t, k in slots of s if indices_s[t, k] = w·L + l]

    The slab of an expert has W·M rows, M = `max_tokens_per_rank`. Real ranks write in the order of
    arrival: `layout_range` and `source_tokens` give it; compare a multiset of (source, token).

    Args:
        tokens: [T_r,H] of each rank, T_r ≤ M; floating point with `use_fp8`.
        indices: [T_r,K] integers from -1 to E - 1.
        num_experts: E, of all ranks together.
        max_tokens_per_rank: M, the same on all ranks. A repeated expert that counts each time needs
            a row each time.
        use_fp8: rows travel as E4M3, see `quantize_for_wire`.
        round_scale: scales are powers of two.
        policy: of repeated experts and empty slots; None for `IndexPolicy()`.

    Rounding: none without `use_fp8`. dtokens is the flat sum over ranks, experts and slots,
    ascending, rounded once; with `use_fp8` there is none.

    Raises:
        ValueError: see `moe_ref.config`: check_rank_indices, check_index_values, check_slab; and
            the policy.
    """
    check_rank_indices(tokens, indices, None, num_experts)
    check_slab(tokens, max_tokens_per_rank, use_fp8, round_scale)
    policy, slab = policy or IndexPolicy(), len(tokens) * max_tokens_per_rank
    rank_slots = [apply_index_policy(index_TK, None, num_experts=num_experts, policy=policy)[0] for index_TK in indices]
    plan = plan_of_indices(rank_slots, num_experts, Layout(segment=slab))
    row_tokens = plan.row_tokens_of_ranks()
    shape = (plan.local_experts, slab)
    scales: list[Tensor | None] = [None] * plan.ranks
    payload = list(tokens)
    if use_fp8:
        codes, wire_scales = zip(
            *(quantize_for_wire(x_TH.detach(), round_scale=round_scale) for x_TH in tokens), strict=True
        )
        payload, scales = list(codes), [scale.unflatten(0, shape) for scale in move(wire_scales, row_tokens)]
    rows = move(payload, row_tokens)
    _, local_G = owners(plan.tokens, plan.token_R.device)
    results = []
    for rank, token_P in enumerate(row_tokens):
        source_P = torch.where(token_P == PADDING, PADDING, take_rows(local_G, token_P))
        fields = (plan.kept_WL[rank], source_P.reshape(shape), _layout_range(plan, rank))
        handle = LowLatencyHandle(rank, plan, row_tokens)
        results.append(LowLatencyDispatched(rows[rank].unflatten(0, shape), scales[rank], *fields, handle))
    return results


def deepep_low_latency_combine(
    rows: PerRank[Tensor], indices: PerRank[Tensor], probs: PerRank[Tensor], handles: PerRank[LowLatencyHandle]
) -> list[Tensor]:
    """Send each row back and add each token's rows, weighted.

        y[t] = round(Σ_{k ascending, indices[t, k] ≠ -1} probs[t, k] · (row of slot k))

    A token that names an expert twice has two rows there, and both slots read the later one: the
    second contribution overwrites the first.

    Args:
        rows: [L,W·M,H] floating point of each rank, in the order of dispatch's rows. Rows past the
            counts are not read.
        indices: [T_r,K], as dispatch was given them; slots that its policy emptied stay empty.
        probs: [T_r,K] floating point, not read in empty slots.
        handles: as this implementation's `deepep_low_latency_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without slots is 0.

    Rounding: products and sums in float32 (float64 if rows or probs are), one rounding to the rows'
    dtype; drows too. dprobs[t, k] = Σ_h row[h] · dy[t, h], rounded once to the probs' dtype.

    Raises:
        ValueError: handles of another call, rows of other shapes, or other numbers of slots or
            tokens.
    """
    plan = plan_of(handles, LowLatencyHandle)
    slab = (plan.local_experts, plan.num_rows[0] // plan.local_experts)
    check_rows(rows, [slab] * plan.ranks)
    lengths = [len(index_TK) for index_TK in indices]
    require(tuple(lengths) == plan.tokens, "indices", f"of {lengths} rows", f"of {list(plan.tokens)} rows")
    check_rank_probs(probs, indices)
    used = int(plan.slot_R.max()) + 1 if len(plan.slot_R) else 0
    requirement = f"of at least {used} slots, as dispatch was given them"
    require(indices[0].shape[1] >= used, "indices", f"of shape {tuple(indices[0].shape)}", requirement)
    accumulator = accumulator_dtype(torch.promote_types(rows[0].dtype, probs[0].dtype))
    all_rows = torch.cat([slabs.flatten(0, 1).to(accumulator) for slabs in rows])
    prob_GK = torch.cat(list(probs)).to(accumulator)
    row_GK = slot_rows(plan, prob_GK.shape[1])
    total_GH = all_rows.new_zeros((sum(plan.tokens), all_rows.shape[1]))
    for row_G, prob_G in zip(row_GK.unbind(1), prob_GK.unbind(1), strict=True):
        weight_G = torch.where(row_G == PADDING, torch.zeros_like(prob_G), prob_G)
        total_GH = total_GH + weight_G[:, None] * take_rows(all_rows, row_G)
    return list(round_to(total_GH, rows[0].dtype).split(list(plan.tokens)))


def quantize_for_wire(x_TH: Tensor, *, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 128 columns of each row to E4M3.

        amax  = max(|x|, 1e-4) over the block, which passes over NaN: a NaN is lost alone
        scale = amax · (1/448), 1/448 rounded to float32; with `round_scale` 2^⌈log₂ scale⌉
        code  = round(x · m) to E4M3, clamped at ±448, m = 448 / amax; with `round_scale` 1 / scale

    Returns:
        (codes [T,H] float8_e4m3fn, scales [T,H/128] float32).

    Source: DeepEP's csrc/kernels/internode_ll.cu; per_token_cast_to_fp8 of its tests.
    """
    blocks = x_TH.to(torch.float32).unflatten(1, (-1, FP8_BLOCK))
    amax = torch.where(torch.isnan(blocks), 0, blocks.abs()).amax(2).clamp(min=SMALLEST_AMAX)
    scale, inverse = amax * nearest32(1 / E4M3_MAX), torch.full_like(amax, E4M3_MAX) / amax
    if round_scale:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent with ½ ≤ mantissa < 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale, inverse = torch.ldexp(torch.ones_like(scale), exponent), torch.ldexp(torch.ones_like(scale), -exponent)
    codes = (blocks * inverse[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale


def _layout_range(plan: RoutePlan, rank: int) -> Tensor:
    """[L,W]: begin · 2^32 + count of each source's segment in the slabs of the rank."""
    first = rank * plan.local_experts
    count_LW = plan.count_WE[:, first : first + plan.local_experts].T
    return exclusive_sum(count_LW) * 2**32 + count_LW


def slot_rows(plan: RoutePlan, slots: int) -> Tensor:
    """[G,K]: the row, all ranks' buffers one below the other, that each slot reads, or PADDING for
    an empty slot.
    """
    num_experts = plan.ranks * plan.local_experts
    cell_R = plan.token_R * num_experts + plan.expert_R
    place_R = plan.expert_R // plan.local_experts * plan.num_rows[0] + plan.row_R
    empty = torch.full((sum(plan.tokens) * num_experts,), PADDING, device=cell_R.device)
    last = empty.scatter_reduce(0, cell_R, place_R, "amax")  # rows of a cell ascend with the slot
    slot_GK = plan.token_R * slots + plan.slot_R
    row_GK = torch.full((sum(plan.tokens) * slots,), PADDING, device=cell_R.device)
    return row_GK.index_copy(0, slot_GK, last[cell_R]).reshape(-1, slots)
