"""grouped_linear: a linear layer for each expert, over the rows that stand in its segment, in high or in low precision.

Mirrors `GroupedLinear` of transformer_engine.pytorch (module and ops), as `TEGroupedLinear` of
megatron.core.extensions.transformer_engine uses it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config import (
    LinearState,
    Operand,
    Recipe,
    check_count_values,
    check_grouped_dgrad,
    check_grouped_linear,
    check_grouped_wgrad,
    check_linear,
    check_precision,
)
from moe_ref.quantization.quantize import quantize, turned
from moe_ref.quantization.recipes import operands, values
from moe_ref.rounding import accumulator_dtype, round_to


class Precision(NamedTuple):
    """What the factors of a product become before it is taken, and what it is added in."""

    recipe: Recipe | None
    state: LinearState | None
    noise: Tensor | None
    accumulator: str


class _GroupedLinear(torch.autograd.Function):
    """The product, with the gradients that `grouped_dgrad` and `grouped_wgrad` have: quantisation is straight through."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor, precision: Precision
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, tokens_per_expert)
        ctx.precision = precision
        return _fprop(rows, weight, bias, tokens_per_expert, precision)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        rows, weight, bias, tokens_per_expert = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        how = ctx.precision._asdict()
        d_rows = grouped_dgrad(d_out, weight, tokens_per_expert, **how) if wants_rows else None
        d_weight = grouped_wgrad(d_out, rows, tokens_per_expert, **how) if wants_weight else None
        d_bias = _bias_gradient(d_out, bias, tokens_per_expert, ctx.precision) if wants_bias else None
        return d_rows, d_weight, d_bias, None, None


def grouped_linear(
    rows_PN: Tensor,
    weight_LMN: Tensor,
    tokens_per_expert_L: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
    accumulator: str = "float32",
) -> Tensor:
    """Multiply each expert's rows by its own weight.

        out_i = x_i W_eᵀ + b_e,     e the expert in whose segment row i stands: the first tokens_per_expert[0] rows are expert 0's, …

    Rows behind the last segment are not read, whatever they hold: there out is 0, and nothing of them reaches a gradient. An expert
    without rows, and a call without rows, are nothing special.

    With a recipe each product is that of what the codes of its factors stand for, in float32; which form of which tensor is quantised
    for which product is `moe_ref.quantization.recipes.operands`. Each expert's rows, and each expert's weight, are a group of their own. The bias and
    its gradient are not quantised. With its backward_override the gradients are products of tensors as they are stored, or as they come
    back from fprop's codes; d_out is not quantised, and what only its codes need (noise, whole blocks along tokens) is asked of nobody.

    Args:
        rows_PN: bfloat16, float16, float32 or float64.
        weight_LMN: [L,M,N], a matrix [out, in] for each expert, in the dtype of the rows.
        tokens_per_expert_L: int32 or int64, on the device of the rows; ≥ 0, together at most P.
        bias: [L,M] floating point, or None.
        recipe: None for high precision.
        state: delayed scaling's scales. It is only read: what a step measured comes from `quantize` of the same tensors.
        noise: for the gradient, where the recipe rounds it stochastically: [2,P,M], see `quantize`. None with a backward_override.
        accumulator: "float32" or "float64", what low-precision products are added in.

    Returns:
        [P,M] in the dtype of the rows.

    Rounding: the factors, if there is a recipe; products and sums, the bias among them, in the accumulator (float64 for float64
    rows), in no particular order; one rounding to the dtype of the rows. Gradients: `grouped_dgrad`, `grouped_wgrad`;
    db_e = Σ_{i of e} d_out_i, rounded once to the dtype of the bias, and 0 for an expert without rows.

    Raises:
        ValueError: see `moe_ref.config`: check_grouped_linear, check_precision, and check_quantize with a recipe; also for a negative
            count, or counts that sum to more than P. An implementation that must not read the device may declare those unchecked.

    Source: TE GroupedLinear (which, unless it keeps the counts on the device, needs them to sum to P).
    """
    check_grouped_linear(rows_PN, weight_LMN, tokens_per_expert_L, bias)
    check_precision(recipe, state, noise, accumulator)
    return _GroupedLinear.apply(
        rows_PN, weight_LMN, bias, tokens_per_expert_L, Precision(recipe, state, noise, accumulator)
    )


