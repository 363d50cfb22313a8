"""grouped_mlp: the experts of one rank, over rows that stand grouped by expert.

Mirrors `TEGroupedMLP` and `SequentialMLP` of megatron.core.transformer.moe.experts, and a Sequential of GroupedLinear, scaled
activation, GroupedLinear of transformer_engine.pytorch.ops.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ref.config import LinearState, Recipe, check_grouped_mlp, check_pairs, require
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import grouped_linear, linear, segments
from moe_ref.rounding import accumulator_dtype, round_to


def grouped_mlp(
    rows_PH: Tensor,
    tokens_per_expert_L: Tensor,
    fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor,
    *,
    probs: Tensor | None = None,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    kind: str = "swiglu",
    offset: float = 0.0,
    clamp: float | None = None,
    alpha: float | None = None,
    interleave: int | None = None,
    round_before_probs: bool = False,
    fp8_input_store: bool = False,
    probs_on_input: bool = False,
    align: int | None = None,
    recompute: str | None = None,
    recipe: Recipe | None = None,
    state: tuple[LinearState, LinearState] | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Each expert's two linear layers over its own rows, weighted by the rows' probabilities.

        h = x W1_eᵀ + b1_e;     a = act(h) · p;     y = a W2_eᵀ + p · b2_e     (e the expert in whose segment the row stands)

    With `probs_on_input` (Llama 4, where K = 1; nothing here sees K) the row is weighted instead of what becomes of it:

        h = (p · x) W1_eᵀ + b1_e;     a = act(h);     y = a W2_eᵀ + b2_e

    Rows behind the last segment are not read, nor are their probs: there the output is 0, and nothing of them reaches a gradient.

    Args:
        rows_PH: bfloat16, float16, float32 or float64; H is the latent width where there is one.
        tokens_per_expert_L: int32 or int64, ≥ 0, together at most P.
        fc1_weight_LFH: [L,2F,H] for a gated kind, gates first or interleaved; [L,F,H] for the others.
        fc2_weight_LHF: [L,H,F].
        probs: [P] floating point, or None for 1.
        fc1_bias, fc2_bias: [L,2F] or [L,F], and [L,H]; floating point, or None. Each is used without the other.
        kind, offset, clamp, alpha, interleave, round_before_probs: as in `glu`, or a kind of `activation` and none of them but the last.
        fp8_input_store: as in `glu`, of h as it is rounded to the dtype of the rows. Recomputing changes nothing: what is computed again is stored again.
        align: each expert's rows are extended by rows of zeros with prob 0 to a multiple of it, and trimmed afterwards; recipes whose blocks
            lie along tokens may need it (`Recipe.alignment`).
        recompute: None, "moe_act" (the activation is computed again in the backward) or "moe" (all of it is): the same results.
        recipe: of both linear layers, see `grouped_linear`; None for high precision.
        state, noise: as in `grouped_linear`, a pair for fc1 and fc2. The noise has a row for each row of the buffer, padding by `align`
            included; more rows are not read.

    Returns:
        [P,H] in the dtype of the rows.

    Rounding, each once, to the dtype of the rows: p · x; h, its bias included; a; a W2ᵀ; and after it, separately, the sum with p · b2,
    which is taken in float32 (float64 if an input is) whatever the dtype of b2. Gradients round where these values do.

    Raises:
        ValueError: see `moe_ref.config`: check_grouped_mlp, check_kind, check_input_store, check_pairs; and `grouped_linear`.

    Source: TEGroupedMLP.forward. `SequentialMLP` adds b1 after rounding, and does not know of interleaving; with probs_on_input both
    scale as above.
    """
    shape: dict[str, Any] = {"offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    act = chosen_activation(kind, **shape, round_before_probs=round_before_probs, fp8_input_store=fp8_input_store)
    check_grouped_mlp(
        rows_PH,
        tokens_per_expert_L,
        fc1_weight_LFH,
        fc2_weight_LHF,
        probs,
        fc1_bias,
        fc2_bias,
        interleave,
        kind,
        probs_on_input,
        align,
        recompute,
    )
    check_pairs(state, noise)
    total = segments(tokens_per_expert_L, len(rows_PH))[-1].stop
    weights = (fc1_weight_LFH, fc2_weight_LHF, fc1_bias, fc2_bias)
    linears = [partial(grouped_linear, recipe=recipe, state=s) for s in state or (None, None)]
    run = partial(
        _experts,
        act=act,
        linears=linears,
        noise=noise,
        align=align,
        probs_on_input=probs_on_input,
        recompute=recompute == "moe_act",
    )
    inputs = (rows_PH[:total], tokens_per_expert_L, None if probs is None else probs[:total], *weights)
    out_PH = checkpoint(run, *inputs, use_reentrant=False) if recompute == "moe" else run(*inputs)
    return torch.cat([out_PH, out_PH.new_zeros((len(rows_PH) - total, out_PH.shape[1]))])


def sequential_mlp(
    rows_PH: Tensor,
    tokens_per_expert_L: Tensor,
    fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor,
    *,
    probs: Tensor | None = None,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """`grouped_mlp` with one expert after another.

        for e in experts: y[segment e] = grouped_mlp(x[segment e], W1_e, W2_e, …)

    Args, rounding, errors: as `grouped_mlp`, and the same function of the same weights, whatever the settings; but it takes no state and
    no noise, which would be for all experts together.

    Source: SequentialMLP.
    """
    read = {"interleave": None, "kind": "swiglu", "probs_on_input": False, "align": None, "recompute": None} | settings
    whole = (rows_PH, tokens_per_expert_L, fc1_weight_LFH, fc2_weight_LHF, probs, fc1_bias, fc2_bias)
    check_grouped_mlp(*whole, *(read[name] for name in ("interleave", "kind", "probs_on_input", "align", "recompute")))
    for name in ("state", "noise"):
        require(settings.get(name) is None, name, "given", "None: it would be for all experts together")
    outputs = []
    own = segments(tokens_per_expert_L, len(rows_PH))
    for e, rows in enumerate(own):
        of_e = slice(e, e + 1)
        own_probs = None if probs is None else probs[rows]
        b1, b2 = (None if bias is None else bias[of_e] for bias in (fc1_bias, fc2_bias))
        of_e_only = (rows_PH[rows], tokens_per_expert_L[of_e], fc1_weight_LFH[of_e], fc2_weight_LHF[of_e])
        outputs.append(grouped_mlp(*of_e_only, probs=own_probs, fc1_bias=b1, fc2_bias=b2, **settings))
    return torch.cat([*outputs, torch.zeros_like(rows_PH[own[-1].stop :])])


def latent_projection(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b: from H down to the latent width before dispatch, and from there up to H after combine; once a token.

    Routing and shared experts stay in H; `grouped_mlp` then reads and writes rows of the latent width.

    Rounding and errors: as `moe_ref.experts.linear.linear`.

    Source: MoELayer.fc1_latent_proj, fc2_latent_proj.
    """
    return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)


def _experts(
    rows_PH: Tensor,
    tokens_per_expert_L: Tensor,
    probs: Tensor | None,
    fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor,
    fc1_bias: Tensor | None,
    fc2_bias: Tensor | None,
    *,
    act: Callable[..., Tensor],
    linears: Sequence[Callable[..., Tensor]],
    noise: tuple[Tensor, Tensor] | None,
    align: int | None,
    probs_on_input: bool,
    recompute: bool,
) -> Tensor:
    """`grouped_mlp` where no row is behind the last segment."""
    wide = _wide(rows_PH, probs, fc2_bias)
    p_P = (
        None if probs is None else probs.to(wide)
    )  # widened once, so that the two ways to its gradient meet before it is rounded
    counts = tokens_per_expert_L
    if align is not None:
        rows_PH, p_P = (
            pad_segments(rows_PH, tokens_per_expert_L, align),
            None if p_P is None else pad_segments(p_P, tokens_per_expert_L, align),
        )
        counts = -(-tokens_per_expert_L // align) * align
    if p_P is not None and probs_on_input:
        rows_PH, p_P = round_to(rows_PH.to(wide) * p_P[:, None], rows_PH.dtype), None
    noise1, noise2 = (None, None) if noise is None else (each[:, : len(rows_PH)] for each in noise)
    h_PF = linears[0](rows_PH, fc1_weight_LFH, counts, bias=fc1_bias, noise=noise1)
    a_PF = checkpoint(act, h_PF, probs=p_P, use_reentrant=False) if recompute else act(h_PF, probs=p_P)
    y_PH = linears[1](a_PF, fc2_weight_LHF, counts, noise=noise2)
    if fc2_bias is not None:
        bias_PH = torch.cat(
            [bias_H.expand(count, -1) for bias_H, count in zip(fc2_bias.to(wide), counts.tolist(), strict=True)]
        )
        y_PH = round_to(y_PH.to(wide) + (bias_PH if p_P is None else bias_PH * p_P[:, None]), y_PH.dtype)
    return y_PH if align is None else trim_segments(y_PH, tokens_per_expert_L, align)


def _wide(*tensors: Tensor | None) -> torch.dtype:
    """float64 if one of them is, else float32."""
    doubles = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return accumulator_dtype(torch.float64 if doubles else torch.float32)


def pad_segments(x_P: Tensor, tokens_per_expert_L: Tensor, align: int) -> Tensor:
    """x with zeros behind each expert's segment, until its length is a multiple of `align`."""
    pieces = []
    for own in segments(tokens_per_expert_L, len(x_P)):
        missing = -(own.stop - own.start) % align
        pieces += [x_P[own], x_P.new_zeros((missing, *x_P.shape[1:]))]
    return torch.cat(pieces)


def trim_segments(x_P: Tensor, tokens_per_expert_L: Tensor, align: int) -> Tensor:
    """The x that `pad_segments` had."""
    pieces, start = [], 0
    for count in tokens_per_expert_L.tolist():
        pieces.append(x_P[start : start + count])
        start += count + -count % align
    return torch.cat(pieces)
