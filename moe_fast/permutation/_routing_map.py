"""Kernels that turn lists of experts into the routing map, and back."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_slots",
        "stride_indices_t",
        "stride_indices_k",
        "stride_values_t",
        "stride_values_k",
    ]
)
def multihot_kernel(
    # lists; values as bits
    indices_ptr, stride_indices_t, stride_indices_k, values_ptr, stride_values_t, stride_values_k,
    # results, contiguous
    map_ptr, out_ptr,
    # sizes
    num_tokens, num_experts, num_slots,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program writes a tile of [tokens, experts] of the map and of the values. The tile starts
    unrouted and goes through the slots in order, so that the last slot of an expert wins.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_time = t < num_tokens  # the last tile sticks out
    routed = tl.zeros([BLOCK_T, BLOCK_E], tl.uint8)
    out = tl.zeros([BLOCK_T, BLOCK_E], out_ptr.dtype.element_ty)
    for slot in range(num_slots):
        k = tl.cast(slot, tl.int64)
        index = tl.load(indices_ptr + t * stride_indices_t + k * stride_indices_k, mask=in_time, other=0)
        value = tl.load(values_ptr + t * stride_values_t + k * stride_values_k, mask=in_time, other=0)
        hit = index[:, None] == e[None, :]
        routed = tl.where(hit, tl.full([BLOCK_T, BLOCK_E], 1, tl.uint8), routed)
        out = tl.where(hit, value[:, None], out)
    cell = t[:, None] * num_experts + e[None, :]
    in_bounds = in_time[:, None] & (e < num_experts)[None, :]  # the last tiles stick out on both sides
    tl.store(out_ptr + cell, out, mask=in_bounds)
    if map_ptr is not None:
        tl.store(map_ptr + cell, routed, mask=in_bounds)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_slots", "num_experts", "stride_indices_t", "stride_indices_k", "stride_dout_t"),
        *("stride_dout_e",),
    ]
)
def multihot_backward_kernel(
    # the gradient of the map's values, as bits, and the lists
    dout_ptr, stride_dout_t, stride_dout_e, indices_ptr, stride_indices_t, stride_indices_k,
    # result, contiguous
    dvalues_ptr,
    # sizes
    num_tokens, num_experts, num_slots,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of a slot is that of its expert, unless a later slot of the token has the same
    expert. A program computes a tile of [tokens, slots].
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_time = t < num_tokens  # the last tile sticks out
    in_bounds = in_time[:, None] & (k < num_slots)[None, :]  # on both sides
    index = tl.load(
        indices_ptr + t[:, None] * stride_indices_t + k[None, :] * stride_indices_k, mask=in_bounds, other=-1
    ).to(tl.int64)
    counts = (index >= 0) & (index < num_experts)  # other indices are of empty slots
    for slot in range(num_slots):
        later_index = tl.load(
            indices_ptr + t * stride_indices_t + tl.cast(slot, tl.int64) * stride_indices_k, mask=in_time, other=-1
        )
        counts = counts & ((index != later_index[:, None]) | (k >= slot)[None, :])
    dvalue = tl.load(dout_ptr + t[:, None] * stride_dout_t + index * stride_dout_e, mask=counts, other=0)  # 0 elsewhere
    tl.store(dvalues_ptr + t[:, None] * num_slots + k[None, :], dvalue, mask=in_bounds)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_experts", "stride_values_t", "stride_values_e"])
def indices_kernel(
    # the map; values as bits
    map_ptr, stride_map_t, stride_map_e, values_ptr, stride_values_t, stride_values_e,
    # results, contiguous; overflow is 0 at the launch
    indices_ptr, out_ptr, overflow_ptr,
    # sizes
    num_tokens, num_experts, num_slots,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program lists the experts of BLOCK_T tokens. The slot of a routed expert is the number of
    routed experts before it; the slots after the last one are empty.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    in_time = (t < num_tokens)[:, None]  # the last tile sticks out
    in_bounds = in_time & (e < num_experts)[None, :]  # on both sides
    routed = tl.load(map_ptr + t[:, None] * stride_map_t + e[None, :] * stride_map_e, mask=in_bounds, other=0) != 0
    routed_ones = routed.to(tl.int32)
    slot = tl.cumsum(routed_ones, axis=1) - routed_ones
    listed = routed & (slot < num_slots)  # experts past the last slot are left out
    value = tl.load(values_ptr + t[:, None] * stride_values_t + e[None, :] * stride_values_e, mask=listed, other=0)
    cell = t[:, None] * num_slots + slot
    tl.store(indices_ptr + cell, tl.broadcast_to(e[None, :], [BLOCK_T, BLOCK_E]), mask=listed)
    tl.store(out_ptr + cell, value, mask=listed)
    count = tl.sum(routed_ones, axis=1)
    for first in range(0, num_slots, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        # the slots that no expert was written to
        vacant = in_time & (k < num_slots)[None, :] & (k[None, :] >= count[:, None])
        vacant_cell = t[:, None] * num_slots + k[None, :]
        tl.store(indices_ptr + vacant_cell, tl.full([BLOCK_T, BLOCK_K], -1, tl.int64), mask=vacant)
        tl.store(out_ptr + vacant_cell, tl.zeros([BLOCK_T, BLOCK_K], out_ptr.dtype.element_ty), mask=vacant)
    if tl.max(count, axis=0) > num_slots:
        tl.store(overflow_ptr, tl.full([], 1, tl.uint8))  # every program that stores it stores the same
