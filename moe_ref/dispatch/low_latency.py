"""DeepEP's low-latency mode: a copy for every slot, into slabs whose sizes are known beforehand, and a weighted combine.

Mirrors `low_latency_dispatch` and `low_latency_combine` of deep_ep.Buffer.
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
from moe_ref.dispatch.exchange import Handle, move, plan_of, take_rows
from moe_ref.dispatch.indices import apply_index_policy
from moe_ref.dispatch.plan import NOWHERE, Layout, RoutePlan, exclusive_sum, owners, plan_of_indices
from moe_ref.quantization.recipes import nearest32
from moe_ref.rounding import accumulator_dtype, round_to

E4M3_MAX = 448.0  # OCP OFP8 1.0
SMALLEST_AMAX = 1e-4  # DeepEP's: a block of zeros still has a scale


def deepep_low_latency_dispatch(
    tokens: PerRank[Tensor],
    indices: PerRank[Tensor],
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    use_fp8: bool = False,
    round_scale: bool = False,
    policy: IndexPolicy | None = None,
) -> list[LowLatencyDispatched]:
    """Send a copy of each token for every slot of it, into the slab of its expert.

        rows_w[l] = [tokens_s[t] for s in ranks for t in tokens of s for k in slots if indices_s[t, k] = w·L + l]

    The slab of an expert has W·M rows, M = `max_tokens_per_rank`. That order of sources, and of rows inside a source's segment, is this
    reference's: a real one has whatever order arrives. `layout_range` and `source_tokens` say which; compare the rows as a multiset of
    (source, token).

    Args:
        tokens: [T_r,H] of each rank, T_r ≤ M; floating point with `use_fp8`.
        indices: [T_r,K] integers from -1 to E - 1.
        num_experts: E, of all ranks together.
        max_tokens_per_rank: M, the same everywhere. A repeated expert that is counted each time needs a row each time.
        use_fp8: rows travel as E4M3, see `quantize_for_wire`.
        round_scale: scales are powers of two.
        policy: of repeated experts, empty slots and probabilities 0 (of which there are none here); None for `IndexPolicy()`.

    Returns:
        `LowLatencyDispatched` of each rank.

    Rounding: none without `use_fp8`. dtokens is the flat sum over ranks, experts and slots, ascending, rounded once; with `use_fp8` there is none.

    Raises:
        ValueError: see `moe_ref.config`: check_rank_indices, check_index_values, check_slab; and what the policy rejects.
    """
    check_rank_indices(tokens, indices, None, num_experts)
    check_slab(tokens, max_tokens_per_rank, use_fp8, round_scale)
    kept = [
        apply_index_policy(own, None, num_experts=num_experts, policy=policy or IndexPolicy())[0] for own in indices
    ]
    slab = len(tokens) * max_tokens_per_rank
    plan = plan_of_indices(kept, num_experts, Layout(segment=slab))
    row_tokens = tuple(plan.row_tokens(rank) for rank in range(plan.ranks))

    if use_fp8:
        codes, scales = quantize_for_wire(torch.cat(list(tokens)), round_scale=round_scale)
        rows, row_scales = [take_rows(codes, own) for own in row_tokens], [take_rows(scales, own) for own in row_tokens]
    else:
        rows, row_scales = move(tokens, row_tokens), []
    _, local_G = owners(plan.tokens, plan.token_R.device)
    shape = (plan.local_experts, slab)
    results = []
    for w in range(plan.ranks):
        own_scales = row_scales[w].unflatten(0, shape) if use_fp8 else None
        source_tokens = torch.where(row_tokens[w] == NOWHERE, NOWHERE, take_rows(local_G, row_tokens[w])).reshape(shape)
        handle = Handle("deepep low latency", w, plan, row_tokens)
        results.append(
            LowLatencyDispatched(
                rows[w].unflatten(0, shape), own_scales, plan.kept_WL[w], source_tokens, _layout_range(plan, w), handle
            )
        )
    return results


def deepep_low_latency_combine(
    rows: PerRank[Tensor], indices: PerRank[Tensor], probs: PerRank[Tensor], handles: PerRank[Handle]
) -> list[Tensor]:
    """Send each row back and add each token's rows, weighted.

        y[t] = round(Σ_{k ascending, indices[t, k] ≠ -1} probs[t, k] · (row of slot k))

    A token that names an expert twice has two rows there, and both slots read the later one: that is where the second contribution overwrites
    the first.

    Args:
        rows: [L,W·M,H] floating point of each rank, in the order of dispatch's rows. Rows behind the counts are not read.
        indices: [T_r,K], as dispatch was given them; what its policy emptied stays empty.
        probs: [T_r,K] floating point (DeepEP takes float32). In empty slots they are not read.
        handles: as this implementation's `deepep_low_latency_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without slots is 0.

    Rounding: products and sums in float32 (float64 if rows or probs are), one rounding to the rows' dtype. drows likewise;
    dprobs[t, k] = Σ_h row[h] · dy[t, h], rounded once to the probs' dtype.

    Raises:
        ValueError: handles of another call, rows of other shapes, or other numbers of slots or tokens.
    """
    plan = plan_of(handles, "deepep low latency")
    slab = (plan.local_experts, plan.num_rows[0] // plan.local_experts)
    check_rows(rows, [slab] * plan.ranks)
    require(
        tuple(map(len, indices)) == plan.tokens,
        "indices",
        f"of {[len(own) for own in indices]} rows",
        f"of {list(plan.tokens)} rows",
    )
    check_rank_probs(probs, indices)
    used = int(plan.slot_R.max()) + 1 if len(plan.slot_R) else 0
    require(
        indices[0].shape[1] >= used,
        "indices",
        f"of shape {tuple(indices[0].shape)}",
        f"of at least {used} slots, as dispatch was given them",
    )
    wide = accumulator_dtype(torch.promote_types(rows[0].dtype, probs[0].dtype))
    every = [own.flatten(0, 1).to(wide) for own in rows]
    prob_GK = torch.cat(list(probs)).to(wide)
    row_GK = _rows_of_slots(plan, prob_GK.shape[1])
    total = every[0].new_zeros((sum(plan.tokens), every[0].shape[1]))
    for row_G, prob_G in zip(row_GK.unbind(1), prob_GK.unbind(1), strict=True):
        weight_G = torch.where(row_G == NOWHERE, torch.zeros_like(prob_G), prob_G)
        (sent,) = move([torch.cat(every)], [row_G])
        total = total + weight_G[:, None] * sent
    return list(round_to(total, rows[0].dtype).split(list(plan.tokens)))


def quantize_for_wire(x_TH: Tensor, *, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 128 columns of each row to E4M3.

        amax  = max(|x|, 1e-4) over the block
        scale = amax · (1/448), where 1/448 is rounded to float32; with `round_scale` the next power of two, 2^⌈log2 of that⌉
        code  = round(x · m) to E4M3, clamped at ±448, where m is 448 / amax, or with `round_scale` 1 / scale

    Returns:
        (codes [T,H] float8_e4m3fn, scales [T,H/128] float32).

    Source: DeepEP's csrc/kernels/internode_ll.cu; per_token_cast_to_fp8 of its tests.
    """
    blocks = x_TH.to(torch.float32).unflatten(1, (-1, FP8_BLOCK))
    amax = blocks.abs().amax(2).clamp(min=SMALLEST_AMAX)
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


def _rows_of_slots(plan: RoutePlan, slots: int) -> Tensor:
    """[G,K]: the row, all ranks' buffers one below the other, that each slot reads, or NOWHERE for an empty slot."""
    cell_R = plan.token_R * (plan.ranks * plan.local_experts) + plan.expert_R
    place_R = plan.expert_R // plan.local_experts * plan.num_rows[0] + plan.row_R
    cells = sum(plan.tokens) * plan.ranks * plan.local_experts
    last = torch.full((cells,), NOWHERE, device=cell_R.device).scatter_reduce(
        0, cell_R, place_R, "amax"
    )  # rows of a cell ascend with the slot
    slot_GK = plan.token_R * slots + plan.slot_R
    return (
        torch.full((sum(plan.tokens) * slots,), NOWHERE, device=cell_R.device)
        .index_copy(0, slot_GK, last[cell_R])
        .reshape(-1, slots)
    )