def grouped_dgrad(
    d_out_PM: Tensor,
    weight_LMN: Tensor,
    tokens_per_expert_L: Tensor,
    *,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
    accumulator: str = "float32",
) -> Tensor:
    """The gradient of `grouped_linear` in its rows.

        dx_i = d_out_i W_e,     0 behind the last segment

    Returns:
        [P,N] in the dtype of d_out, rounded once.

    Raises:
        ValueError: see `moe_ref.config.check_grouped_dgrad`, and `grouped_linear`.
    """
    check_grouped_dgrad(d_out_PM, weight_LMN, tokens_per_expert_L)
    check_precision(recipe, state, noise, accumulator)
    how = Precision(recipe, state, noise, accumulator)
    d_out = _row_factors(d_out_PM, tokens_per_expert_L, "grad_output", "dgrad", how)
    weight = _weight_factors(weight_LMN, "dgrad", how)
    return _with_tail([d_mM @ w_MN for d_mM, w_MN in zip(d_out, weight, strict=True)], d_out_PM)


def grouped_wgrad(
    d_out_PM: Tensor,
    rows_PN: Tensor,
    tokens_per_expert_L: Tensor,
    *,
    accumulate_into: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
    accumulator: str = "float32",
) -> Tensor:
    """The gradient of `grouped_linear` in its weight. Calling it later, with what the backward had, is the delayed gradient.

        dW_e = Σ_{i of e} d_out_iᵀ x_i,     0 for an expert without rows

    With `accumulate_into` the result is that plus dW, a new tensor: the product is added before it is rounded to the rows' dtype,
    and the sum is rounded once, to the dtype of `accumulate_into`. An expert without rows keeps what it had, bit by bit.

    Args:
        d_out_PM: in the dtype of the rows; not read behind the last segment, as rows_PN is not.
        accumulate_into: [L,M,N] float32 or float64, or None.

    Returns:
        [L,M,N] in the dtype of the rows, rounded once; or in that of `accumulate_into`.

    Raises:
        ValueError: see `moe_ref.config.check_grouped_wgrad`, and `grouped_linear`.

    Source: TE GroupedLinear.backward_dw; fuse_wgrad_accumulation (main_grad).
    """
    check_grouped_wgrad(d_out_PM, rows_PN, tokens_per_expert_L, accumulate_into)
    check_precision(recipe, state, noise, accumulator)
    how = Precision(recipe, state, noise, accumulator)
    d_out = _row_factors(d_out_PM, tokens_per_expert_L, "grad_output", "wgrad", how)
    rows = _row_factors(rows_PN, tokens_per_expert_L, "input", "wgrad", how)
    gradients = []
    for e, (d_mM, x_mN) in enumerate(zip(d_out, rows, strict=True)):
        product_MN = d_mM.T @ x_mN
        if accumulate_into is None:
            gradients.append(round_to(product_MN, rows_PN.dtype))
        elif len(x_mN) == 0:
            gradients.append(accumulate_into[e])
        else:
            gradients.append(round_to(accumulate_into[e] + product_MN, accumulate_into.dtype))
    return torch.stack(gradients)


