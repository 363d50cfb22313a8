"""grouped_linear: a linear layer per expert over the rows of its segment, in high or low precision.

Mirrors `GroupedLinear` of transformer_engine.pytorch (module and ops), as `TEGroupedLinear` of
megatron.core.extensions.transformer_engine uses it. Differs: docs/differences.md#experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config import (
    LinearAmax,
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
from moe_ref.rounding import accumulator_dtype, product, round_to


class ProductPrecision(NamedTuple):
    """The precision of a product: of its factors, and of its sums."""

    recipe: Recipe | None
    state: LinearState | None
    noise: Tensor | None
    accumulator: str
    amaxes: LinearAmax | None = None


class _GroupedLinear(torch.autograd.Function):
    """The product, with the gradients `grouped_dgrad` and `grouped_wgrad`: quantisation is straight
    through.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens_per_expert: Tensor,
        precision: ProductPrecision,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, tokens_per_expert)
        ctx.precision = precision
        return _fprop(rows, weight, bias, tokens_per_expert, precision)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        rows, weight, bias, tokens_per_expert = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        d_rows = _dgrad(d_out, weight, tokens_per_expert, ctx.precision) if wants_rows else None
        d_weight = _wgrad(d_out, rows, tokens_per_expert, ctx.precision) if wants_weight else None
        d_bias = _bias_gradient(d_out, bias, tokens_per_expert, ctx.precision) if wants_bias else None
        return d_rows, d_weight, d_bias, None, None


