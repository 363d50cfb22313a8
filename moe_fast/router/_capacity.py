"""Kernels that choose the tokens that each expert keeps.

The key of a token for an expert is an integer. Keys have the order of the probs, and the key of a
token that is not routed to the expert is the least of all. An expert keeps the tokens whose key is
above some bound, and of those whose key equals it the first ones. Both the bound and the number of
the last token are found bit by bit.
"""

import triton
import triton.language as tl

from moe_fast.router._scores import ordered


@triton.jit
def least_key(KEY_BITS: tl.constexpr, dtype: tl.constexpr):
    """The key of tokens that are not routed."""
    return tl.full([], -(2 ** (KEY_BITS - 1)), dtype)


@triton.jit
def load_keys(
    probs_ptr, stride_probs_t, stride_probs_e, map_ptr, stride_map_t, stride_map_e, t, e, in_bounds,
    KEY_BITS: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """([BLOCK_T, BLOCK_E] probs as bits, 0 where not routed; the keys). With KEY_BITS 1 all routed
    tokens have the same key.
    """
    routed = tl.load(map_ptr + t[:, None] * stride_map_t + e[None, :] * stride_map_e, mask=in_bounds, other=0) != 0
    # the probs of other experts may be anything
    bits = tl.load(probs_ptr + t[:, None] * stride_probs_t + e[None, :] * stride_probs_e, mask=routed, other=0)
    key = tl.zeros(bits.shape, KEY)
    if KEY_BITS > 1:
        magnitude: tl.constexpr = 2 ** (bits.dtype.primitive_bitwidth - 1) - 1
        word = bits.to(KEY)
        word = tl.where(word == -magnitude - 1, 0, word)  # -0 becomes +0
        key = tl.maximum(ordered(word, magnitude), least_key(KEY_BITS, KEY) + 1)  # a NaN is routed, too
    return bits, tl.where(routed, key, least_key(KEY_BITS, KEY))


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "stride_map_t", "stride_map_e"])
def drop_keys_kernel(
    # probs, as bits, and the map
    probs_ptr, stride_probs_t, stride_probs_e, map_ptr, stride_map_t, stride_map_e,
    # result [E,T]
    keys_ptr,
    # sizes
    num_tokens, num_experts,
    KEY_BITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program writes the keys of a tile of [tokens, experts]; they are contiguous per expert."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_bounds = (t < num_tokens)[:, None] & (e < num_experts)[None, :]  # the last tiles stick out on both sides
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    _, key = load_keys(
        probs_ptr, stride_probs_t, stride_probs_e, map_ptr, stride_map_t, stride_map_e, t, e, in_bounds, KEY_BITS, KEY
    )
    tl.store(keys_ptr + e[None, :] * num_tokens + t[:, None], key, mask=in_bounds)


@triton.jit
def load_columns(keys_ptr, e, t, num_tokens, num_experts, KEY_BITS: tl.constexpr):
    """[BLOCK_E, BLOCK_T] keys; past the last token they are the least key."""
    in_bounds = (e < num_experts)[:, None] & (t < num_tokens)[None, :]  # the last tiles stick out on both sides
    return tl.load(
        keys_ptr + e[:, None] * num_tokens + t[None, :],
        mask=in_bounds,
        other=least_key(KEY_BITS, keys_ptr.dtype.element_ty),
    )


@triton.jit
def is_kept(key, t, least, end_token):
    """Whether a token is kept: its key is above `least`, or equal to it and t < end_token. Without
    an end_token equal keys are not kept.
    """
    mask = key > least
    if end_token is not None:
        mask = mask | ((key == least) & (t < end_token))
    return mask


@triton.jit
def count_kept(
    keys_ptr, all_keys, e, least, end_token, num_tokens, num_experts,
    KEY_BITS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """[BLOCK_E, 1] int32: how many tokens each expert keeps with these bounds."""
    t = tl.arange(0, BLOCK_T)
    if WHOLE:
        count = tl.sum(is_kept(all_keys, t[None, :], least, end_token).to(tl.int32), axis=1)
    else:
        count = tl.zeros(e.shape, tl.int32)
        for first in range(0, num_tokens, BLOCK_T):
            key = load_columns(keys_ptr, e, first + t, num_tokens, num_experts, KEY_BITS)
            count += tl.sum(is_kept(key, first + t[None, :], least, end_token).to(tl.int32), axis=1)
    return count[:, None]


@triton.jit(do_not_specialize=["num_experts", "room", "token_bits"])
def drop_search_kernel(
    # [E,T]
    keys_ptr,
    # results [E]
    least_ptr, end_token_ptr,
    # sizes
    num_tokens, num_experts, room, token_bits,
    KEY_BITS: tl.constexpr, PAD: tl.constexpr,
    WHOLE: tl.constexpr,  # all tokens are in one tile
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program finds the bounds of BLOCK_E experts: the key above which an expert keeps all
    tokens, and the token before which it keeps those whose key equals it.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    all_keys = load_columns(keys_ptr, e, tl.arange(0, BLOCK_T), num_tokens, num_experts, KEY_BITS)
    least = tl.zeros([BLOCK_E, 1], KEY) + least_key(KEY_BITS, KEY)
    wanted = tl.zeros([BLOCK_E, 1], tl.int32) + room
    if not PAD:
        wanted = tl.minimum(
            wanted, count_kept(keys_ptr, all_keys, e, least, None, num_tokens, num_experts, KEY_BITS, WHOLE, BLOCK_T)
        )
    for i in range(KEY_BITS):
        higher = least + (tl.full([BLOCK_E, 1], 1, KEY) << (KEY_BITS - 1 - i))
        enough = (
            count_kept(keys_ptr, all_keys, e, higher - 1, None, num_tokens, num_experts, KEY_BITS, WHOLE, BLOCK_T)
            >= wanted
        )
        least = tl.where(enough, higher, least)
    end_token = tl.zeros([BLOCK_E, 1], tl.int32)
    for i in range(token_bits):
        later_token = end_token + (1 << (token_bits - 1 - i))
        fits = (
            count_kept(keys_ptr, all_keys, e, least, later_token, num_tokens, num_experts, KEY_BITS, WHOLE, BLOCK_T)
            <= wanted
        )
        end_token = tl.where(fits, later_token, end_token)
    real = (e < num_experts)[:, None]  # the last tile sticks out
    tl.store(least_ptr + e[:, None], least, mask=real)
    tl.store(end_token_ptr + e[:, None], end_token, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "stride_map_t", "stride_map_e"])
def drop_kernel(
    # probs, as bits, and the map
    probs_ptr, stride_probs_t, stride_probs_e, map_ptr, stride_map_t, stride_map_e,
    # bounds of each expert's tokens
    least_ptr, end_token_ptr,
    # results, contiguous
    out_ptr, kept_map_ptr,
    # sizes
    num_tokens, num_experts,
    KEY_BITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program writes a tile of [tokens, experts] of the map of kept tokens, and of the probs of
    kept tokens that are routed.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_row = e < num_experts  # the last block sticks out
    in_bounds = (t < num_tokens)[:, None] & in_row[None, :]  # on both sides
    KEY: tl.constexpr = least_ptr.dtype.element_ty
    bits, key = load_keys(
        probs_ptr, stride_probs_t, stride_probs_e, map_ptr, stride_map_t, stride_map_e, t, e, in_bounds, KEY_BITS, KEY
    )
    least = tl.load(least_ptr + e, mask=in_row, other=0)[None, :]  # the last block sticks out
    end_token = tl.load(end_token_ptr + e, mask=in_row, other=0)[None, :]  # as above
    kept_map = is_kept(key, t[:, None], least, end_token)
    cell = t[:, None] * num_experts + e[None, :]
    tl.store(out_ptr + cell, tl.where(kept_map, bits, 0), mask=in_bounds)  # unrouted bits are 0
    tl.store(kept_map_ptr + cell, kept_map.to(tl.uint8), mask=in_bounds)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "stride_map_t", "stride_map_e"])
def drop_backward_kernel(
    # the gradient of the probs, as bits
    dout_ptr, stride_dout_t, stride_dout_e,
    # which tokens were kept, contiguous, and, where unrouted ones were kept too, which were routed
    kept_map_ptr, map_ptr, stride_map_t, stride_map_e,
    # result, contiguous
    dprobs_ptr,
    # sizes
    num_tokens, num_experts,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of the probs, for a tile of [tokens, experts] per program: it passes where a
    token was kept and routed, and is 0 elsewhere.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_bounds = (t < num_tokens)[:, None] & (e < num_experts)[None, :]  # the last tiles stick out on both sides
    cell = t[:, None] * num_experts + e[None, :]
    through = tl.load(kept_map_ptr + cell, mask=in_bounds, other=0) != 0
    if map_ptr is not None:
        # other entries of the map do not matter
        through = tl.load(map_ptr + t[:, None] * stride_map_t + e[None, :] * stride_map_e, mask=through, other=0) != 0
    # 0 elsewhere
    dout = tl.load(dout_ptr + t[:, None] * stride_dout_t + e[None, :] * stride_dout_e, mask=through, other=0)
    tl.store(dprobs_ptr + cell, dout, mask=in_bounds)
