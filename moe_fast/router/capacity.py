"""Capacity: no expert takes more tokens than it has room for."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import bits, check_device, integers, strided
from moe_fast.launch.operators import as_operators, has_memory, launch, traceable
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.router import _capacity as kernels
from moe_ref.config import Routed, check_drop_tokens

KEY_BITS = {
    1: 9,
    2: 17,
    4: 32,
    8: 64,
}  # of keys, by the bytes of probs: one more bit, if there is one, for unrouted tokens


@traceable
def drop_tokens(
    probs_TE: Tensor,
    routing_map_TE: Tensor,
    *,
    capacity: int,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> Routed:
    """Keep at most `capacity` tokens of each expert; drop the others.

    Three launches: keys in the order of the probs, the search for each expert's last token, the
    results. The host never waits. A NaN counts as routed, in an unspecified order. Probs and their
    gradient are copied bit by bit.
    """
    check_drop_tokens(probs_TE, routing_map_TE, capacity, drop_policy)
    check_device("probs", probs_TE)
    return dropped(probs_TE, routing_map_TE, capacity, drop_policy, pad_to_capacity)


def dropped(probs: Tensor, routing_map: Tensor, capacity: int, drop_policy: str, pad_to_capacity: bool) -> Routed:
    """`drop_tokens` of arguments that have been checked."""
    return Routed(*_Drop.apply(probs, routing_map, capacity, drop_policy == "probs", pad_to_capacity))


@as_operators
class _Drop(torch.autograd.Function):
    """The kept tokens; the gradient passes where kept and routed."""

    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, routing_map: Tensor, capacity: int, by_probs: bool, pad: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, kept_map = _drop(probs, routing_map, capacity, by_probs, pad)
        ctx.mark_non_differentiable(kept_map)
        ctx.save_for_backward(kept_map, routing_map if pad else None)
        return out, kept_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None, None]:
        return None if dout is None else _drop_backward(dout, *ctx.saved_tensors), None, None, None, None


def _drop(probs: Tensor, routing_map: Tensor, capacity: int, by_probs: bool, pad: bool) -> tuple[Tensor, Tensor]:
    """(kept probs, map of kept tokens)."""
    num_tokens, num_experts = shape = probs.shape
    device = probs.device
    out = torch.empty(shape, dtype=probs.dtype, device=device)  # drop_kernel writes all of it
    kept_map = torch.empty(shape, dtype=torch.bool, device=device)  # as above
    if num_tokens == 0 or not has_memory():
        return out, kept_map
    sizes = tuning.for_device(device)
    key_bits = KEY_BITS[probs.dtype.itemsize] if by_probs else 1
    key = torch.int64 if key_bits == 64 else torch.int32
    keys = torch.empty((num_experts, num_tokens), dtype=key, device=device)  # drop_keys_kernel writes all of it
    least = torch.empty(num_experts, dtype=key, device=device)  # drop_search_kernel writes all of it
    end_token = torch.empty(num_experts, dtype=torch.int32, device=device)  # as above
    tile, column = sizes.drop, sizes.drop_column
    grid = (ceil_div(num_tokens, tile.tokens), ceil_div(num_experts, tile.columns))
    inputs = (bits(probs), *probs.stride(), integers(routing_map), *routing_map.stride())
    blocking: dict[str, int] = {
        "KEY_BITS": key_bits,
        "BLOCK_T": tile.tokens,
        "BLOCK_E": tile.columns,
        "num_warps": tile.num_warps,
    }
    launch(kernels.drop_keys_kernel, grid, probs)(*inputs, keys, num_tokens, num_experts, **blocking)
    launch(kernels.drop_search_kernel, (ceil_div(num_experts, column.columns),), probs)(
        keys,
        least,
        end_token,
        num_tokens,
        num_experts,
        min(capacity, num_tokens),
        num_tokens.bit_length(),
        KEY_BITS=key_bits,
        PAD=pad,
        WHOLE=num_tokens <= column.tokens,
        BLOCK_E=column.columns,
        BLOCK_T=min(column.tokens, power_of_two(num_tokens)),
        num_warps=column.num_warps,
    )
    launch(kernels.drop_kernel, grid, probs)(
        *inputs, least, end_token, bits(out), integers(kept_map), num_tokens, num_experts, **blocking
    )
    return out, kept_map


def _drop_backward(dout: Tensor, kept_map: Tensor, routing_map: Tensor | None) -> Tensor:
    """The gradient of the probs."""
    num_tokens, num_experts = dout.shape
    dprobs = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)  # drop_backward_kernel writes all of it
    if num_tokens == 0:
        return dprobs
    tile = tuning.for_device(dout.device).drop
    launch(
        kernels.drop_backward_kernel, (ceil_div(num_tokens, tile.tokens), ceil_div(num_experts, tile.columns)), dout
    )(
        *strided(bits(dout)),
        integers(kept_map),
        *strided(None if routing_map is None else integers(routing_map)),
        bits(dprobs),
        num_tokens,
        num_experts,
        **tile.blocks("T", "E"),
    )
    return dprobs
