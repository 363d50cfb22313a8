"""grouped_mlp: the experts of one rank, over rows grouped by expert.

Mirrors `TEGroupedMLP` and `SequentialMLP` of megatron.core.transformer.moe.experts, and a
Sequential of GroupedLinear, scaled activation, GroupedLinear of transformer_engine.pytorch.ops.
Differs: docs/differences.md#experts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ref.config import LinearAmax, LinearState, Recipe, check_grouped_mlp, check_kept, check_pairs, require
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import delayed_linear, expert_slices, linear
from moe_ref.rounding import accumulator_dtype, round_to


def grouped_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight_LFH: Tensor, fc2_weight_LHF: Tensor, *,
    probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    kind: str = "swiglu", offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, round_before_probs: bool = False, fp8_input_store: bool = False,
    probs_on_input: bool = False, align: int | None = None, recompute: str | None = None,
    recipe: Recipe | None = None, state: tuple[LinearState, LinearState] | None = None,
    noise: tuple[Tensor, Tensor] | None = None, wgrads: list[Callable[..., Tensor]] | None = None,
    rows_again: Callable[[], Tensor] | None = None,
    amaxes: tuple[LinearAmax, LinearAmax] | None = None,
) -> Tensor:  # fmt: skip
    """Each expert's two linear layers over its own rows, weighted by the rows' probabilities.

        h = x W1_eᵀ + b1_e;   a = act(h) · p;   y = a W2_eᵀ + p · b2_e       e the expert of the row
        probs_on_input:  h = (p · x) W1_eᵀ + b1_e;   a = act(h);   y = a W2_eᵀ + b2_e

    Rows and probs past the last segment are never read: there y is 0, and gradients ignore them.

    Args:
        rows_PH, tokens_per_expert_L: as in `grouped_linear`.
        fc1_weight_LFH: [L,2F,H] for a gated kind, gates first or interleaved; [L,F,H] for others.
        fc2_weight_LHF: [L,H,F].
        probs: [P] floating point, or None for 1. Gradients of its uses may be rounded one by one.
        fc1_bias, fc2_bias: [L,2F] or [L,F], and [L,H]; floating point, or None, independently.
        kind, offset, clamp, alpha, interleave, …: as in `glu` and `activation`.
        align: zeros extend each segment to a multiple of it, and are trimmed afterwards.
        recompute: "moe_act" or "moe": the activation, or all, again in the backward; same results.
        recipe, state, noise: as in `grouped_linear`, the last two a pair for fc1 and fc2; noise is
            [2,P,·] of the aligned rows.
        wgrads: a list, or None. A backward appends to it, in place of the weights' gradients, a
            function of `accumulate_into` for each weight that has one, fc2's first: `grouped_wgrad`
            of what the backward has. Mirrors `backward_dw`.
        rows_again: makes the rows once more, or None. Then they are not saved: the backward calls
            it, and makes of its rows all that was made of them before fc1. Not with "moe".
        amaxes: with a state, a pair for fc1 and fc2, or None; for `update_scales`. The forward
            raises those of input and weight to what it quantises, a backward those of grad_output.

    Rounding, each once, to the dtype of the rows: p · x; h with its bias; a; a W2ᵀ; the sum with
    p · b2, in float32 (float64 if an input is). Gradients round where these do; so may dp's parts.

    Raises:
        ValueError: see `moe_ref.config`: check_grouped_mlp, check_kind, check_input_store,
            check_pairs, check_kept; `grouped_linear`.
    """
    shape: dict[str, Any] = {"offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    act = chosen_activation(kind, **shape, round_before_probs=round_before_probs, fp8_input_store=fp8_input_store)
    check_grouped_mlp(
        rows_PH, tokens_per_expert_L, fc1_weight_LFH, fc2_weight_LHF, probs, fc1_bias, fc2_bias, interleave, kind,
        probs_on_input, align, recompute,
    )  # fmt: skip
    check_pairs(state, noise, amaxes)
    check_kept(wgrads, rows_again, recompute)
    total = expert_slices(tokens_per_expert_L, len(rows_PH))[-1].stop
    weights = (fc1_weight_LFH, fc2_weight_LHF, fc1_bias, fc2_bias)
    pairs = zip(state or (None, None), amaxes or (None, None), strict=True)
    linears = [partial(delayed_linear, recipe=recipe, state=s, amaxes=a, wgrads=wgrads) for s, a in pairs]
    used_rows_again = None if rows_again is None else lambda: rows_again()[:total]
    run = partial(_experts, act=act, linears=linears, noise=noise, align=align, probs_on_input=probs_on_input)
    run = partial(run, recompute=recompute == "moe_act", rows_again=used_rows_again)
    inputs = (rows_PH[:total], tokens_per_expert_L, None if probs is None else probs[:total], *weights)
    out_PH = checkpoint(run, *inputs, use_reentrant=False) if recompute == "moe" else run(*inputs)
    return torch.cat([out_PH, out_PH.new_zeros((len(rows_PH) - total, out_PH.shape[1]))])


def sequential_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight_LFH: Tensor, fc2_weight_LHF: Tensor,
    *, probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """`grouped_mlp` with one expert after another.

        for e in experts: y[segment e] = grouped_mlp(x[segment e], W1_e, W2_e, …)

    Args, rounding, errors: as `grouped_mlp`, and the same function of the same weights; but without
    state, noise, wgrads, rows_again and amaxes, which would be for all experts together.
    """
    defaults = {
        "interleave": None,
        "kind": "swiglu",
        "probs_on_input": False,
        "align": None,
        "recompute": None,
    } | settings
    inputs = (rows_PH, tokens_per_expert_L, fc1_weight_LFH, fc2_weight_LHF, probs, fc1_bias, fc2_bias)
    check_grouped_mlp(
        *inputs, *(defaults[name] for name in ("interleave", "kind", "probs_on_input", "align", "recompute"))
    )
    for name in ("state", "noise", "wgrads", "rows_again", "amaxes"):
        require(settings.get(name) is None, name, "given", "None: it would be for all experts together")
    outputs = []
    slices = expert_slices(tokens_per_expert_L, len(rows_PH))
    for e, rows in enumerate(slices):
        of_e = slice(e, e + 1)
        expert_probs = None if probs is None else probs[rows]
        b1, b2 = (None if bias is None else bias[of_e] for bias in (fc1_bias, fc2_bias))
        of_e_only = (rows_PH[rows], tokens_per_expert_L[of_e], fc1_weight_LFH[of_e], fc2_weight_LHF[of_e])
        outputs.append(grouped_mlp(*of_e_only, probs=expert_probs, fc1_bias=b1, fc2_bias=b2, **settings))
    return torch.cat([*outputs, torch.zeros_like(rows_PH[slices[-1].stop :])])


def latent_projection(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b, once per token: from H down to the latent width before dispatch, or up again after
    combine.

    Routing and shared experts stay in H; `grouped_mlp` then reads and writes rows of the latent
    width. Args, rounding and errors: as in `grouped_linear` with one expert, whose weight is [M,N].

    Source: MoELayer.fc1_latent_proj, fc2_latent_proj.
    """
    return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)


