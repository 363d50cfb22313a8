"""Factors of products in low precision: quantised rows and weights, and what a backward keeps."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fast.experts._factors import TILE_ROWS
from moe_fast.quantization.quantize import quantize_for_products
from moe_fast.quantization.quantized import Form, Quantized
from moe_ref.config import LinearState, Recipe, check_splits


class Precision(NamedTuple):
    """How the factors of a product are quantised."""

    recipe: Recipe
    state: LinearState | None
    noise: Tensor | None


def quantized_rows(
    x: Tensor, role: str, tokens_per_expert: Tensor | None, precision: Precision, rowwise: bool, columnwise: bool
) -> Quantized:
    """Each expert's rows, quantised by themselves, in the forms asked for."""
    state = None if precision.state is None else getattr(precision.state, role)
    noise = precision.noise if role == "grad_output" else None
    forms = {"rowwise": rowwise, "columnwise": columnwise}
    return quantize_for_products(
        x.detach(), precision.recipe, role=role, splits=tokens_per_expert, **forms, state=state, noise=noise
    )


def quantized_weight(weight_LMN: Tensor, precision: Precision, rowwise: bool, columnwise: bool) -> Quantized:
    """Each expert's matrix, quantised in the forms asked for."""
    experts, height, width = weight_LMN.shape
    check_splits([height], height, precision.recipe)
    # squares and blocks of whole experts are the same, wherever an expert begins
    whole = precision.recipe.scaling == "block" and height % TILE_ROWS == 0
    splits = None if whole else torch.full((experts,), height, device=weight_LMN.device)
    return quantized_rows(weight_LMN.reshape(experts * height, width), "weight", splits, precision, rowwise, columnwise)


def tensors_of(quantized: Quantized, columnwise: bool) -> tuple[Tensor | None, ...]:
    """The tensors of a form, if it is there, for autograd to save."""
    form = quantized.columnwise if columnwise else quantized.rowwise
    return (None, None, None) if form is None else (getattr(form, _codes(form, columnwise)), form.scale, form.amax)


def _codes(form: Form, columnwise: bool) -> str:
    """Which codes a product of this direction reads."""
    return "codes_MN" if form.turned_NT is None or not columnwise else "turned_NT"


def without_tensors(quantized: Quantized, columnwise: bool) -> Quantized:
    """`quantized` and its form of this direction, without their tensors."""
    form, nothing = quantized.columnwise if columnwise else quantized.rowwise, torch.empty(0)
    if form is not None:
        turned = nothing if _codes(form, columnwise) == "turned_NT" else None
        form = replace(form, codes_MN=nothing, scale=nothing, amax=nothing, turned_NT=turned)
    by_rows, by_columns = (None, form) if columnwise else (form, None)
    return replace(quantized, splits=None, source=None, rowwise=by_rows, columnwise=by_columns)


def with_tensors(kept: Quantized, tensors: list[Tensor], columnwise: bool) -> Quantized:
    """The inverse of `without_tensors`, with the form of this direction alone."""
    codes, scale, amax = tensors
    form = replace(kept.form(columnwise), scale=scale, amax=amax)
    turned = _codes(form, columnwise) == "turned_NT"
    form = replace(form, turned_NT=codes) if turned else replace(form, codes_MN=codes)
    return replace(kept, columnwise=form) if columnwise else replace(kept, rowwise=form)
