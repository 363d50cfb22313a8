"""The experts of one rank, routed and shared: `grouped_linear`, `glu` or `activation`, and small
steps, which multiply rows by probabilities or a gate, and weight a bias like its row.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_fast.experts.activated import Activated, can_quantize_activated
from moe_fast.experts.activated_linear import activated_linear
from moe_fast.experts.activations import Settings, activated, check_probs, unwritten
from moe_fast.experts.delayed import Waiting, delaying, waiting_for
from moe_fast.experts.factors import Precision, Product
from moe_fast.experts.linear import check_product, linear, linear_of
from moe_fast.experts.padding import Padding
from moe_fast.experts.scaled_linear import multiple_of, scaled_tile
from moe_fast.experts.segments import plans_shared, shared_totals, tile_of
from moe_fast.experts.weighting import BiasAdded, GatedRows, ScaledRows
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
    check_pairs,
    check_precision,
    check_shared_experts,
    require,
)

X = TypeVar("X")
Y = TypeVar("Y")
# `filled` of both products: what stays in here needs no zeros past the experts' rows, which the
# activation leaves out by the totals of a plan; a graph shares no plan
FILLED = (True, True)
WITHIN = ((False, True), (True, False))


class Mlp(NamedTuple):
    """One call of `grouped_mlp`, without the tensors that may have gradients."""

    settings: Settings
    products: tuple[Product, Product]  # of fc1 and of fc2
    recipe: Recipe | None
    fp8_input_store: bool
    probs_on_input: bool
    align: int | None  # None without a recipe
    recomputes: bool  # whether the activation is not saved
    rows_again: Callable[[], Tensor] | None
    wgrads: Waiting | None


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
    settings = checked_settings(
        kind, offset=offset, clamp=clamp, alpha=alpha, interleave=interleave, round_before_probs=round_before_probs,
        fp8_input_store=fp8_input_store,
    )  # fmt: skip
    check_mlp(
        rows_PH, tokens_per_expert_L, fc1_weight_LFH, fc2_weight_LHF, probs, fc1_bias, fc2_bias, interleave, kind,
        probs_on_input, align, recompute, recipe=recipe, state=state, noise=noise, wgrads=wgrads,
        rows_again=rows_again, amaxes=amaxes,
    )  # fmt: skip
    precisions: Sequence[Precision | None] = (None, None)
    if recipe is not None:
        none = (None, None)
        pairs = zip(state or none, noise or none, amaxes or none, strict=True)
        precisions = [Precision(recipe, *precision) for precision in pairs]
    in_graph = tracing()  # where the compiler chooses what is saved
    fc1, fc2 = map(Product, precisions, (FILLED, FILLED) if in_graph else WITHIN)
    call = Mlp(
        settings, (fc1, fc2), recipe, fp8_input_store, probs_on_input, None if recipe is None else align,
        recompute == "moe_act" and not in_graph, None if in_graph else rows_again, wgrads,
    )  # fmt: skip
    inputs = (rows_PH, tokens_per_expert_L, probs, fc1_weight_LFH, fc2_weight_LHF, fc1_bias, fc2_bias)
    return run_again(partial(_experts, call), *inputs) if recompute == "moe" else _experts(call, *inputs)


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
    for layer_state, layer_noise in zip(state or (None, None), noise or (None, None), strict=True):
        check_precision(recipe, layer_state, layer_noise, "float32")
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
def shared_experts(
    x_TH: Tensor, fc1_weight_FH: Tensor, fc2_weight_HF: Tensor,
    *, gate_weight: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    fp8_input_store: bool = False, recompute: bool = False, recipe: Recipe | None = None,
    state: tuple[LinearState, LinearState] | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Two linear layers over all tokens, without biases, and their gate: y = act(x W1ᵀ) W2ᵀ · σ(x
    gᵀ).

    Saved for the backward are x, x W1ᵀ (with `fp8_input_store` its E4M3 codes) and act; with
    `recompute` only x.

    Raises:
        ValueError: also as `grouped_linear`.
    """
    settings = checked_settings(
        kind, offset=offset, clamp=clamp, alpha=alpha, interleave=interleave, fp8_input_store=fp8_input_store
    )
    _check_shared(x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight, kind, interleave, state=state, noise=noise)
    pairs = zip(state or (None, None), noise or (None, None), strict=True)
    fc1, fc2 = (partial(linear, recipe=recipe, state=s, noise=n) for s, n in pairs)
    act = partial(activated, settings=settings, fp8_input_store=fp8_input_store)
    run, inputs = partial(_shared, fc1, fc2, act), (x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight)
    return run_again(run, *inputs) if recompute else run(*inputs)