def grouped_linear(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, bias: Tensor | None = None, recipe: Recipe | None = None, state: LinearState | None = None,
    noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """Multiply each expert's rows by its own weight.

        out_i = x_i W_eᵀ + b_e,     e the expert of row i: the first tokens_per_expert[0] are 0's, …

    Rows past the last segment are never read: there out is 0, and no gradient depends on them.

    With a recipe each product takes the values of its factors' codes, in float32; `operands` of
    `moe_ref.quantization.recipes` gives their forms. Each expert's rows, and its weight, are a
    group.

    Args:
        rows_PN, weight_LMN: bfloat16, float16, float32 or float64, the same; [out, in] per expert.
        tokens_per_expert_L: int32 or int64, on the device of the rows; ≥ 0, together at most P.
        bias: [L,M] floating point, or None; never quantised, nor is its gradient.
        state: delayed scaling's scales, only read: `quantize` measures this step's amax.
        noise: [2,P,M] for a gradient that the recipe rounds stochastically, see `quantize`.
        accumulator: "float32" or "float64", of low-precision products.

    Rounding: products, sums and bias in the accumulator (float64 for float64 rows), in any order;
    once to the rows' dtype. db_e = Σ_{i of e} d_out_i, rounded once to the bias' dtype.

    Raises:
        ValueError: see `moe_ref.config`: check_grouped_linear, check_precision, check_quantize; and
            check_count_values, which reads the device and may be declared unchecked.
    """
    check_grouped_linear(rows_PN, weight_LMN, tokens_per_expert_L, bias)
    check_precision(recipe, state, noise, accumulator)
    return _GroupedLinear.apply(
        rows_PN, weight_LMN, bias, tokens_per_expert_L, ProductPrecision(recipe, state, noise, accumulator)
    )


class _Later(torch.autograd.Function):
    """out as it is; its backward leaves wgrad(d_out, rows, tokens_per_expert) in a list."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, rows: Tensor, tokens_per_expert: Tensor, sink: Any) -> Tensor:
        ctx.save_for_backward(rows, tokens_per_expert)
        ctx.sink = sink
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        wgrads, wgrad = ctx.sink
        wgrads.append(partial(wgrad, d_out, *ctx.saved_tensors))
        return d_out, None, None, None, None


def delayed_linear(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, wgrads: list[Callable[..., Tensor]] | None, bias: Tensor | None = None, amaxes: LinearAmax | None = None,
    recipe: Recipe | None = None, state: LinearState | None = None, noise: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`grouped_linear`, whose backward leaves the weight's gradient in `wgrads`, if that is a list,
    and whose products raise the amaxes.

    It appends a function of `accumulate_into`, `grouped_wgrad` of what the backward has.
    """
    check_grouped_linear(rows_PN, weight_LMN, tokens_per_expert_L, bias)
    check_precision(recipe, state, noise, "float32")
    precision = ProductPrecision(recipe, state, noise, "float32", amaxes)
    delays_wgrad = wgrads is not None and torch.is_grad_enabled() and weight_LMN.requires_grad
    weight = weight_LMN.detach() if delays_wgrad else weight_LMN
    out: Tensor = _GroupedLinear.apply(rows_PN, weight, bias, tokens_per_expert_L, precision)
    if not delays_wgrad:
        return out
    anchor = out.new_empty(0, requires_grad=True)  # the backward comes here even if nothing else has a gradient
    return _Later.apply(out, anchor, rows_PN, tokens_per_expert_L, (wgrads, partial(_wgrad, precision=precision)))


def grouped_dgrad(
    d_out_PM: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, recipe: Recipe | None = None, state: LinearState | None = None, noise: Tensor | None = None,
    accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """The gradient of `grouped_linear` in its rows.

        dx_i = d_out_i W_e,     0 past the last segment

    Returns:
        [P,N] in the dtype of d_out, rounded once.

    Raises:
        ValueError: see `moe_ref.config.check_grouped_dgrad`, and `grouped_linear`.
    """
    check_grouped_dgrad(d_out_PM, weight_LMN, tokens_per_expert_L)
    check_precision(recipe, state, noise, accumulator)
    return _dgrad(d_out_PM, weight_LMN, tokens_per_expert_L, ProductPrecision(recipe, state, noise, accumulator))


def _dgrad(d_out_PM: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, precision: ProductPrecision) -> Tensor:
    d_out = _row_factors(d_out_PM, tokens_per_expert_L, "grad_output", "dgrad", precision)
    weight = _weight_factors(weight_LMN, "dgrad", precision)
    return _with_tail([product(d_mM, w_MN) for d_mM, w_MN in zip(d_out, weight, strict=True)], d_out_PM)


def grouped_wgrad(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor,
    *, accumulate_into: Tensor | None = None, recipe: Recipe | None = None,
    state: LinearState | None = None, noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """The gradient of `grouped_linear` in its weight. Called later, with the backward's tensors, it
    is the delayed gradient.

        dW_e = Σ_{i of e} d_out_iᵀ x_i,     0 for an expert without rows

    With `accumulate_into` the result is accumulate_into + dW, a new tensor: the product is added
    before it is rounded, and the sum is rounded once, to the dtype of `accumulate_into`. An expert
    without rows keeps its values; elsewhere a sum with nothing may turn -0 into 0.

    Args:
        d_out_PM: in the dtype of the rows; not read past the last segment, nor is rows_PN.
        accumulate_into: [L,M,N] float32 or float64, or None.

    Returns:
        [L,M,N] in the dtype of the rows, rounded once; or in the dtype of `accumulate_into`.

    Raises:
        ValueError: see `moe_ref.config.check_grouped_wgrad`, and `grouped_linear`.

    Source: TE GroupedLinear.backward_dw; fuse_wgrad_accumulation (main_grad).
    """
    check_precision(recipe, state, noise, accumulator)
    precision = ProductPrecision(recipe, state, noise, accumulator)
    return _wgrad(d_out_PM, rows_PN, tokens_per_expert_L, precision, accumulate_into)


def _wgrad(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor, precision: ProductPrecision,
    accumulate_into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    check_grouped_wgrad(d_out_PM, rows_PN, tokens_per_expert_L, accumulate_into)
    d_out = _row_factors(d_out_PM, tokens_per_expert_L, "grad_output", "wgrad", precision)
    rows = _row_factors(rows_PN, tokens_per_expert_L, "input", "wgrad", precision)
    gradients = []
    for e, (d_mM, x_mN) in enumerate(zip(d_out, rows, strict=True)):
        product_MN = product(d_mM.T, x_mN)
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


def expert_slices(tokens_per_expert_L: Tensor, num_rows: int) -> list[slice]:
    """The rows of each expert.

    Raises:
        ValueError: see `moe_ref.config.check_count_values`.
    """
    counts = tokens_per_expert_L.tolist()
    check_count_values(counts, num_rows)
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _fprop(
    rows_PN: Tensor,
    weight_LMN: Tensor,
    bias_LM: Tensor | None,
    tokens_per_expert_L: Tensor,
    precision: ProductPrecision,
) -> Tensor:
    rows = _row_factors(rows_PN, tokens_per_expert_L, "input", "fprop", precision)
    weight = _weight_factors(weight_LMN, "fprop", precision)
    products = [product(x_mN, w_MN.T) for x_mN, w_MN in zip(rows, weight, strict=True)]
    if bias_LM is not None:
        products = [y_mM + round_to(b_M, y_mM.dtype) for y_mM, b_M in zip(products, bias_LM, strict=True)]
    return _with_tail(products, rows_PN)


def _row_factors(
    x_PN: Tensor, tokens_per_expert_L: Tensor, role: str, gemm: str, precision: ProductPrecision
) -> list[Tensor]:
    """Each expert's rows as a factor of a product, in the accumulator."""
    slices = expert_slices(tokens_per_expert_L, len(x_PN))
    if _operand(role, gemm, precision) is None:
        return [x_PN[rows].to(_accumulator(x_PN.dtype, precision)) for rows in slices]
    return _from_codes(x_PN, tokens_per_expert_L, role, gemm, precision)


def _weight_factors(weight_LMN: Tensor, gemm: str, precision: ProductPrecision) -> list[Tensor]:
    """Each expert's weight as a factor of a product, in the accumulator."""
    if _operand("weight", gemm, precision) is None:
        return [w_MN.to(_accumulator(weight_LMN.dtype, precision)) for w_MN in weight_LMN]
    experts, width_out, width_in = weight_LMN.shape
    splits_L = torch.full((experts,), width_out, device=weight_LMN.device)
    return _from_codes(weight_LMN.reshape(experts * width_out, width_in), splits_L, "weight", gemm, precision)


def _operand(role: str, gemm: str, precision: ProductPrecision) -> Operand | None:
    """The quantised form that a product reads; None where it reads the tensor as it is stored."""
    if precision.recipe is None:
        return None
    operand = {operand.role: operand for operand in operands(gemm, precision.recipe)}[role]
    return None if operand.kept == "stored" else operand


def _from_codes(x_RN: Tensor, splits_L: Tensor, role: str, gemm: str, precision: ProductPrecision) -> list[Tensor]:
    """The values of each group's codes, in the orientation of x: float32, or rounded to x's dtype
    where dequantised.
    """
    operand = _operand(role, gemm, precision)
    assert precision.recipe is not None and operand is not None
    columnwise = operand.columnwise
    state = None if precision.state is None else getattr(precision.state, role)
    noise = precision.noise if role == "grad_output" else None
    quantization = quantize(
        x_RN,
        precision.recipe,
        role=role,
        splits=splits_L,
        rowwise=not columnwise,
        columnwise=columnwise,
        state=state,
        noise=noise,
    )
    form = quantization.quantized.form(columnwise)
    if precision.amaxes is not None:
        seen_L = getattr(precision.amaxes, role)
        seen_L.copy_(torch.maximum(seen_L, torch.cat([group.amax for group in form.groups]).flatten()))
    decoded = [turned(values(group, form.scheme), columnwise) for group in form.groups]
    return [
        (round_to(x_RC, x_RN.dtype) if operand.kept == "dequantized" else x_RC).to(_accumulator(x_RN.dtype, precision))
        for x_RC in decoded
    ]


def _bias_gradient(
    d_out_PM: Tensor, bias_LM: Tensor, tokens_per_expert_L: Tensor, precision: ProductPrecision
) -> Tensor:
    accumulator = _accumulator(d_out_PM.dtype, precision)
    sums = [d_out_PM[rows].to(accumulator).sum(0) for rows in expert_slices(tokens_per_expert_L, len(d_out_PM))]
    return round_to(torch.stack(sums), bias_LM.dtype)


def _accumulator(dtype: torch.dtype, precision: ProductPrecision) -> torch.dtype:
    """The accumulator dtype of products of `dtype`."""
    return torch.float64 if precision.accumulator == "float64" else accumulator_dtype(dtype)


def _with_tail(products: list[Tensor], rows: Tensor) -> Tensor:
    """The products below one another, rounded to the dtype of `rows`, then zeros up to the length
    of `rows`.
    """
    out = round_to(torch.cat(products), rows.dtype)
    return torch.cat([out, out.new_zeros((len(rows) - len(out), out.shape[1]))])
