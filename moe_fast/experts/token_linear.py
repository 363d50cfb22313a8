"""The linear layers between tokens and experts' rows, with FP8 by blocks. Tokens are quantised on
their way to rows, so that neither the rows that fc1 reads are written, nor the gradient of the rows
that fc2 writes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts.activated import Activated, kept_rows, rows_of_kept
from moe_fast.experts.factors import Precision, quantized_rows
from moe_fast.experts.scaled_linear import gradients, multiplied
from moe_fast.experts.segments import copy_of
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.operators import as_operators
from moe_fast.permutation.permute import move_to_rows, sum_rows
from moe_fast.permutation.row_map import RowMap
from moe_fast.quantization.gathered import Gathered, can_gather, quantize_gathered
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Recipe

UNFILLED = (False, False)  # inner tensors need no zeros past the experts' rows


@dataclass(frozen=True)
class RowsOfTokens:
    """The rows of `permute`, which are not written."""

    rows_PH: Tensor  # without memory: the rows' node in the graph
    codes: Quantized | None  # of the rows, by rows; without a recipe none
    tokens_TH: Tensor
    row_map: RowMap
    source_P: Tensor  # int32, the token of each row, or -1


def quantized_tokens(
    tokens_TH: Tensor, row_map: RowMap, source_P: Tensor, role: str, counts_L: Tensor, recipe: Recipe,
    rowwise: bool, columnwise: bool,
) -> Quantized:  # fmt: skip
    """`quantized_rows` of the tokens' rows. If no kernel can gather them, the rows are written
    first.
    """
    if can_gather(tokens_TH, recipe):
        rows = Gathered(tokens_TH, source_P)
        return quantize_gathered(rows, recipe, role, counts_L, rowwise, columnwise, for_products=True)
    rows_PH = move_to_rows(tokens_TH.detach(), None, row_map)[0]
    return quantized_rows(rows_PH, role, counts_L, Precision(recipe), rowwise, columnwise)


def linear_of_tokens(
    token_rows: RowsOfTokens, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, bias: Tensor | None = None, recipe: Recipe, tokens_again: bool = False,
) -> Tensor:  # fmt: skip
    """`grouped_linear` of rows that are still tokens. With `tokens_again` the tokens are saved in
    place of the rows' codes.
    """
    arguments = (token_rows, recipe, tokens_again)
    return _LinearOfTokens.apply(token_rows.rows_PH, weight_LMN, bias, tokens_per_expert_L, *arguments)


def linear_to_tokens(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, recipe: Recipe, row_map: RowMap, source_P: Tensor, rows_again: bool = False, activation: Activated | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, `unpermute` of y), with y = `linear_of` of the rows."""
    arguments = (recipe, row_map, source_P, rows_again, activation)
    return _LinearToTokens.apply(rows_PN, weight_LMN, None, tokens_per_expert_L, *arguments)


@as_operators
class _LinearOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Tensor,
        token_rows: RowsOfTokens, recipe: Recipe, tokens_again: bool,
    ) -> Tensor:  # fmt: skip
        assert token_rows.codes is not None
        tokens, row_map, source = token_rows.tokens_TH.detach(), token_rows.row_map, token_rows.source_P
        wants_weight = ctx.needs_input_grad[1]
        counts = copy_of(tokens_per_expert) if any(ctx.needs_input_grad) else tokens_per_expert
        x = replace(token_rows.codes, splits=counts)
        if wants_weight and not tokens_again:
            tall = quantized_tokens(tokens, row_map, source, "input", counts, recipe, False, True)
            x = replace(x, columnwise=tall.columnwise)
        out, saved = multiplied(ctx, x, weight, bias, counts, Precision(recipe), UNFILLED)
        map_tensors, ctx.numbers = row_map.parts()
        ctx.lists = len(map_tensors) + 2 if wants_weight and tokens_again else 0
        ctx.save_for_backward(*((tokens, source, *map_tensors) if ctx.lists else ()), *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint unpacks each tensor once
        lists, (counts, *tensors) = saved[: ctx.lists], saved[ctx.lists :]
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        d = x = None
        if wants_rows or wants_weight:
            d = quantized_rows(d_out, "grad_output", counts, ctx.precision, wants_rows, wants_weight)
        if lists:
            tokens, source, *map_tensors = lists
            row_map = RowMap(*map_tensors, *ctx.numbers)
            x = quantized_tokens(tokens, row_map, source, "input", counts, ctx.precision.recipe, False, True)
        return *gradients(ctx, d, x, d_out, tensors), *(None,) * 4


@as_operators
class _LinearToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: None, tokens_per_expert: Tensor, recipe: Recipe,
        row_map: RowMap, source: Tensor, rows_again: bool, activation: Activated | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        wants_weight = ctx.needs_input_grad[1]
        precision = Precision(recipe)
        counts = copy_of(tokens_per_expert) if any(ctx.needs_input_grad) else tokens_per_expert
        operand = rows if activation is None else activation
        x = quantized_rows(operand, "input", counts, precision, True, wants_weight and not rows_again)
        out, saved = multiplied(ctx, x, weight, bias, counts, precision, (True, False))
        lists, ctx.numbers = row_map.parts()
        ctx.save_for_backward(*kept_rows(ctx, rows, activation, rows_again and wants_weight), source, *lists, *saved)
        combined = sum_rows(out, None, None, row_map)[0]
        assert combined is not None
        return out, combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_combined: Tensor | None) -> tuple[Any, ...]:
        saved_rows, probs, source, slots, num_slots, base, gap, counts, *tensors = ctx.saved_tensors
        rows = rows_of_kept(ctx, saved_rows, probs)
        row_map = RowMap(slots, num_slots, base, gap, *ctx.numbers)
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        if d_out is not None and d_combined is not None:
            d_out, d_combined = d_out + move_to_rows(d_combined, None, row_map)[0], None
        recipe, x = ctx.precision.recipe, None
        if d_combined is not None:
            forms = (wants_rows, wants_weight)
            d = quantized_tokens(d_combined, row_map, source, "grad_output", counts, recipe, *forms)
        elif d_out is not None:
            d = quantized_rows(d_out, "grad_output", counts, ctx.precision, wants_rows, wants_weight)
        else:
            return (None,) * 9
        if wants_weight and rows is not None:
            x = quantized_rows(rows, "input", counts, ctx.precision, False, True)
        return *gradients(ctx, d, x, None, tensors), *(None,) * 6