@unless_known
def _check_shared(x_TH: Tensor, *arguments: Any, state: Any, noise: Any) -> None:
    check_shared_experts(x_TH, *arguments)
    check_pairs(state, noise)


def _shared(
    fc1: Callable[..., Tensor], fc2: Callable[..., Tensor], act: Callable[[Tensor], Tensor], x_TH: Tensor,
    fc1_weight_FH: Tensor, fc2_weight_HF: Tensor, gate_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    y_TH = fc2(act(fc1(x_TH, fc1_weight_FH)), fc2_weight_HF)
    return y_TH if gate_weight is None else GatedRows.apply(y_TH, linear(x_TH, gate_weight))


def checked_settings(
    kind: str,
    *, offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Settings:  # fmt: skip
    """The settings of `glu` or of `activation`, whichever function has that kind."""
    _check_activation(kind, fp8_input_store, offset, clamp, alpha, interleave)
    return Settings(kind, kind in GATED, round_before_probs, offset, clamp, alpha, interleave)


@unless_known
def _check_activation(kind: str, fp8_input_store: bool, *options: Any) -> None:
    check_kind(kind, *options)
    check_input_store(fp8_input_store, kind)


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
    call: Mlp, rows_PH: Tensor, tokens_per_expert_L: Tensor, probs: Tensor | None, fc1_weight_LFH: Tensor,
    fc2_weight_LHF: Tensor, fc1_bias: Tensor | None, fc2_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    recipe, rows_again, wgrads = call.recipe, call.rows_again, call.wgrads
    needs_ends = call.probs_on_input or fc2_bias is not None
    p_P = probs
    if probs is not None and needs_ends:
        # widened once, so that both parts of its gradient are added before it is rounded
        is_float64 = any(x is not None and x.dtype == torch.float64 for x in (rows_PH, probs, fc2_bias))
        p_P = probs.to(torch.float64 if is_float64 else torch.float32)
    padding = None if call.align is None else Padding.of(tokens_per_expert_L, rows_PH.shape[0], call.align)
    if padding is not None:
        rows_PH, p_P, tokens_per_expert_L = *padding.pad(rows_PH, p_P), padding.counts_L
        rows_again = rows_again and _then(rows_again, lambda rows: padding.pad(rows, None)[0])
    ends_L = tokens_per_expert_L.clamp(min=0).cumsum(0) if needs_ends else None
    if call.probs_on_input:
        assert p_P is not None
        with computed_again(rows_PH, rows_again):
            rows_PH, row_probs, p_P = ScaledRows.apply(rows_PH, p_P, ends_L), p_P.detach(), None
        rows_again = rows_again and _then(rows_again, lambda rows: ScaledRows.apply(rows, row_probs, ends_L))
    product1, product2 = (_with_noise_for(product, rows_PH.shape[0]) for product in call.products)

    def fc2(a_PF: Tensor, **options: Any) -> Tensor:
        return linear_of(a_PF, fc2_weight_LHF, tokens_per_expert_L, product2._replace(**options))

    delayed = nullcontext() if wgrads is None else delaying(dict.fromkeys((fc1_weight_LFH, fc2_weight_LHF), wgrads))
    with plans_shared(), delayed:
        a_PF = None
        if recipe is None:
            epilogue: dict[str, Any] = {"bias": fc1_bias, "probs": p_P, "settings": call.settings}
            a_PF = activated_linear(rows_PH, fc1_weight_LFH, tokens_per_expert_L, **epilogue)
        if a_PF is not None:
            y_PH = fc2(a_PF)
        else:
            with computed_again(rows_PH, rows_again):
                product1 = product1._replace(rows_again=rows_again is not None)
                h_PF = linear_of(rows_PH, fc1_weight_LFH, tokens_per_expert_L, product1, bias=fc1_bias)
            written = recipe is None or recipe.backward_override is not None or waiting_for(fc2_weight_LHF) is not None
            options = (call.settings, call.fp8_input_store, call.recomputes, None if written else recipe)
            y_PH = activated_then(fc2, h_PF, p_P, *options)
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


def _with_noise_for(product: Product, rows: int) -> Product:
    """The product with the first `rows` rows of its noise, extended if there are fewer: rows past
    the last segment may be missing.
    """
    precision = product.precision
    if precision is None or precision.noise is None:
        return product
    missing = max(rows - precision.noise.shape[1], 0)
    noise_XRC = torch.nn.functional.pad(precision.noise, (0, 0, 0, missing))[:, :rows]
    return product._replace(precision=precision._replace(noise=noise_XRC))
