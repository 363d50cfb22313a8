"""glu, activation and their gradients, quantised by the launch that computes them.

Blocks and delayed scaling take one pass over h. Current scaling takes two, the first for the amax
of each group, and computes the activation twice. The forms by rows and by columns come from one
load. For NVFP4 the activation is written, in float32 or rounded as the caller asks, and then
quantised, because one pass cannot hold the group's scale, the transform and the noise. A rounded
activation in blocks of 128 has a kernel of its own on a Hopper, see `experts.activated`. Its
rounded gradient in both forms is written and then quantised, because two kernels are faster there.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts import _activations as activation_kernels
from moe_fast.experts.activated import Activated, can_quantize_activated, quantize_activated
from moe_fast.experts.activations import Settings, backward_of, constants_of
from moe_fast.fused import _activate_and_quantize as kernels
from moe_fast.fused.activation_source import Forms, Source, source_of
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION, number_bits
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import present, strided, strided_or_empty
from moe_fast.launch.operators import has_memory, launch, operator, traceable
from moe_fast.launch.tuning import at_least, ceil_div
from moe_fast.quantization.quantize import empty_form, form_arguments, quantize
from moe_fast.quantization.quantized import (
    KERNEL_OF,
    LEAST_GROUPS_OF_BLOCKS,
    Form,
    Quantized,
    encoding,
    scale_limits,
)
from moe_ref.config import (
    Quantization,
    QuantizerState,
    Recipe,
    check_activation,
    check_cotangent,
    check_glu,
)
from moe_ref.config.fused_activations import QuantizedGradients
from moe_ref.config.quantization import BLOCK


@traceable
def glu_and_quantize(
    h_PF2: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "swiglu",
    offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, rowwise: bool = True, columnwise: bool = False,
    state: QuantizerState | None = None, round_before_quantize: bool = False,
) -> Quantization:  # fmt: skip
    """`glu`, quantised as the input of the next linear layer; saved for the backward are h and the
    probs.

    The host never waits: illegal values of `splits` show as in `quantize`.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    settings = Settings(kind, True, False, offset, clamp, alpha, interleave)
    forms = Forms(recipe, "input", splits, rowwise, columnwise, state, None, round_before_quantize)
    return _forward(h_PF2, probs, settings, forms)


