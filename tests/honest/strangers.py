"""Honest implementations in the styles of other teams, each of a few functions.

Slots      a token's rows gathered into [T,K] slots and added; rows returned inside a wider buffer,
           integers of 8 and 32 bits
Segments   rows sorted by token, torch.segment_reduce
Sparse     sums as a sparse matrix times the rows
Library    permute as a torch.library operator
Masked     weights of a softmax over all experts, the others -∞; unchosen experts get 0 by mask
Fast       exp2 and reciprocals two and one ulp off, subnormal exponentials 0; int16 indices
Frugal     saves the float32 weights and the choice alone; refuses second derivatives
Padded     experts' rows padded to the longest, torch.bmm
Gathered   a weight per row, einsum and index_add
Recomputed activations under no_grad, in place; the backward computes them again by autograd
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from moe_ref import config
from moe_ref.permutation.permute import PADDING
from tests.honest import routers
from tests.honest.activations import Eager

TINY = torch.finfo(torch.float32).tiny


def wide_of(*tensors: Tensor | None) -> torch.dtype:
    doubles = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if doubles else torch.float32


def refusing(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises where its gradients would need a graph."""

    def once(ctx: Any, *cotangents: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivative")
        return backward(ctx, *cotangents)

    return once


# ---- permutation


def in_slots(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    if not len(rows):
        return rows.new_zeros(tokens, rows.shape[1])
    order, counts = token.argsort(stable=True), torch.bincount(token, minlength=tokens)
    slot = torch.arange(int(counts.max()))
    at = (counts.cumsum(0) - counts)[:, None] + slot
    gathered = rows[order[at.clamp(max=len(rows) - 1)]]
    return torch.where((slot < counts[:, None])[..., None], gathered, 0).sum(1)


def in_segments(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    if not rows.numel():
        return rows.new_zeros(tokens, rows.shape[1])
    lengths = torch.bincount(token, minlength=tokens)
    return torch.segment_reduce(rows[token.argsort(stable=True)], "sum", lengths=lengths, axis=0)


def by_sparse_matrix(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    if not rows.numel():
        return rows.new_zeros(tokens, rows.shape[1])
    cells = torch.stack([token, torch.arange(len(token))])
    ones = torch.ones(len(token), dtype=rows.dtype)
    return torch.sparse.mm(torch.sparse_coo_tensor(cells, ones, (tokens, len(token)), check_invariants=True), rows)


def permuting(added: Callable[[Tensor, Tensor, int], Tensor]) -> SimpleNamespace:
    """unpermute in plain torch, with a way to add the rows of each token."""

    def unpermute(rows, row_map, *, restore_shape=None, probs=None):
        config.check_unpermute(
            rows, len(row_map.token_P), row_map.num_tokens, row_map.num_experts, restore_shape, probs
        )
        real, dtype = row_map.token_P != PADDING, wide_of(rows, probs)
        token, weighted = row_map.token_P[real], rows[real].to(dtype)
        if probs is not None:
            weighted = weighted * probs[token, row_map.expert_P[real]].to(dtype)[:, None]
        return added(weighted, token, row_map.num_tokens).to(rows.dtype)

    def permute(*tensors, **settings) -> dict[str, Any]:
        out: config.Permuted = moe_ref.permute(*tensors, **settings)
        rows = torch.cat([out.rows, out.rows], 1)[:, : out.rows.shape[1]]
        integers = {"overflow": out.overflow.to(torch.uint8), "tokens_per_expert": out.tokens_per_expert.int()}
        return out._asdict() | integers | {"rows": rows}

    return SimpleNamespace(permute=permute, unpermute=unpermute)


@torch.library.custom_op("strangers::rows_of", mutates_args=())
def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """x[index], zeros where the index is negative."""
    out = x.new_zeros(len(index), *x.shape[1:])
    out[index >= 0] = x[index[index >= 0]]
    return out


def _save_index(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = len(inputs[0])


def _rows_back(ctx: Any, g: Tensor):
    (index,) = ctx.saved_tensors
    sums = g.new_zeros(ctx.rows, *g.shape[1:], dtype=wide_of(g))
    return sums.index_add(0, index[index >= 0], g[index >= 0].to(sums.dtype)).to(g.dtype), None


rows_of.register_autograd(_rows_back, setup_context=_save_index)


def library_permute(tokens, routing_map, **settings) -> config.Permuted:
    out = moe_ref.permute(tokens.detach(), routing_map, **settings)
    return out._replace(rows=rows_of(tokens, out.row_map.token_P))


Slots, Segments, Sparse = permuting(in_slots), permuting(in_segments), permuting(by_sparse_matrix)
Library = SimpleNamespace(permute=library_permute, unpermute=Segments.unpermute)


# ---- router


def masked_routing(logits, *, topk, score_function="softmax", pre_softmax=False, scaling_factor=None, **settings):
    settings |= {"score_function": score_function, "pre_softmax": pre_softmax, "scaling_factor": scaling_factor}
    chosen = routers.Autograd.topk_routing(logits.detach(), topk=topk, **settings).routing_map
    x = logits.to(wide_of(logits))
    if score_function == "softmax" and not pre_softmax:
        weights = x.masked_fill(~chosen, -torch.inf).softmax(1)
    else:
        weights = routers.How().score(x, score_function).masked_fill(~chosen, 0)
        if score_function != "softmax" and topk > 1:
            weights = weights / (weights.sum(1, keepdim=True) + routers.TINY)
    weights = weights if scaling_factor is None else weights * scaling_factor
    return config.Routed(weights.to(logits.dtype), chosen)


def off(x: Tensor, ulps: int) -> Tensor:
    """Float32 numbers up to some ulps off, by a hash of their bits; but not 1, 2, 4 …"""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    moved = (bits + (((bits * -1640531527) >> 7) % (2 * ulps + 1) - ulps)).view(torch.float32)
    return torch.where(x.isfinite() & (x.abs() > 2 * TINY) & (bits % 2**23 != 0), moved, x)


def fast_exp(x: Tensor, ulps: int = 2) -> Tensor:
    power = off(routers.exp_base_two(x), ulps)
    return torch.where(power < TINY, 0, power) if x.dtype == torch.float32 else power


def fast_sigmoid(x: Tensor) -> Tensor:
    return off(1 / (1 + fast_exp(-x)), 1)


class _Weights(torch.autograd.Function):
    """softmax of the chosen logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        weights = logits.to(wide_of(logits)).gather(1, index).softmax(1)
        ctx.save_for_backward(weights, index)
        ctx.like = logits.shape, logits.dtype
        return weights.to(logits.dtype)

    @staticmethod
    @refusing
    def backward(ctx: Any, g: Tensor):
        (weights, index), (shape, dtype) = ctx.saved_tensors, ctx.like
        d = weights * (g - (weights * g).sum(1, keepdim=True))
        return torch.zeros(shape, dtype=weights.dtype).scatter(1, index, d).to(dtype), None


def frugal_indices(logits, *, topk):
    config.check_logits(logits)
    config.check_topk(topk, logits.shape[1])
    with torch.inference_mode():
        index = logits.topk(topk, sorted=False).indices
    return config.TopK(_Weights.apply(logits, index.clone()), index.clone())


_FAST = routers.How(exp=fast_exp, sigmoid=fast_sigmoid, closed=True)


def fast_indices(logits, **settings):
    probs, index = routers.topk_indices(_FAST, logits, **settings)
    return {"indices": index.to(torch.int16), "probs": probs}


Masked = SimpleNamespace(topk_routing=masked_routing)
Fast = SimpleNamespace(topk_indices=fast_indices)
Frugal = SimpleNamespace(topk_indices=frugal_indices)


# ---- experts


def counts_of(tokens_per_expert: Tensor, rows: Tensor) -> list[int]:
    counts: list[int] = tokens_per_expert.tolist()
    config.check_count_values(counts, len(rows))
    return counts


def padded(x: Tensor, counts: list[int]) -> Tensor:
    """[L, longest, N], zeros after each expert's rows."""
    return torch.nn.utils.rnn.pad_sequence(x[: sum(counts)].split(counts), batch_first=True)


def padded_linear(rows, weight, tokens_per_expert, *, bias=None):
    config.check_grouped_linear(rows, weight, tokens_per_expert, bias)
    counts, dtype = counts_of(tokens_per_expert, rows), wide_of(rows)
    y = torch.bmm(padded(rows.to(dtype), counts), weight.to(dtype).mT)
    y = y if bias is None else y + bias.to(dtype)[:, None]
    used = torch.arange(y.shape[1]) < tokens_per_expert[:, None]
    return torch.nn.functional.pad(y[used].to(rows.dtype), (0, 0, 0, len(rows) - sum(counts)))


def gathered_linear(rows, weight, tokens_per_expert, *, bias=None):
    config.check_grouped_linear(rows, weight, tokens_per_expert, bias)
    counts, dtype = counts_of(tokens_per_expert, rows), wide_of(rows)
    expert = torch.arange(len(counts)).repeat_interleave(tokens_per_expert)
    y = torch.einsum("pn,pmn->pm", rows[: len(expert)].to(dtype), weight.to(dtype)[expert])
    y = y if bias is None else y + bias.to(dtype)[expert]
    return torch.cat([y.to(rows.dtype), rows.new_zeros(len(rows) - len(expert), len(weight[0]))])


def gathered_wgrad(d_out, rows, tokens_per_expert, *, accumulate_into=None):
    config.check_grouped_wgrad(d_out, rows, tokens_per_expert, accumulate_into)
    expert = torch.arange(len(counts_of(tokens_per_expert, rows))).repeat_interleave(tokens_per_expert)
    dtype, used = wide_of(rows), slice(len(expert))
    terms = torch.einsum("pm,pn->pmn", d_out[used].to(dtype), rows[used].to(dtype))
    total = terms.new_zeros(len(tokens_per_expert), *terms.shape[1:]).index_add(0, expert, terms)
    if accumulate_into is None:
        return total.to(rows.dtype)
    new = (accumulate_into + total).to(accumulate_into.dtype)
    return torch.where((tokens_per_expert > 0)[:, None, None], new, accumulate_into)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], h: Tensor, probs: Tensor | None) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(h, probs)
        return run(h.clone().mul_(1), probs)

    @staticmethod
    @refusing
    def backward(ctx: Any, g: Tensor):
        inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        gradients = torch.autograd.grad(out, [x for x in inputs if x is not None], g)
        return None, gradients[0], gradients[1] if len(gradients) == 2 else None


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(h, *, probs=None, kind=None, offset=0.0, clamp=None, alpha=None, interleave=None):
        passed = {"kind": kind, "offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
        passed = {name: x for name, x in passed.items() if x is not None and (x or name != "offset")}
        return _Recomputed.apply(lambda h, probs: function(h, probs=probs, **passed), h, probs)

    return call


Padded = SimpleNamespace(grouped_linear=padded_linear)
Gathered = SimpleNamespace(grouped_linear=gathered_linear, grouped_wgrad=gathered_wgrad)
Recomputed = SimpleNamespace(glu=recomputed(Eager.glu), activation=recomputed(Eager.activation))
