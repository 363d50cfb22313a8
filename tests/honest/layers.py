"""Honest layers of experts in plain torch, which differ in what the contract leaves open.

Stages      every stage rounded to the rows' dtype, in autograd; sums over K in blocks of 32
Kept        h and the activation stay in float32, as in one fused kernel: one rounding at the end
Doubles     all stages in float64, rounded at the end
OneStep     each product of a sum added by a fused multiply-add; erf by erfc, tanh by σ
Twice       probs widened for each use: activation and second bias have gradients of their own
"""

import math
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import torch
from torch import Tensor

from moe_ref.config import check_grouped_mlp, check_kind
from moe_ref.config.experts import GATED, check_count_values
from tests.honest import experts
from tests.honest.activations import Shipped
from tests.honest.experts import How, Multiplied, Rounded, sigmoid_base_two, tanh_by_sigmoid

BLOCK = 32


def in_blocks(x: Tensor, y: Tensor) -> Tensor:
    """Split along K: partial products of blocks, added as a tree."""
    partial_sums = [x[..., k : k + BLOCK] @ y[k : k + BLOCK] for k in range(0, max(x.shape[-1], 1), BLOCK)]
    while len(partial_sums) > 1:
        unpaired = partial_sums[len(partial_sums) // 2 * 2 :]
        partial_sums = [a + b for a, b in zip(partial_sums[::2], partial_sums[1::2], strict=False)] + unpaired
    return partial_sums[0]


def fused_multiply_add(x: Tensor, y: Tensor) -> Tensor:
    """Each product enters the sum unrounded."""
    total = x.new_zeros((*x.shape[:-1], y.shape[-1]))
    for k in range(x.shape[-1]):
        total = (total.double() + x[..., k, None].double() * y[k].double()).to(x.dtype)
    return total


@dataclass(frozen=True)
class Layers(Shipped):
    """A variant of both layers: `fused` ones are not rounded between stages, `twice` ones widen
    probs for each use.
    """

    fused: bool = False
    twice: bool = False


@dataclass(frozen=True)
class ByComplement(Layers):
    """gelu by erfc, and its tanh form by σ(2z)."""

    def curve(self, x: Tensor, kind: str, alpha: float | None) -> Tensor:
        if kind in ("geglu_erf", "gelu"):
            return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))
        return How.curve(self, x, kind, alpha)


def grouped_mlp(
    variant: Layers, rows, tokens_per_expert, fc1_weight, fc2_weight, *, probs=None, fc1_bias=None, fc2_bias=None,
    kind="swiglu", offset=0.0, clamp=None, alpha=None, interleave=None, probs_on_input=False,
):  # fmt: skip
    check_kind(kind, offset, clamp, alpha, interleave)
    tensors = (rows, tokens_per_expert, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias)
    check_grouped_mlp(*tensors, interleave, kind, probs_on_input, None, None)
    counts = tokens_per_expert.tolist()
    check_count_values(counts, len(rows))
    shape = {"kind": kind} | ({"offset": offset, "clamp": clamp, "alpha": alpha} if kind in GATED else {})
    act = getattr(experts.make(variant), "glu" if kind in GATED else "activation")
    shape |= {"interleave": interleave} if kind in GATED else {}

    def between(x: Tensor) -> Tensor:
        return x if variant.fused else Rounded.apply(x, rows.dtype)

    out, start = [], 0
    for e, count in enumerate(counts):
        segment = slice(start, start + count)
        x, p = variant.wide(rows[segment], probs), None if probs is None else variant.wide(probs[segment], rows)
        if p is not None and probs_on_input:
            x, p = between(x * p[:, None]), None
        h = Multiplied.apply(x, fc1_weight[e].to(x.dtype).T, variant.product)
        h = between(h if fc1_bias is None else h + fc1_bias[e].to(x.dtype))
        a = between(act(h, probs=p, **shape))
        y = Multiplied.apply(a, fc2_weight[e].to(x.dtype).T, variant.product)
        if fc2_bias is not None:
            bias = fc2_bias[e].to(x.dtype).expand(count, -1)
            y = between(y) + (bias if p is None else bias * p[:, None])
        out.append(y.to(rows.dtype))
        start += count
    return torch.cat([*out, rows.new_zeros(len(rows) - start, rows.shape[1])])


def make(variant: Layers) -> SimpleNamespace:
    """The namespace of a variant: both layers, and one expert after another."""
    run = MethodType(grouped_mlp, variant)
    return SimpleNamespace(**vars(experts.make(variant)) | {"grouped_mlp": run, "sequential_mlp": run})


Stages = make(Layers(product=in_blocks))
Kept = make(Layers(fused=True, product=in_blocks))
Doubles = make(Layers(dtype=torch.float64, fused=True))
Twice = make(Layers(twice=True))
OneStep = make(ByComplement(sigmoid=sigmoid_base_two, tanh=tanh_by_sigmoid, product=fused_multiply_add, closed=True))