@traceable
def glu_backward_and_quantize(
    d_out_PF: Tensor, h_PF2: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "swiglu",
    offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, rowwise: bool = True, columnwise: bool = False,
    state: QuantizerState | None = None, noise: Tensor | None = None,
    round_before_quantize: bool = False,
) -> QuantizedGradients:  # fmt: skip
    """The gradients of `glu`, with that of h quantised. The order of d_probs' sum depends only on
    the width and on block sizes.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    settings = Settings(kind, True, False, offset, clamp, alpha, interleave)
    forms = Forms(recipe, "grad_output", splits, rowwise, columnwise, state, noise, round_before_quantize)
    return _gradients(d_out_PF, h_PF2, probs, settings, forms)


@traceable
def activation_and_quantize(
    h_PF: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "squared_relu",
    rowwise: bool = True, columnwise: bool = False, state: QuantizerState | None = None,
    round_before_quantize: bool = False,
) -> Quantization:  # fmt: skip
    """`activation`, quantised as `glu_and_quantize` does."""
    check_activation(h_PF, probs, kind)
    forms = Forms(recipe, "input", splits, rowwise, columnwise, state, None, round_before_quantize)
    return _forward(h_PF, probs, Settings(kind, False, False), forms)


@traceable
def activation_backward_and_quantize(
    d_out_PF: Tensor, h_PF: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "squared_relu",
    rowwise: bool = True, columnwise: bool = False, state: QuantizerState | None = None,
    noise: Tensor | None = None, round_before_quantize: bool = False,
) -> QuantizedGradients:  # fmt: skip
    """The gradients of `activation`, with that of h quantised as by `glu_backward_and_quantize`."""
    check_activation(h_PF, probs, kind)
    forms = Forms(recipe, "grad_output", splits, rowwise, columnwise, state, noise, round_before_quantize)
    return _gradients(d_out_PF, h_PF, probs, Settings(kind, False, False), forms)


def _forward(h: Tensor, probs: Tensor | None, settings: Settings, forms: Forms) -> Quantization:
    forms.check(h, settings.width(h))
    source = source_of(None, h, probs, settings, forms)
    quantized, state, _ = _quantized(source)
    wanted = torch.is_grad_enabled() and (h.requires_grad or (probs is not None and probs.requires_grad))
    node = _Place.apply(h, probs, settings, source.forms.splits) if wanted else None
    return Quantization(replace(quantized, source=node), state)


def _gradients(d_out: Tensor, h: Tensor, probs: Tensor | None, settings: Settings, forms: Forms) -> QuantizedGradients:
    check_cotangent(d_out, h.shape[0], settings.width(h), h)
    forms.check(h, h.shape[1])
    source = source_of(d_out, h, probs, settings, forms)
    quantized, state, d_probs = _quantized(source)
    return QuantizedGradients(quantized, state, None if probs is None or d_probs is None else d_probs.to(probs.dtype))


@operator
def _quantized(source: Source) -> tuple[Quantized, QuantizerState | None, Tensor | None]:
    """(quantised tensor, next state, d_probs)."""
    forms, recipe = source.forms, source.forms.recipe
    if recipe.scaling == "nvfp4" or source.faster_apart:
        return _quantized_apart(source)
    state = forms.state
    rows = Activated(source.h, source.probs, source.settings)
    if source.d_out is None and forms.rounds and can_quantize_activated(rows, recipe):
        kinds = (forms.rowwise, forms.columnwise)
        return quantize_activated(rows, recipe, forms.splits, *kinds, for_products=False), None, None
    if recipe.scaling in BLOCK:
        by_rows, by_columns, d_probs_shares = _quantize_blocks(source)
    else:
        by_rows, state, d_probs_shares = _cast_groups(source)
        by_columns = by_rows
    quantized = Quantized(
        recipe,
        forms.format,
        source.h.dtype,
        forms.splits,
        None,
        by_rows if forms.rowwise else None,
        by_columns if forms.columnwise else None,
    )
    return quantized, state, None if d_probs_shares is None else d_probs_shares.sum(1)


def _quantize_blocks(source: Source) -> tuple[Form | None, Form | None, Tensor | None]:
    """(form by rows, form by columns, shares of d_probs), with a scale for each block."""
    forms, recipe, x = source.forms, source.forms.recipe, source.like
    size, rule = BLOCK[recipe.scaling], KERNEL_OF[recipe.scaling]
    sizes = tuning.for_device(x.device).activate_quantize
    aligned = rule == "amax" and forms.columnwise  # whole groups of MXFP8 consist of whole blocks, wherever x is cut
    tall, low = (sizes.columns, sizes.low) if source.d_out is None else (sizes.backward, sizes.low_backward)
    walk = tall if aligned else low if forms.columnwise else sizes.rows
    least, rows = (size if forms.columnwise else 1, size), size if aligned else None
    grid = source.grid(walk, aligned, least, rows, LEAST_GROUPS_OF_BLOCKS)
    by_rows = empty_form(x, rule, (1, size), grid) if forms.rowwise else None
    by_columns = empty_form(x, rule, (size, 1), grid) if forms.columnwise else None
    d_probs_shares = source.d_probs_shares(grid)
    launch(kernels.quantize_activated_blocks_kernel, (grid.programs,), x)(
        *source.arguments,
        *form_arguments(by_rows),
        *form_arguments(by_columns),
        d_probs_shares,
        *x.shape,
        *grid.sizes,
        *scale_limits(recipe, x.dtype),
        **source.constants(grid),
        RULE=rule,
        **encoding(recipe, forms.format, x.device),
        ALIGNED=aligned,
        BLOCK=size,
        **grid.settings,
        **NO_FP_FUSION,
    )
    return by_rows, by_columns, d_probs_shares


def _cast_groups(source: Source) -> tuple[Form, QuantizerState | None, Tensor | None]:
    """(form, next state, shares of d_probs), with one scale per group: from the state, which gets
    this step's amax, or from the amax.
    """
    forms, recipe, x = source.forms, source.forms.recipe, source.like
    grid = source.grid(tuning.for_device(x.device).activate_quantize.groups, True)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)  # cast_activated_groups_kernel writes all of it
    inverse = torch.empty(grid.groups, device=x.device)  # its first program writes all of it
    amax = torch.zeros(grid.groups, dtype=torch.int32, device=x.device)
    d_probs_shares, state, history = source.d_probs_shares(grid), None, None
    if forms.state is not None:
        history = forms.state.amax_history.clone()
        state = QuantizerState(history, forms.state.scale)
    if has_memory() and state is None and grid.programs:
        launch(kernels.activated_group_amax_kernel, (grid.programs,), x)(
            *source.arguments,
            amax,
            *x.shape,
            *grid.sizes,
            **source.constants(grid),
            **grid.settings,
            **NO_FP_FUSION,
        )
    launch(kernels.cast_activated_groups_kernel, (at_least(grid.programs, 1),), x)(
        *source.arguments,
        *strided(None if state is None else state.scale, 1),
        amax,
        *strided(None if history is None else history.view(torch.int32))[:2],
        codes,
        inverse,
        d_probs_shares,
        *x.shape,
        *grid.sizes,
        number_bits(recipe.amax_epsilon or 0.0),
        **source.constants(grid),
        **encoding(recipe, forms.format, x.device),
        **grid.settings,
        **NO_FP_FUSION,
    )
    return Form(codes, inverse, amax.view(torch.float32), None), state, d_probs_shares


def _quantized_apart(source: Source) -> tuple[Quantized, QuantizerState | None, Tensor | None]:
    """As `_quantized`, by two launches: the activation is written, and then quantised."""
    forms, h, d_probs = source.forms, source.h, None
    x = torch.empty(source.like.shape, dtype=source.like.dtype, device=h.device)  # the kernel writes all of it
    if source.d_out is None:
        _launch(activation_kernels.activation_kernel, tuning.for_device(h.device).activation, source, (), (x, None))
    else:
        if source.probs is not None:
            # the same kernel writes all of it, also for empty rows
            d_probs = torch.empty(h.shape[0], dtype=source.probs.dtype, device=h.device)
        d_out = (source.d_out, *source.d_out.stride())
        _launch(
            activation_kernels.activation_backward_kernel,
            tuning.for_device(h.device).activation_backward,
            source,
            d_out,
            (x, *present(d_probs, torch.float32)),
        )
        d_probs = _owned_rows(d_probs, forms.splits)
    options: dict[str, Any] = {
        "role": forms.role,
        "splits": forms.splits,
        "rowwise": forms.rowwise,
        "columnwise": forms.columnwise,
        "noise": forms.noise,
    }
    quantized = quantize(x, forms.recipe, **options)
    return replace(quantized.quantized, dtype=h.dtype), None, d_probs


def _launch(
    kernel: Any, tile: tuning.Tile, source: Source, d_out: tuple[Any, ...], results: tuple[Tensor | int | None, ...]
) -> None:
    """Launch a kernel of `experts._activations`. With d_out one program computes whole rows."""
    h, settings = source.h, source.settings
    # nothing is encoded here
    constants = constants_of(h, h, source.probs, settings, tile) | ({} if d_out else {"HARDWARE": False})
    tiles = ceil_div(settings.width(h), constants["BLOCK_F"])
    column_programs = 1 if d_out else tiles
    programs = ceil_div(h.shape[0], constants["BLOCK_P"]) * column_programs
    sizes = (h.shape[0], settings.width(h), settings.between(h), column_programs, *((tiles,) if d_out else ()))
    launch(kernel, (programs,), h)(
        *(*d_out, *strided(h), *strided_or_empty(source.probs, 1), *results),
        *(*(present(None, torch.int64) if d_out else (None,)), *sizes, *settings.numbers()),
        **constants,
    )


def _owned_rows(x: Tensor | None, splits: Tensor | None) -> Tensor | None:
    """x, with 0 in the rows past the last group."""
    if x is None or splits is None:
        return x
    owned = torch.arange(x.shape[0], device=x.device) < splits.sum()
    return torch.where(owned if x.dim() == 1 else owned[:, None], x, 0)


class _Place(torch.autograd.Function):
    """The activation's node in autograd's graph: a tensor of its shape whose values are
    never read.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, probs: Tensor | None, settings: Settings, splits: Tensor | None) -> Tensor:
        ctx.settings, ctx.splits = settings, splits
        ctx.save_for_backward(h, probs)
        return h.new_empty(()).expand(h.shape[0], settings.width(h))  # it takes no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        h, probs = ctx.saved_tensors
        d_h, d_probs = backward_of(d_out, h, probs, ctx.settings, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        return _owned_rows(d_h, ctx.splits), _owned_rows(d_probs, ctx.splits), None, None
