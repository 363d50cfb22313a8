"""Transformer Engine's names for permutation and router, computed by `moe_fast`.

    from moe_fast.te import shim
    moe_utils.fused_permute = shim.moe_permute           # of megatron.core.transformer.moe

Arguments, results and their order are those of release 2.20. It differs on purpose:

- `row_id_map` is opaque, and owns the padding of the call that made it: `pad_offsets` of that call
  may be passed on or left out.
- A routed token of probability 0 is copied, as before 2.6.
- A wrong `num_out_tokens` cuts or extends the rows by zeros, and never writes out of bounds.
- Of equal keys the router chooses the lower expert, and never one expert twice.

Index maps and FP8 tensors are refused.
"""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch.operators import traceable
from moe_fast.permutation import permute, sort_chunks, unpermute
from moe_fast.permutation.row_map import RowMap
from moe_fast.router import aux_loss_scores, load_balancing_loss, topk_routing
from moe_ref.config import require


@traceable
def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, RowMap]:
    """(rows [R,H], row_id_map).

    Args:
        inp: [N,H] float32, bfloat16 or float16.
        routing_map: [N,E], bool or integers 0 and 1.
        num_out_tokens: R; None or -1: as many as are routed, for which the host waits.
        max_token_num: not used, as in Transformer Engine.

    Raises:
        ValueError: another `map_type`; and see `moe_ref.config.check_permute`.
    """
    _check_map_type(map_type)
    out = permute(inp, routing_map, num_rows=_rows(num_out_tokens))
    return out.rows, out.row_map


@traceable
def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor | None, RowMap]:
    """(rows [R,H], probs [R], row_id_map); see `moe_permute`."""
    out = permute(inp, routing_map, probs=probs, num_rows=_rows(num_out_tokens))
    return out.rows, out.probs, out.row_map


@traceable
def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor | None, RowMap, Tensor | None, Tensor]:
    """(rows [P,H], probs [P], row_id_map, pad_offsets [E], padded tokens_per_expert [E]).

    Each expert's rows are followed by zeros up to a multiple of `align_size`. The counts are taken
    from the map; `tokens_per_expert` is not read. `pad_offsets` are given also where all are 0.
    """
    shape, expected = tuple(tokens_per_expert.shape), (routing_map.shape[1],)
    require(shape == expected, "tokens_per_expert", f"of shape {shape}", f"of shape {expected}")
    out = permute(inp, routing_map, probs=probs, align=align_size)
    return out.rows, out.probs, out.row_map, out.pad_offsets, out.tokens_per_expert


@traceable
def moe_unpermute(
    inp: Tensor,
    row_id_map: RowMap,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """[N,H]: each token's rows times their merging_probs, added by ascending expert.

    Args:
        restore_shape: (N, H); None: taken from the row_id_map.
        probs: the older name of merging_probs.
        pad_offsets: [E] padding rows before each expert's, where the caller has padded the rows.

    Raises:
        ValueError: both names of the probs; and see `moe_ref.config.check_unpermute`.
    """
    _check_map_type(map_type)
    require(probs is None or merging_probs is None, "probs", "given with merging_probs", "None: it is the older name")
    if pad_offsets is not None and not row_id_map.expert_gaps:
        inp = inp.index_select(0, _places(row_id_map, pad_offsets, inp.shape[0]))
    merging = probs if merging_probs is None else merging_probs
    shape = None if restore_shape is None else tuple(restore_shape)
    return unpermute(inp, row_id_map, restore_shape=shape, probs=merging)


@traceable
def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """[M,H]: chunk sorted_index[0], then chunk sorted_index[1], …; rows past the chunks stay."""
    return sort_chunks(inp, split_sizes, sorted_index).rows


@traceable
def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(rows [M,H], probs [M]), both in the order of `moe_sort_chunks_by_index`."""
    out = sort_chunks(inp, split_sizes, sorted_index, probs=probs)
    return out.rows, out.probs


@traceable
def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(probs […,E] in the logits' dtype, routing_map […,E] bool): see `moe_ref.topk_routing`."""
    out = topk_routing(
        logits.flatten(0, -2),
        topk=topk,
        score_function=score_function,
        pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias,
    )
    return out.probs.view(logits.shape), out.routing_map.view(logits.shape)


@traceable
def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """(routing_map [N,E] bool, scores [N,E] float32): see `moe_ref.aux_loss_scores`."""
    out = aux_loss_scores(logits, topk=topk, score_function=score_function)
    return out.routing_map, out.scores


@traceable
def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """[] in the dtype of probs: see `moe_ref.load_balancing_loss`."""
    loss = load_balancing_loss(
        probs,
        tokens_per_expert,
        total_num_tokens=total_num_tokens,
        topk=topk,
        num_experts=num_experts,
        coeff=coeff,
    )
    return loss.to(probs.dtype)


def _places(row_id_map: RowMap, pad_offsets: Tensor, num_padded: int) -> Tensor:
    """[R] the place of each row of the map among rows that the caller has padded."""
    row_R = torch.arange(row_id_map.num_rows, device=pad_offsets.device)
    end_E = row_id_map.gap_2E[0, :-1].contiguous()
    expert_R = torch.searchsorted(end_E, row_R, right=True).clamp(max=len(end_E) - 1)
    return (row_R + pad_offsets[expert_R]).clamp(max=num_padded - 1)  # rows past the last expert's are not read


def _check_map_type(map_type: str) -> None:
    require(map_type == "mask", "map_type", repr(map_type), "'mask'")


def _rows(num_out_tokens: int | None) -> int | None:
    return None if num_out_tokens == -1 else num_out_tokens
