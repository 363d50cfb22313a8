"""A template: copy this file, call your kernels in it, and judge it.

    moe-conformance check-adapter --impl my_adapter        what is found
    moe-conformance run --impl my_adapter                  the verdict

Offer the functions you have and delete the rest. Required tensors come by position, settings by keyword and only where they
are not None; leave out of a signature what your kernel has no words for. Results may be a tuple in the order given here, or
anything with these field names. Do not repair your kernel's answers here: what differs must show.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.interface import differentiable


def supports(function: str, **arguments: Any) -> str | None:
    """Why this call is not supported, or None. Tensors are on the meta device: look at shapes and dtypes, never at values."""
    if function == "permute" and arguments["tokens"].dtype == torch.float64:
        return "no float64"
    return None


def declares(function: str) -> dict[str, Any]:
    """What is promised, from `conformance.interface.VOCABULARY`; it is printed with the verdict, and tested."""
    return {
        "permute": {
            "deterministic": False,  # say True if every run gives the same bits; index_add on a GPU does not
            "omits": ("tokens_per_expert", "overflow"),  # outputs that the kernel does not make
            "unchecked": ("routing_map", "probs"),  # arguments whose illegal values it does not notice
        },
    }.get(function, {})


def _gather(tokens: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Any, Any]:
    """A bare forward kernel: (outputs, what the backward needs)."""
    expert_R, token_R = (routing_map != 0).T.nonzero(as_tuple=True)  # by expert, tokens ascending inside an expert
    bits = tokens.view(torch.uint8) if tokens.element_size() == 1 else tokens  # fp8 cannot be indexed everywhere
    rows = bits[token_R].view(tokens.dtype)
    return (rows, probs[token_R, expert_R], token_R), (token_R, expert_R, tokens, probs)


def _scatter(
    saved: Any, d_rows: Tensor | None, d_probs: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, None]:
    """Its backward: one gradient for each argument; a cotangent is None where its output was not used."""
    token_R, expert_R, tokens, probs = saved
    to_tokens = to_probs = None
    if d_rows is not None:  # summed in float32, which is what an accumulator is by default
        to_tokens = (
            torch.zeros(tokens.shape, device=tokens.device).index_add(0, token_R, d_rows.float()).to(tokens.dtype)
        )
    if d_probs is not None:
        to_probs = torch.zeros_like(probs).index_put((token_R, expert_R), d_probs)
    return to_tokens, to_probs, None


def permute(tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None) -> tuple:
    """(rows, probs, row_map, tokens_per_expert, pad_offsets, overflow); the reference also takes `align`, `capacity`, `num_rows`.

    rows             [P,H]  tokens[t] for every expert e, for every t with routing_map[t, e]: bit by bit, t ascending
    probs            [P]    probs[t, e] of the same rows; None if none were given
    row_map          opaque: only your own unpermute is ever given it
    tokens_per_expert, pad_offsets (None without align), overflow: see `moe_ref.permutation.permute`
    """
    merging = torch.zeros(routing_map.shape, device=tokens.device) if probs is None else probs
    rows, permuted_probs, row_map = differentiable(_gather, _scatter)(tokens, merging, routing_map)
    return rows, None if probs is None else permuted_probs, row_map, None, None, None


# The others, with the reference's signatures; moe_ref says what each must return.
#
# def unpermute(rows, row_map, *, restore_shape=None, probs=None): return tokens          [T,H]: each token's rows added up
# def sort_chunks(rows, chunk_sizes, order, *, probs=None): return rows, probs            chunks in the new order, the tail behind
# def pad_routing_map(routing_map, *, align): return routing_map, unreached               a new map, and [E] bool
# def indices_to_multihot(indices, probs, *, num_experts): return routing_map, probs      [T,E] each
# def multihot_to_indices(routing_map, probs, *, topk): return indices, probs, overflow   [T,K] each, -1 and 0 in empty slots
