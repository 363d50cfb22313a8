"""Other forms of the routing map: padded to a multiple, and as indices of experts."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import bits, check_device, integers, strided
from moe_fast.launch.operators import as_operators, launch, operator, traceable
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.permutation import _routing_map as kernels
from moe_fast.permutation import _row_map as map_kernels
from moe_fast.permutation.row_map import cut_of, walk_map
from moe_ref.config import Indices, Multihot, PaddedMap, check_align, check_indices, check_map, check_multihot, require


@traceable
def pad_routing_map(routing_map_TE: Tensor, *, align: int) -> PaddedMap:
    """Route more tokens to each expert until its count is a multiple of `align`.

    Two launches count, one copies the map and pads it. The host never waits.
    """
    check_map(routing_map_TE)
    require(align is not None, "align", align, "a positive integer")
    check_align(align)
    check_device("routing_map", routing_map_TE)
    return PaddedMap(*_padded(routing_map_TE, align))


@operator
def _padded(routing_map_TE: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """(the padded map, the experts that still have too few tokens)."""
    device = routing_map_TE.device
    walk = walk_map(routing_map_TE, cut_of(routing_map_TE))
    # all: a block of tokens by each program
    padded = torch.empty(routing_map_TE.shape, dtype=torch.bool, device=device)
    unreached = torch.empty(routing_map_TE.shape[1], dtype=torch.bool, device=device)  # all by the first program
    launch(map_kernels.pad_routing_map_kernel, (walk.cut.blocks,), routing_map_TE)(
        *strided(integers(routing_map_TE)),
        *walk.counted(),
        integers(padded),
        integers(unreached),
        *walk.sizes(routing_map_TE),
        align,
        **walk.blocking(),
    )
    return padded, unreached


@traceable
def indices_to_multihot(indices_TK: Tensor, probs_TK: Tensor, *, num_experts: int) -> Multihot:
    """Turn each token's list of experts into a row of the routing map: one launch.

    A slot outside 0 … E-1 counts as empty, unchecked. Probs and their gradient are copied bit by
    bit.
    """
    check_indices(indices_TK, probs_TK, num_experts)
    check_device("indices", indices_TK)
    return Multihot(*_ToMultihot.apply(indices_TK, probs_TK, num_experts))


@traceable
def multihot_to_indices(routing_map_TE: Tensor, probs_TE: Tensor, *, topk: int) -> Indices:
    """List each token's experts, ascending, in K slots: one launch. Probs are copied bit by bit."""
    check_multihot(routing_map_TE, probs_TE, topk)
    check_device("routing_map", routing_map_TE)
    return Indices(*_ToIndices.apply(routing_map_TE, probs_TE, topk))


@as_operators
class _ToMultihot(torch.autograd.Function):
    """`indices_to_multihot`. The gradient of each slot is that of its expert."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        routing_map, out = _scatter(indices, probs, num_experts, with_map=True)
        ctx.mark_non_differentiable(routing_map)
        return routing_map, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dout: Tensor | None) -> tuple[None, Tensor | None, None]:
        (indices,) = ctx.saved_tensors
        return None, None if dout is None else _gather(dout, indices), None


@as_operators
class _ToIndices(torch.autograd.Function):
    """`multihot_to_indices`. Its gradient scatters the slots' gradients to their experts."""

    @staticmethod
    def forward(ctx: Any, routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.num_experts = routing_map.shape[1]
        indices, out, overflow = _list(routing_map, probs, topk)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices, overflow)
        return indices, out, overflow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dout: Tensor | None, __: None) -> tuple[None, Tensor | None, None]:
        (indices,) = ctx.saved_tensors
        return None, None if dout is None else _scatter(indices, dout, ctx.num_experts, with_map=False)[1], None


def _scatter(indices: Tensor, values: Tensor, num_experts: int, *, with_map: bool) -> tuple[Tensor, Tensor]:
    """(the slots' values at their experts, and 0 elsewhere; the map, if `with_map`)."""
    tile = tuning.for_device(indices.device).multihot
    num_tokens, num_slots = indices.shape
    # all by multihot_kernel, with_map; else unused
    routing_map = torch.empty((num_tokens, num_experts), dtype=torch.bool, device=indices.device)
    # multihot_kernel writes all of it
    out = torch.empty((num_tokens, num_experts), dtype=values.dtype, device=indices.device)
    if num_tokens == 0:
        return routing_map, out
    launch(kernels.multihot_kernel, (ceil_div(num_tokens, tile.tokens), ceil_div(num_experts, tile.columns)), indices)(
        *strided(integers(indices)),
        *strided(bits(values)),
        integers(routing_map) if with_map else None,
        bits(out),
        num_tokens,
        num_experts,
        num_slots,
        **tile.blocks("T", "E"),
    )
    return routing_map, out


def _gather(dout: Tensor, indices: Tensor) -> Tensor:
    """The gradient of each slot: that of its expert, or 0 if the slot does not count."""
    tile = tuning.for_device(indices.device).multihot
    num_tokens, num_slots = indices.shape
    dvalues = torch.empty((num_tokens, num_slots), dtype=dout.dtype, device=dout.device)  # by multihot_backward_kernel
    if dvalues.numel() == 0:
        return dvalues
    launch(
        kernels.multihot_backward_kernel,
        (ceil_div(num_tokens, tile.tokens), ceil_div(num_slots, tile.columns)),
        dout,
    )(
        *strided(bits(dout)),
        *strided(integers(indices)),
        bits(dvalues),
        num_tokens,
        dout.shape[1],
        num_slots,
        **tile.blocks("T", "K"),
    )
    return dvalues


def _list(routing_map: Tensor, values: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the routed experts of each token in K slots, their values, whether a token has
    more than K).
    """
    sizes = tuning.for_device(routing_map.device)
    num_tokens, num_experts = routing_map.shape
    device = routing_map.device
    # indices_kernel writes all of it: listed slots, and vacant ones
    indices = torch.empty((num_tokens, topk), dtype=torch.int64, device=device)
    out = torch.empty((num_tokens, topk), dtype=values.dtype, device=device)  # as above
    overflow = torch.zeros((), dtype=torch.bool, device=device)
    if num_tokens == 0:
        return indices, out, overflow
    block_experts = power_of_two(num_experts, least=8)
    block_tokens = sizes.multihot_rows.tile_tokens(block_experts)
    launch(kernels.indices_kernel, (ceil_div(num_tokens, block_tokens),), routing_map)(
        *strided(integers(routing_map)),
        *strided(bits(values)),
        indices,
        bits(out),
        integers(overflow),
        num_tokens,
        num_experts,
        topk,
        BLOCK_T=block_tokens,
        BLOCK_E=block_experts,
        BLOCK_K=sizes.multihot.columns,
        num_warps=sizes.multihot_rows.num_warps,
    )
    return indices, out, overflow
