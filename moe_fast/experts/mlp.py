"""The experts of one rank: `grouped_linear`, `glu` or `activation`, and two small steps, which
multiply rows by probabilities, and weight a bias like its row.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_fast.experts.activated import Activated, can_quantize_activated
from moe_fast.experts.activated_linear import activated_linear
from moe_fast.experts.activations import Settings, activated, check_probs, unwritten
from moe_fast.experts.delayed import Waiting, delaying, waiting_for
from moe_fast.experts.linear import FILLED, check_product, grouped_linear, linear_of
from moe_fast.experts.padding import Padding
from moe_fast.experts.scaled_linear import multiple_of, scaled_tile
from moe_fast.experts.segments import plans_shared, shared_totals, tile_of
from moe_fast.experts.weighting import BiasAdded, ScaledRows
from moe_fast.launch.backend import check_device
from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import traceable, tracing
from moe_fast.launch.tuning import GroupedTile
from moe_ref.config import (
    GATED,
    LinearAmax,
    LinearState,
    Recipe,
    check_counts,
    check_grouped_mlp,
    check_input_store,
    check_kept,
    check_kind,
    check_linear,
    check_pairs,
    check_splits,
    require,
)

X = TypeVar("X")
Y = TypeVar("Y")
# `filled` of both products: what stays in here needs no zeros past the experts' rows, which the
# activation leaves out by the totals of a plan; a graph shares no plan
WITHIN = ((False, True), (True, False))


@traceable
def grouped_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight_LFH: Tensor, fc2_weight_LHF: Tensor, *,
    probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    kind: str = "swiglu", offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, round_before_probs: bool = False, fp8_input_store: bool = False,
    probs_on_input: bool = False, align: int | None = None, recompute: str | None = None,
    recipe: Recipe | None = None, state: tuple[LinearState, LinearState] | None = None,
    noise: tuple[Tensor, Tensor] | None = None, wgrads: Waiting | None = None,
    rows_again: Callable[[], Tensor] | None = None,
    amaxes: tuple[LinearAmax, LinearAmax] | None = None,
) -> Tensor:  # fmt: skip
    """`moe_ref.experts.mlp.grouped_mlp`: grouped products, and one launch per activation. On a
    Hopper two launches compute everything if no gradient is wanted and the gates stand before the
    values. There an activation in FP8 by blocks is also quantised by the launch that computes it,
    see `activated`.

    The host never waits; if the counts are illegal, the result is NaN. Saved for the backward are
    the rows, h and a; with a recipe the codes of the rows and of a in their place. With recompute
    "moe_act" a is not saved, with "moe" only the rows are. With `fp8_input_store` the codes of h
    are saved ("moe_act" saves h as well). With `rows_again` no rows are saved, but their codes if
    the recipe has backward_override "dequantized". `align` pads only with a recipe: the buffer
    grows by L · (align - 1) rows.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`, for wgrads or amaxes in a graph of
            torch.compile, and as `grouped_linear`.
    """
    shape: dict[str, Any] = {"offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    settings = checked_settings(kind, **shape, round_before_probs=round_before_probs, fp8_input_store=fp8_input_store)
    check_mlp(
        rows_PH, tokens_per_expert_L, fc1_weight_LFH, fc2_weight_LHF, probs, fc1_bias, fc2_bias, interleave, kind,
        probs_on_input, align, recompute, recipe=recipe, state=state, noise=noise, wgrads=wgrads,
        rows_again=rows_again, amaxes=amaxes,
    )  # fmt: skip
    pairs = zip(state or (None, None), amaxes or (None, None), strict=True)
    weights = (fc1_weight_LFH, fc2_weight_LHF)
    run = partial(
        _experts,
        settings=settings,
        fp8_input_store=fp8_input_store,
        recipe=recipe,
        linears=[
            partial(linear_of, recipe=recipe, state=linear_state, amaxes=linear_amax, filled=filled)
            for (linear_state, linear_amax), filled in zip(
                pairs, (FILLED, FILLED) if tracing() else WITHIN, strict=True
            )
        ],
        noise=noise,
        align=None if recipe is None else align,
        probs_on_input=probs_on_input,
        recompute=recompute == "moe_act",
        rows_again=rows_again,
        delayed=nullcontext if wgrads is None else partial(delaying, dict.fromkeys(weights, wgrads)),
    )
    inputs = (rows_PH, tokens_per_expert_L, probs, *weights, fc1_bias, fc2_bias)
    return run_again(run, *inputs) if recompute == "moe" else run(*inputs)


@unless_known
def check_mlp(
    rows_PH: Tensor, *arguments: Any, recipe: Recipe | None, state: Any, noise: Any, wgrads: Any, rows_again: Any,
    amaxes: Any,
) -> None:  # fmt: skip
    """Raise `ValueError` for an illegal call of `grouped_mlp`. `arguments` are those that
    `check_grouped_mlp` takes after the rows.
    """
    check_grouped_mlp(rows_PH, *arguments)
    check_pairs(state, noise, amaxes)
    check_kept(wgrads, rows_again, arguments[-1])
    require(wgrads is None or not tracing(), "wgrads", "given in a graph", "None: a graph has all gradients")
    require(amaxes is None or not tracing(), "amaxes", "given in a graph", "None: a graph writes to no argument")
    check_product(rows_PH, recipe, "float32")
    check_device("rows", rows_PH)
    check_probs(arguments[3])


@traceable
def sequential_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight_LFH: Tensor, fc2_weight_LHF: Tensor,
    *, probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """The same function as `grouped_mlp`, of the same weights, by the same launches.

    Raises:
        ValueError: also for a state, a noise, wgrads, rows_again or amaxes, which all experts would
            share.
    """
    check_counts(tokens_per_expert_L, len(fc1_weight_LFH), rows_PH)
    for name in ("state", "noise", "wgrads", "rows_again", "amaxes"):
        require(settings.get(name) is None, name, "given", "None: it would be for all experts together")
    weights = (fc1_weight_LFH, fc2_weight_LHF)
    return grouped_mlp(
        rows_PH, tokens_per_expert_L, *weights, probs=probs, fc1_bias=fc1_bias, fc2_bias=fc2_bias, **settings
    )


@traceable
def latent_projection(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b, by `grouped_linear` with one expert."""
    check_linear("weight", x_TN, weight_MN, bias)
    return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)


def linear(x_TN: Tensor, weight_MN: Tensor, *, bias: Tensor | None = None, **precision: Any) -> Tensor:
    """`grouped_linear` of one expert that has all rows. The number of rows is checked here."""
    if isinstance(precision.get("recipe"), Recipe):
        check_splits([x_TN.shape[0]], x_TN.shape[0], precision["recipe"])
    count = torch.full((1,), x_TN.shape[0], dtype=torch.int64, device=x_TN.device)
    return grouped_linear(x_TN, weight_MN[None], count, bias=None if bias is None else bias[None], **precision)


def checked_settings(
    kind: str,
    *, offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Settings:  # fmt: skip
    """The settings of `glu` or of `activation`, whichever function has that kind."""
    check_kind(kind, offset, clamp, alpha, interleave)
    check_input_store(fp8_input_store, kind)
    return Settings(kind, kind in GATED, round_before_probs, offset, clamp, alpha, interleave)


def first_tile(
    rows: Tensor, num_rows: int, num_experts: int, align: int | None, recipe: Recipe | None
) -> GroupedTile | None:
    """The tile of the first plan of `grouped_mlp`, for `num_rows` rows with the dtype and device of
    `rows`; None if `grouped_mlp` makes no plan of these counts, or if some counts would be illegal.
    """
    if tracing():
        return None  # a compiled graph shares no plan
    if recipe is None:
        return tile_of(rows, num_rows, num_experts)
    has_plan = align is None and recipe.backward_override is None and multiple_of(recipe) == 1
    return scaled_tile(rows) if has_plan else None


def run_again(run: Callable[..., X], *inputs: Tensor | None, random: bool = False) -> X:
    """run(*inputs). Only the inputs are saved: the backward runs the function again. With `random`
    the states of torch's generators are saved too, so that it draws the same numbers.
    """
    if tracing():  # the compiler decides what is saved
        return run(*inputs)
    out: X = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=random)
    return out


def _experts(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, probs: Tensor | None, fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor, fc1_bias: Tensor | None, fc2_bias: Tensor | None,
    *, settings: Settings, fp8_input_store: bool, recipe: Recipe | None, linears: list[Callable[..., Tensor]],
    noise: tuple[Tensor, Tensor] | None, align: int | None, probs_on_input: bool, recompute: bool,
    rows_again: Callable[[], Tensor] | None, delayed: Callable[[], AbstractContextManager[None]],
) -> Tensor:  # fmt: skip
    recomputes, rows_again = (recompute, rows_again) if not tracing() else (False, None)
    needs_ends = probs_on_input or fc2_bias is not None
    p_P = probs
    if probs is not None and needs_ends:
        # widened once, so that both parts of its gradient are added before it is rounded
        is_float64 = any(x is not None and x.dtype == torch.float64 for x in (rows_PH, probs, fc2_bias))
        p_P = probs.to(torch.float64 if is_float64 else torch.float32)
    padding = None if align is None else Padding.of(tokens_per_expert_L, rows_PH.shape[0], align)
    if padding is not None:
        rows_PH, p_P, tokens_per_expert_L = *padding.pad(rows_PH, p_P), padding.counts_L
        rows_again = rows_again and _then(rows_again, lambda rows: padding.pad(rows, None)[0])
    ends_L = tokens_per_expert_L.clamp(min=0).cumsum(0) if needs_ends else None
    if probs_on_input:
        assert p_P is not None
        with computed_again(rows_PH, rows_again):
            rows_PH, row_probs, p_P = ScaledRows.apply(rows_PH, p_P, ends_L), p_P.detach(), None
        rows_again = rows_again and _then(rows_again, lambda rows: ScaledRows.apply(rows, row_probs, ends_L))
    noise1, noise2 = (
        (None, None) if noise is None else (_of_length(operand_noise, rows_PH.shape[0]) for operand_noise in noise)
    )
    with plans_shared(), delayed():
        fc2 = partial(linears[1], weight_LMN=fc2_weight_LHF, tokens_per_expert_L=tokens_per_expert_L, noise=noise2)
        a_PF = None
        if recipe is None:
            epilogue: dict[str, Any] = {"bias": fc1_bias, "probs": p_P, "settings": settings}
            a_PF = activated_linear(rows_PH, fc1_weight_LFH, tokens_per_expert_L, **epilogue)
        if a_PF is not None:
            y_PH = fc2(a_PF)
        else:
            with computed_again(rows_PH, rows_again):
                fc1 = partial(linears[0], bias=fc1_bias, noise=noise1, rows_again=rows_again is not None)
                h_PF = fc1(rows_PH, fc1_weight_LFH, tokens_per_expert_L)
            written = recipe is None or recipe.backward_override is not None or waiting_for(fc2_weight_LHF) is not None
            activation_arguments = (settings, fp8_input_store, recomputes, None if written else recipe)
            y_PH = activated_then(fc2, h_PF, p_P, *activation_arguments)
    if fc2_bias is not None:
        y_PH = BiasAdded.apply(y_PH, fc2_bias, p_P, ends_L)
    return y_PH if padding is None else padding.trim(y_PH)


def activated_then(
    linear: Callable[..., X], h_PF: Tensor, probs: Tensor | None, settings: Settings, fp8_input_store: bool,
    recomputes: bool, recipe: Recipe | None,
) -> X:  # fmt: skip
    """linear(a) of the activation a. With `recomputes` a is not saved for the backward. With a
    recipe a is not written either, where one kernel computes and quantises it.
    """
    totals, detached_probs = shared_totals(), None if probs is None else probs.detach()
    activation_source = Activated(h_PF.detach(), detached_probs, settings)
    if recipe is not None and not fp8_input_store and can_quantize_activated(activation_source, recipe):
        return linear(
            unwritten(h_PF, settings, probs=probs, totals=totals), rows_again=recomputes, activation=activation_source
        )
    act = partial(activated, settings=settings, fp8_input_store=fp8_input_store, totals=totals)
    a_PF = act(h_PF, probs=probs)
    with computed_again(a_PF, partial(act, activation_source.h_PF2, probs=detached_probs) if recomputes else None):
        return linear(a_PF, rows_again=recomputes)


def computed_again(result: Tensor, recomputation: Callable[[], Tensor] | None) -> AbstractContextManager[Any]:
    """A context within which autograd does not save `result`: the backward gets it by calling
    recomputation(). Without a recomputation everything is saved.
    """
    if recomputation is None:
        return nullcontext()
    key = (result.data_ptr(), result.shape, result.dtype)

    def unpack(saved: Tensor | None) -> Tensor:
        return recomputation() if saved is None else saved

    return saved_tensors_hooks(lambda x: None if (x.data_ptr(), x.shape, x.dtype) == key else x, unpack)


def _then(first: Callable[[], X], second: Callable[[X], Y]) -> Callable[[], Y]:
    return lambda: second(first())


def _of_length(noise_XRC: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of the noise, extended if there are fewer: rows past the last segment
    may be missing.
    """
    missing = max(rows - noise_XRC.shape[1], 0)
    return torch.nn.functional.pad(noise_XRC, (0, 0, 0, missing))[:, :rows]
