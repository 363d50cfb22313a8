"""DeepEP's normal mode: each token travels once to each rank that wants it, even if several experts
of that rank do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.deduplicated import Sent, add_ranks, check_resent, send_once, taken
from moe_fast.dispatch.exchange import (
    Exchange,
    check_combined,
    check_handle,
    counts_of_all,
    exchanged,
    size_and_rank,
)
from moe_fast.dispatch.indices import EMPTY, apply_index_policy
from moe_ref.config import (
    Combined,
    DeepEPDispatched,
    DeepEPLayout,
    IndexPolicy,
    check_deepep_sizes,
    check_expert_split,
    check_probs,
    check_rank_indices,
    require,
)


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    sent_rows: Sent
    order_D: Tensor | None = None  # with `num_worst_tokens`: the arrived row, of the slabs, in each row

    @property
    def exchange(self) -> Exchange:
        return self.sent_rows.exchange


def deepep_layout(indices_TK: Tensor, *, num_experts: int, ranks: int) -> DeepEPLayout:
    """Count how many tokens this rank will send to each rank and expert. Nothing is sent, and the
    host never waits.

    A slot outside 0 … E - 1 counts as empty, and is not reported.
    """
    check_expert_split(num_experts, ranks)
    wide_TK = indices_TK.long()  # a narrow dtype may not hold the numbers that they are compared with
    in_rank_TW = _wanted(wide_TK, num_experts // ranks, ranks)
    # the last entry is for no expert
    slots = torch.where((wide_TK >= 0) & (wide_TK < num_experts), wide_TK, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=slots.device).scatter_add_(
        0, slots, torch.ones_like(slots)
    )
    return DeepEPLayout(in_rank_TW.sum(0), counts[:num_experts], in_rank_TW)


def deepep_dispatch(
    tokens_TH: Tensor, indices_TK: Tensor,
    *, num_experts: int, probs: Tensor | None = None, scales: Tensor | None = None,
    policy: IndexPolicy | None = None, expert_alignment: int = 1,
    num_worst_tokens: int | None = None, group: Any = None,
) -> DeepEPDispatched:  # fmt: skip
    """Send each token once to each rank that some slot of it names.

    The host reads the counts. With `num_worst_tokens` it reads them only to check that number. If
    the policy trusts values too, it reads nothing: then `num_worst_tokens` rows travel from each
    rank to each.
    """
    ranks, rank = size_and_rank(group)
    check_rank_indices(
        [tokens_TH] * ranks, [indices_TK] * ranks, None if probs is None else [probs] * ranks, num_experts
    )
    require(scales is None or len(scales) == len(tokens_TH), "scales", "of another size", "a row for each token")
    policy = policy or IndexPolicy()
    kept_TK, kept_probs = apply_index_policy(indices_TK, probs, num_experts, policy)
    local = num_experts // ranks
    wanted_TW = _wanted(kept_TK, local, ranks)
    checked = num_worst_tokens is not None and policy.values == "checked"
    most = int(counts_of_all(wanted_TW.sum(0), group).sum(0).max()) if checked else 0
    check_deepep_sizes(expert_alignment, num_worst_tokens, most)
    sent_rows, rows = send_once(tokens_TH, wanted_TW, group, num_worst_tokens)
    arrived = exchanged(
        sent_rows.exchange, rows, sent_rows.of_tokens(kept_TK, EMPTY),
        None if kept_probs is None else sent_rows.of_tokens(kept_probs),
        None if scales is None else sent_rows.of_tokens(scales),
    )  # fmt: skip
    order_D = None
    if num_worst_tokens is not None and arrived[1] is not None:
        free_D = (arrived[1] == EMPTY).all(1)
        order_D = free_D.to(torch.uint8).sort(stable=True).indices[:num_worst_tokens]
        arrived = [None if x is None else taken(x, order_D) for x in arrived]
    rows_DH, index_DK, probs_DK, scales_D = arrived
    assert rows_DH is not None and index_DK is not None
    here = index_DK // local == rank
    index_DK = torch.where(here, index_DK - rank * local, EMPTY)
    if probs_DK is not None:
        probs_DK = torch.where(here, probs_DK, torch.zeros_like(probs_DK))
    counts = None
    if num_worst_tokens is None:
        counts = (index_DK.flatten()[:, None] == torch.arange(local, device=index_DK.device)).sum(0)
        counts = -(-counts // expert_alignment) * expert_alignment
    return DeepEPDispatched(rows_DH, scales_D, index_DK, probs_DK, counts, Handle(sent_rows, order_D))


def deepep_cached_dispatch(tokens_TH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """The rows of `deepep_dispatch` for other tokens of the same routing.

    Raises:
        ValueError: another dispatcher's handle, another group, or another number of tokens.
    """
    check_resent(tokens_TH, handle, Handle, group)
    (rows_DH,) = exchanged(handle.exchange, handle.sent_rows.rows(tokens_TH))
    assert rows_DH is not None
    return rows_DH if handle.order_D is None else taken(rows_DH, handle.order_D)


def deepep_combine(
    rows_DH: Tensor, handle: Handle, *, probs: Tensor | None = None, biases: Sequence[Tensor] = (), group: Any = None
) -> Combined:
    """Send each row back and add each token's rows; no probability is applied.

    Raises:
        ValueError: rows of another shape than dispatch's, another group, or biases of other shapes.
    """
    check_handle(handle, Handle, group)
    arrived = sum(handle.exchange.receive)
    check_combined(rows_DH, arrived if handle.order_D is None else len(handle.order_D))
    shape = (handle.sent_rows.num_tokens, rows_DH.shape[1])
    require(
        len(biases) <= 2 and all(tuple(bias.shape) == shape for bias in biases),
        "biases",
        [tuple(b.shape) for b in biases],
        f"at most two of {shape}",
    )
    if probs is not None:
        check_probs(probs, (len(rows_DH), *probs.shape[1:]), rows_DH)
    arrived_tensors = [None if x is None else _where_they_arrived(x, handle, arrived) for x in (rows_DH, probs)]
    home, home_probs = exchanged(handle.exchange.back, *arrived_tensors)
    assert home is not None
    tokens = add_ranks(home, handle.sent_rows, list(biases), rows_DH.dtype)
    return Combined(
        tokens, None if home_probs is None else add_ranks(home_probs, handle.sent_rows, [], home_probs.dtype)
    )


def _where_they_arrived(x_D: Tensor, handle: Handle, arrived: int) -> Tensor:
    """The rows at their positions in the slabs. Rows past the received ones go to positions that
    hold no token.
    """
    if handle.order_D is None:
        return x_D
    return x_D.new_zeros((arrived, *x_D.shape[1:])).index_copy(0, handle.order_D, x_D)


def _wanted(indices_TK: Tensor, local_experts: int, ranks: int) -> Tensor:
    """[T,W] bool: whether an int64 slot of the token names an expert of the rank; -1 names none."""
    return ((indices_TK // local_experts)[:, :, None] == torch.arange(ranks, device=indices_TK.device)).any(1)
