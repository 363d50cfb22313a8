"""A template: copy this file, call your kernels in it, and judge it.

    moe-conformance check-adapter --impl my_adapter        the functions found
    moe-conformance run --impl my_adapter                  the verdict

Offer the functions you have and delete the rest. Required tensors are passed by position, settings
by keyword unless they are None; omit unsupported settings from the signatures. Results are a tuple
in the order given here, or any object with these fields. Do not repair your kernel's results here:
differences must show.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.interface import differentiable


def supports(function: str, **arguments: Any) -> str | None:
    """Why this call is not supported, or None. Meta tensors: shapes and dtypes, no values."""
    if function == "permute" and arguments["tokens"].dtype == torch.float64:
        return "no float64"
    return None


def declares(function: str) -> dict[str, Any]:
    """Guarantees in terms of `conformance.interface.VOCABULARY`: printed in the verdict, tested."""
    return {
        "permute": {
            "deterministic": False,  # True: same bits on every run, unlike index_add on a GPU
            "omits": ("tokens_per_expert", "overflow"),  # outputs that the kernel lacks
            "unchecked": ("routing_map", "probs"),  # arguments whose illegal values do not raise
        },
    }.get(function, {})


def _gather(tokens: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Any, Any]:
    """A bare forward kernel: (outputs, tensors saved for the backward)."""
    expert_R, token_R = (routing_map != 0).T.nonzero(as_tuple=True)  # by expert, then by token
    bits = tokens.view(torch.uint8) if tokens.element_size() == 1 else tokens  # fp8: as bytes
    rows = bits[token_R].view(tokens.dtype)
    return (rows, probs[token_R, expert_R], token_R), (token_R, expert_R, tokens, probs)


def _scatter(
    saved: Any, d_rows: Tensor | None, d_probs: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, None]:
    """Its backward: one gradient per argument; the cotangent of an unused output is None."""
    token_R, expert_R, tokens, probs = saved
    to_tokens = to_probs = None
    if d_rows is not None:  # summed in float32, the default accumulator
        to_tokens = (
            torch.zeros(tokens.shape, device=tokens.device).index_add(0, token_R, d_rows.float()).to(tokens.dtype)
        )
    if d_probs is not None:
        to_probs = torch.zeros_like(probs).index_put((token_R, expert_R), d_probs)
    return to_tokens, to_probs, None


def permute(tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None) -> tuple:
    """(rows, probs, row_map, tokens_per_expert, pad_offsets, overflow).

    rows             [P,H]  tokens[t] bit by bit where routing_map[t, e], by e, then by t
    probs            [P]    probs[t, e] of the same rows; None without probs
    row_map          opaque: passed to your unpermute only
    tokens_per_expert, pad_offsets (None without align), overflow: see `moe_ref.permutation.permute`
    """
    merging = torch.zeros(routing_map.shape, device=tokens.device) if probs is None else probs
    rows, permuted_probs, row_map = differentiable(_gather, _scatter)(tokens, merging, routing_map)
    return rows, None if probs is None else permuted_probs, row_map, None, None, None


# Some of the others, with the reference's signatures; results as documented in moe_ref.
#
# def unpermute(rows, row_map, *, restore_shape=None, probs=None): return tokens
# def sort_chunks(rows, chunk_sizes, order, *, probs=None): return rows, probs
# def pad_routing_map(routing_map, *, align): return routing_map, unreached
# def indices_to_multihot(indices, probs, *, num_experts): return routing_map, probs
# def multihot_to_indices(routing_map, probs, *, topk): return indices, probs, overflow