def _experts(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, probs: Tensor | None, fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor, fc1_bias: Tensor | None, fc2_bias: Tensor | None,
    *, act: Callable[..., Tensor], linears: Sequence[Callable[..., Tensor]],
    noise: tuple[Tensor, Tensor] | None, align: int | None, probs_on_input: bool, recompute: bool,
    rows_again: Callable[[], Tensor] | None,
) -> Tensor:  # fmt: skip
    """`grouped_mlp` without rows past the last segment."""
    accumulator = accumulator_of(rows_PH, probs, fc2_bias)
    p_P = None if probs is None else probs.to(accumulator)  # once: both parts of its gradient add before one rounding
    counts = tokens_per_expert_L
    if align is not None:
        p_P = None if p_P is None else pad_segments(p_P, tokens_per_expert_L, align)
        counts = -(-tokens_per_expert_L // align) * align
    noise1, noise2 = (None, None) if noise is None else (layer_noise[:, : int(counts.sum())] for layer_noise in noise)
    on_input_P, p_P = (p_P, None) if probs_on_input else (None, p_P)

    def first(x_PH: Tensor) -> Tensor:
        x_PH = x_PH if align is None else pad_segments(x_PH, tokens_per_expert_L, align)
        if on_input_P is not None:
            x_PH = round_to(x_PH.to(accumulator) * on_input_P[:, None], x_PH.dtype)
        return linears[0](x_PH, fc1_weight_LFH, counts, bias=fc1_bias, noise=noise1)

    h_PF = first(rows_PH) if rows_again is None else made_again(first, rows_PH, rows_again)
    a_PF = checkpoint(act, h_PF, probs=p_P, use_reentrant=False) if recompute else act(h_PF, probs=p_P)
    second = partial(linears[1], weight_LMN=fc2_weight_LHF, tokens_per_expert_L=counts, noise=noise2)
    y_PH = made_again(second, a_PF, lambda: act(h_PF, probs=p_P)) if recompute else second(a_PF)
    if fc2_bias is not None:
        bias_PH = torch.cat(
            [bias_H.expand(count, -1) for bias_H, count in zip(fc2_bias.to(accumulator), counts.tolist(), strict=True)]
        )
        y_PH = round_to(y_PH.to(accumulator) + (bias_PH if p_P is None else bias_PH * p_P[:, None]), y_PH.dtype)
    return y_PH if align is None else trim_segments(y_PH, tokens_per_expert_L, align)


def made_again(function: Callable[[Tensor], Tensor], x: Tensor, remake: Callable[[], Tensor]) -> Tensor:
    """function(x). Neither x nor what is made of it is saved: the backward runs function(remake()),
    and saved is what both hold.
    """
    first_input = [x]

    def run() -> Tensor:
        if first_input:
            return function(first_input.pop())
        with torch.no_grad():
            x_again = remake()
        return function(x_again.detach().requires_grad_(needs_grad))

    needs_grad = x.requires_grad
    out: Tensor = checkpoint(run, use_reentrant=False)
    return out


def accumulator_of(*tensors: Tensor | None) -> torch.dtype:
    """float64 if one of them is, else float32."""
    doubles = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return accumulator_dtype(torch.float64 if doubles else torch.float32)


def pad_segments(x_P: Tensor, tokens_per_expert_L: Tensor, align: int) -> Tensor:
    """x with zeros after each expert's segment, up to a multiple of `align`."""
    pieces = []
    for rows in expert_slices(tokens_per_expert_L, len(x_P)):
        missing = -(rows.stop - rows.start) % align
        pieces += [x_P[rows], x_P.new_zeros((missing, *x_P.shape[1:]))]
    return torch.cat(pieces)


def trim_segments(x_P: Tensor, tokens_per_expert_L: Tensor, align: int) -> Tensor:
    """The inverse of `pad_segments`."""
    pieces, start = [], 0
    for count in tokens_per_expert_L.tolist():
        pieces.append(x_P[start : start + count])
        start += count + -count % align
    return torch.cat(pieces)
