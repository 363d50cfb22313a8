"""shared_experts: the MLP of every token, whatever its routing.

Mirrors `SharedExpertMLP` of megatron.core.transformer.moe.shared_experts.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ref.config import LinearState, Recipe, check_pairs, check_shared_experts
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import linear
from moe_ref.rounding import accumulator_dtype, round_to


def shared_experts(
    x_TH: Tensor, fc1_weight_FH: Tensor, fc2_weight_HF: Tensor,
    *, gate_weight: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    fp8_input_store: bool = False, recompute: bool = False, recipe: Recipe | None = None,
    state: tuple[LinearState, LinearState] | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Two linear layers over all tokens, without biases, and a gate of their own.

        y = act(x W1ᵀ) W2ᵀ;     with a gate  y ← y · σ(x gᵀ)

    Args:
        x_TH: bfloat16, float16, float32 or float64; H is the hidden size, even if routed experts
            have a latent width.
        fc1_weight_FH: [2F,H] for a gated kind, gates first or interleaved; [F,H] for others. F of
            all shared experts.
        fc2_weight_HF: [H,F].
        gate_weight: [1,H], g, or None.
        kind, offset, clamp, alpha, interleave, fp8_input_store: as in `glu`, or a kind of
            `activation` alone.
        recompute: all of it is computed again in the backward: the same results.
        recipe: of both linear layers, see `grouped_linear`. The gate stays in high precision.
        state, noise: as in `grouped_linear`, a pair for the two layers.

    Rounding, each once, to the dtype of x: x W1ᵀ, act, y, x gᵀ, σ and its product with y. Sums are
    in float32 (float64 for float64). Gradients round where these values do.

    Raises:
        ValueError: see `moe_ref.config`: check_shared_experts, check_kind, check_input_store,
            check_pairs; `grouped_linear`.
    """
    act = chosen_activation(
        kind, offset=offset, clamp=clamp, alpha=alpha, interleave=interleave, fp8_input_store=fp8_input_store
    )
    check_shared_experts(x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight, kind, interleave)
    check_pairs(state, noise)
    pairs = zip(state or (None, None), noise or (None, None), strict=True)
    run = partial(_shared, act=act, linears=[partial(linear, recipe=recipe, state=s, noise=n) for s, n in pairs])
    inputs = (x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight)
    return checkpoint(run, *inputs, use_reentrant=False) if recompute else run(*inputs)


def _shared(
    x_TH: Tensor,
    fc1_weight_FH: Tensor,
    fc2_weight_HF: Tensor,
    gate_weight: Tensor | None,
    *,
    act: Callable[..., Tensor],
    linears: Sequence[Callable[..., Tensor]],
) -> Tensor:
    fc1, fc2 = linears
    y_TH = fc2(act(fc1(x_TH, fc1_weight_FH)), fc2_weight_HF)
    if gate_weight is None:
        return y_TH
    accumulator = accumulator_dtype(x_TH.dtype)
    score_T1 = round_to(torch.sigmoid(linear(x_TH, gate_weight).to(accumulator)), x_TH.dtype)
    return round_to(y_TH.to(accumulator) * score_T1.to(accumulator), y_TH.dtype)
