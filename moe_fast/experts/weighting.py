"""Rows times probabilities or a gate, and a bias weighted like its row; with their gradients.

P rows in segments, one per expert. Segment e ends at `ends_L[e]`, int64 on the device. Rows past
the last segment are never read; results are 0 there.
"""

from typing import Any

import torch
from torch import Tensor

from moe_fast.experts import _weighting as kernels
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import accumulator
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import strided
from moe_fast.launch.operators import as_operators, launch
from moe_fast.launch.tuning import EXPERT_LANES, ceil_div, power_of_two


@as_operators
class ScaledRows(torch.autograd.Function):
    """x · p, rounded to the dtype of x; 0 past the last segment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, ends_L: Tensor) -> Tensor:
        ctx.save_for_backward(x, probs, ends_L)
        tile = tuning.for_device(x.device).activation
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # scale_rows_kernel writes all of it
        column_programs = ceil_div(x.shape[1], tile.columns)
        launch(kernels.scale_rows_kernel, (ceil_div(x.shape[0], tile.tokens) * column_programs,), x)(
            *strided(x),
            *strided(probs, 1),
            out,
            ends_L,
            x.shape[0],
            len(ends_L),
            x.shape[1],
            column_programs,
            ACCUMULATOR=accumulator(probs),
            **tile.blocks("P", "H"),
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, probs, ends_L = ctx.saved_tensors
        needs_x, needs_probs, _ = ctx.needs_input_grad
        # weighted_rows_backward_kernel writes all of it
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        return d_x, _weighted_backward(d_out, x, probs, ends_L, d_x, needs_probs, by_expert=False), None


@as_operators
class BiasAdded(torch.autograd.Function):
    """y + p · b_e, rounded to the dtype of y; 0 past the last segment, as y is there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, probs: Tensor | None, ends_L: Tensor) -> Tensor:
        ctx.save_for_backward(bias, probs, ends_L)
        tile = tuning.for_device(y.device).activation
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)  # add_bias_kernel writes all of it
        column_programs = ceil_div(y.shape[1], tile.columns)
        launch(kernels.add_bias_kernel, (ceil_div(y.shape[0], tile.tokens) * column_programs,), y)(
            *strided(y),
            *strided(bias),
            *strided(probs, 1),
            out,
            ends_L,
            y.shape[0],
            len(ends_L),
            y.shape[1],
            column_programs,
            ACCUMULATOR=accumulator(y, bias, probs),
            **tile.blocks("P", "H"),
            BLOCK_E=power_of_two(len(ends_L), least=EXPERT_LANES),
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        bias, probs, ends_L = ctx.saved_tensors
        _, needs_bias, needs_probs, *_ = ctx.needs_input_grad
        d_bias = _bias_gradient(d_out, bias, probs, ends_L) if needs_bias else None
        return d_out, d_bias, _weighted_backward(d_out, bias, probs, ends_L, None, needs_probs, by_expert=True), None


@as_operators
class GatedRows(torch.autograd.Function):
    """y · σ(z)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z_T1: Tensor) -> Tensor:
        ctx.save_for_backward(y, z_T1)
        tile = tuning.for_device(y.device).activation
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)  # gate_kernel writes all of it
        column_programs = ceil_div(y.shape[1], tile.columns)
        launch(kernels.gate_kernel, (ceil_div(y.shape[0], tile.tokens) * column_programs,), y)(
            *strided(y),
            *strided(z_T1[:, 0]),
            out,
            y.shape[0],
            y.shape[1],
            column_programs,
            ACCUMULATOR=accumulator(y),
            **tile.blocks("T", "H"),
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, z_T1 = ctx.saved_tensors
        needs_y, needs_z = ctx.needs_input_grad
        # gate_backward_kernel writes all of it
        d_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if needs_y else None
        # the same kernel writes all of it, also for empty rows
        d_z = torch.empty(z_T1.shape, dtype=y.dtype, device=y.device) if needs_z else None
        tile = tuning.for_device(y.device).activation_backward
        if y.shape[0] and (needs_y or needs_z):
            launch(kernels.gate_backward_kernel, (ceil_div(y.shape[0], tile.tokens),), y)(
                *strided(d_out),
                *strided(y),
                *strided(z_T1[:, 0]),
                d_y,
                d_z,
                y.shape[0],
                y.shape[1],
                ACCUMULATOR=accumulator(y),
                **tile.blocks("T", "H"),
            )
        return d_y, d_z


def _weighted_backward(
    d_out: Tensor, factor: Tensor, probs: Tensor | None, ends_L: Tensor, d_x: Tensor | None,
    needs_probs: bool,
    *, by_expert: bool,
) -> Tensor | None:  # fmt: skip
    """Fill d_x, if it is given, and return d_probs, if it is needed. One program computes whole
    rows.
    """
    d_probs = (
        torch.empty_like(probs, memory_format=torch.contiguous_format) if probs is not None and needs_probs else None
    )  # the same kernel writes all of it
    tile = tuning.for_device(d_out.device).activation_backward
    if probs is not None and d_out.shape[0] and (d_x is not None or d_probs is not None):
        launch(kernels.weighted_rows_backward_kernel, (ceil_div(d_out.shape[0], tile.tokens),), d_out)(
            *strided(d_out),
            *strided(factor),
            *strided(probs, 1),
            d_x,
            d_probs,
            ends_L,
            d_out.shape[0],
            len(ends_L),
            d_out.shape[1],
            ACCUMULATOR=accumulator(probs),
            BY_EXPERT=by_expert,
            **tile.blocks("P", "H"),
            BLOCK_E=power_of_two(len(ends_L), least=EXPERT_LANES),
        )
    return d_probs


def _bias_gradient(d_out: Tensor, bias: Tensor, probs: Tensor | None, ends_L: Tensor) -> Tensor:
    """Σ over e's rows of d_out · p, in the dtype of the bias."""
    tile = tuning.for_device(d_out.device).grouped.sums
    out = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)  # bias_gradient_kernel writes all of it
    launch(kernels.bias_gradient_kernel, (len(ends_L) * ceil_div(bias.shape[1], tile.columns),), d_out)(
        *strided(d_out),
        *strided(probs, 1),
        out,
        ends_L,
        d_out.shape[0],
        len(ends_L),
        bias.shape[1],
        ACCUMULATOR=accumulator(d_out, bias, probs),
        **tile.blocks("P", "H"),
    )
    return out
