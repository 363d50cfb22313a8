"""shared_experts: the MLP that every token goes through, and its gate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts import _weighting as kernels
from moe_fast.experts.activations import activated
from moe_fast.experts.linear import check_product
from moe_fast.experts.mlp import checked_settings, linear, run_again
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import accumulator
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import check_device, launch_on, strided
from moe_fast.launch.operators import as_operators, launch, traceable
from moe_fast.launch.tuning import ceil_div
from moe_ref.config import LinearState, Recipe, check_pairs, check_shared_experts


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
    act = partial(activated, settings=settings, fp8_input_store=fp8_input_store)
    check_shared_experts(x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight, kind, interleave)
    check_pairs(state, noise)
    check_product(x_TH, recipe, "float32")
    check_device("x", x_TH)
    pairs = zip(state or (None, None), noise or (None, None), strict=True)
    run = partial(_shared, act=act, linears=[partial(linear, recipe=recipe, state=s, noise=n) for s, n in pairs])
    inputs = (x_TH, fc1_weight_FH, fc2_weight_HF, gate_weight)
    return run_again(run, *inputs) if recompute else run(*inputs)


def _shared(
    x_TH: Tensor,
    fc1_weight_FH: Tensor,
    fc2_weight_HF: Tensor,
    gate_weight: Tensor | None,
    *,
    act: Callable[..., Tensor],
    linears: list[Callable[..., Tensor]],
) -> Tensor:
    fc1, fc2 = linears
    y_TH: Tensor = fc2(act(fc1(x_TH, fc1_weight_FH)), fc2_weight_HF)
    return y_TH if gate_weight is None else _Gated.apply(y_TH, linear(x_TH, gate_weight))


@as_operators
class _Gated(torch.autograd.Function):
    """y · σ(z)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z_T1: Tensor) -> Tensor:
        ctx.save_for_backward(y, z_T1)
        tile = tuning.for_device(y.device).activation
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)  # gate_kernel writes all of it
        column_programs = ceil_div(y.shape[1], tile.columns)
        if out.numel():
            with launch_on(y):
                launch(kernels.gate_kernel, (ceil_div(y.shape[0], tile.tokens) * column_programs,))(
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
            with launch_on(y):
                launch(kernels.gate_backward_kernel, (ceil_div(y.shape[0], tile.tokens),))(
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