def linear(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: LinearState | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """`grouped_linear` of one expert that has all the rows.

    Raises:
        ValueError: see `moe_ref.config.check_linear`, and `grouped_linear`.
    """
    check_linear("weight", x_TN, weight_MN, bias)
    count = torch.tensor([len(x_TN)], device=x_TN.device)
    return grouped_linear(
        x_TN, weight_MN[None], count, bias=None if bias is None else bias[None], recipe=recipe, state=state, noise=noise
    )


def segments(tokens_per_expert_L: Tensor, num_rows: int) -> list[slice]:
    """Where each expert's rows stand.

    Raises:
        ValueError: see `moe_ref.config.check_count_values`.
    """
    counts = tokens_per_expert_L.tolist()
    check_count_values(counts, num_rows)
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _fprop(
    rows_PN: Tensor, weight_LMN: Tensor, bias_LM: Tensor | None, tokens_per_expert_L: Tensor, how: Precision
) -> Tensor:
    rows = _row_factors(rows_PN, tokens_per_expert_L, "input", "fprop", how)
    products = [x_mN @ w_MN.T for x_mN, w_MN in zip(rows, _weight_factors(weight_LMN, "fprop", how), strict=True)]
    if bias_LM is not None:
        products = [y_mM + round_to(b_M, y_mM.dtype) for y_mM, b_M in zip(products, bias_LM, strict=True)]
    return _with_tail(products, rows_PN)


def _row_factors(x_PN: Tensor, tokens_per_expert_L: Tensor, role: str, gemm: str, how: Precision) -> list[Tensor]:
    """Each expert's rows as a factor of a product, in the dtype that it is added in."""
    own = segments(tokens_per_expert_L, len(x_PN))
    if _operand(role, gemm, how) is None:
        return [x_PN[rows].to(_wide(x_PN.dtype, how)) for rows in own]
    return _from_codes(x_PN, tokens_per_expert_L, role, gemm, how)


def _weight_factors(weight_LMN: Tensor, gemm: str, how: Precision) -> list[Tensor]:
    """Each expert's weight as a factor of a product, in the dtype that it is added in."""
    if _operand("weight", gemm, how) is None:
        return [w_MN.to(_wide(weight_LMN.dtype, how)) for w_MN in weight_LMN]
    experts, width_out, width_in = weight_LMN.shape
    each = torch.full((experts,), width_out, device=weight_LMN.device)
    return _from_codes(weight_LMN.reshape(experts * width_out, width_in), each, "weight", gemm, how)


def _operand(role: str, gemm: str, how: Precision) -> Operand | None:
    """The quantised form that a product reads; None where it reads the tensor as it is stored."""
    if how.recipe is None:
        return None
    operand = {operand.role: operand for operand in operands(gemm, how.recipe)}[role]
    return None if operand.kept == "stored" else operand


def _from_codes(x_RN: Tensor, splits_L: Tensor, role: str, gemm: str, how: Precision) -> list[Tensor]:
    """What the codes of each group stand for: float32, rounded to the dtype of x only where they are dequantised; in the orientation of x."""
    operand = _operand(role, gemm, how)
    assert how.recipe is not None and operand is not None
    columnwise = operand.columnwise
    state = None if how.state is None else getattr(how.state, role)
    noise = how.noise if role == "grad_output" else None
    made = quantize(
        x_RN,
        how.recipe,
        role=role,
        splits=splits_L,
        rowwise=not columnwise,
        columnwise=columnwise,
        state=state,
        noise=noise,
    )
    form = made.quantized.form(columnwise)
    found = [turned(values(group, form.scheme), columnwise) for group in form.groups]
    return [
        (round_to(x_RC, x_RN.dtype) if operand.kept == "dequantized" else x_RC).to(_wide(x_RN.dtype, how))
        for x_RC in found
    ]


def _bias_gradient(d_out_PM: Tensor, bias_LM: Tensor, tokens_per_expert_L: Tensor, how: Precision) -> Tensor:
    wide = _wide(d_out_PM.dtype, how)
    sums = [d_out_PM[own].to(wide).sum(0) for own in segments(tokens_per_expert_L, len(d_out_PM))]
    return round_to(torch.stack(sums), bias_LM.dtype)


def _wide(dtype: torch.dtype, how: Precision) -> torch.dtype:
    """The dtype that products of `dtype` are added in."""
    return torch.float64 if how.accumulator == "float64" else accumulator_dtype(dtype)


def _with_tail(products: list[Tensor], rows: Tensor) -> Tensor:
    """The products below one another, rounded to the dtype of `rows`, then zeros until there are as many as `rows`."""
    out = round_to(torch.cat(products), rows.dtype)
    return torch.cat([out, out.new_zeros((len(rows) - len(out), out.shape[1]))])
