"""The factors of products in low precision: quantised rows and weights, and the parts of them that
a backward keeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.experts._factors import TILE_ROWS
from moe_fast.experts.activated import Activated, quantize_activated
from moe_fast.launch.operators import in_graph
from moe_fast.quantization.quantize import quantize_for_products
from moe_fast.quantization.quantized import Form, Quantized
from moe_ref.config import LinearAmax, LinearState, Recipe, check_splits


class Precision(NamedTuple):
    """How the factors of a product are quantised."""

    recipe: Recipe
    state: LinearState | None = None
    noise: Tensor | None = None
    amaxes: LinearAmax | None = None  # raised in place


class Product(NamedTuple):
    """How a grouped linear layer computes, besides its tensors. The defaults are those of
    `grouped_linear` without a recipe.
    """

    precision: Precision | None = None
    # whether zeros are written past the last expert's rows of the result, and of the gradient of
    # the rows; a backward_override writes them anyway
    filled: tuple[bool, bool] = (True, True)
    # whether hooks of autograd drop the saved rows and compute them again, so that the rows are
    # saved, not their codes
    rows_again: bool = False
    # the activation that the rows are, if they have no memory: only with block scaling, gradients
    # of low precision, and a weight whose gradient is not delayed
    activation: Activated | None = None


def quantized_rows(
    x: Tensor | Activated, role: str, tokens_per_expert: Tensor | None, precision: Precision, rowwise: bool,
    columnwise: bool,
) -> Quantized:  # fmt: skip
    """Each expert's rows, quantised as a group of their own, by rows, by columns or both."""
    if isinstance(x, Activated):
        return quantize_activated(x, precision.recipe, tokens_per_expert, rowwise, columnwise, for_products=True)
    state = None if precision.state is None else getattr(precision.state, role)
    noise = precision.noise if role == "grad_output" else None
    forms = {"rowwise": rowwise, "columnwise": columnwise}
    quantized = quantize_for_products(
        x.detach(), precision.recipe, role=role, splits=tokens_per_expert, **forms, state=state, noise=noise
    )
    if precision.amaxes is not None:
        seen_L = getattr(precision.amaxes, role)
        seen_L.copy_(torch.maximum(seen_L, quantized.form(not rowwise).amax))
    return quantized


class KeptWeight(NamedTuple):
    """A weight's codes, and the weight that they are of."""

    weight_LMN: Tensor  # kept alive, so that no other tensor gets its memory
    version: int
    quantized: Quantized


_kept: ContextVar[dict[tuple[Any, ...], KeptWeight] | None] = ContextVar("kept weights", default=None)


@contextmanager
def weights_quantized_once() -> Iterator[None]:
    """A context within which products with a recipe quantise each weight once, for all the
    micro-batches of a step.

    The caller promises that no weight changes within it. A change that torch counts, such as one by
    a torch optimizer or by `copy_`, raises an error. A change through `.data`, or by a kernel or a
    collective of another library, is not counted: the products would go on with the old codes.
    Therefore nothing is kept unless the caller asks for it, and nothing is kept after the end.

    The codes take two bytes per element of a weight, besides what a forward saves. A CUDA graph
    that was captured within the context must be replayed within it. Other threads do not see the
    context: a backward that computes a forward again also quantises the weight again. So does a
    graph of torch.compile, whose results belong to the graph.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def quantized_weight(weight_LMN: Tensor, precision: Precision, rowwise: bool, columnwise: bool) -> Quantized:
    """Each expert's matrix, quantised by rows, by columns or both, or the codes of an earlier call.

    Raises:
        RuntimeError: the weight has changed within `weights_quantized_once`.
    """
    kept_weights = _kept.get()
    # an inference tensor has no version
    if kept_weights is None or in_graph() or precision.state is not None or weight_LMN.is_inference():
        return _quantized_weight(weight_LMN, precision, rowwise, columnwise)
    weight = weight_LMN.detach()
    key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, precision.recipe)
    if key not in kept_weights:
        kept_weights[key] = KeptWeight(weight, weight._version, _quantized_weight(weight, precision, True, True))
    if kept_weights[key].version != weight._version:
        raise RuntimeError("a weight has changed within weights_quantized_once: its codes are of the old values")
    return kept_weights[key].quantized


def _quantized_weight(weight_LMN: Tensor, precision: Precision, rowwise: bool, columnwise: bool) -> Quantized:
    experts, height, width = weight_LMN.shape
    check_splits([height], height, precision.recipe)
    # if experts consist of whole tiles, blocks are the same with and without splits
    has_whole_tiles = precision.recipe.scaling == "block" and height % TILE_ROWS == 0
    splits = None if has_whole_tiles else torch.full((experts,), height, device=weight_LMN.device)
    return quantized_rows(weight_LMN.reshape(experts * height, width), "weight", splits, precision, rowwise, columnwise)


def tensors_of(quantized: Quantized, columnwise: bool) -> tuple[Tensor | None, ...]:
    """The tensors of a form, for autograd to save; Nones if there is no such form."""
    form = quantized.columnwise if columnwise else quantized.rowwise
    return (None, None, None) if form is None else (getattr(form, _codes(form, columnwise)), form.scale, form.amax)


def _codes(form: Form, columnwise: bool) -> str:
    """The name of the field of the form whose codes a product along this direction reads."""
    return "codes_MN" if form.turned_NT is None or not columnwise else "turned_NT"


def without_tensors(quantized: Quantized, columnwise: bool) -> Quantized:
    """`quantized`, with empty tensors in its form of this direction and without the other form."""
    form, nothing = quantized.columnwise if columnwise else quantized.rowwise, torch.empty(0)
    if form is not None:
        turned = nothing if _codes(form, columnwise) == "turned_NT" else None
        form = replace(form, codes_MN=nothing, scale=nothing, amax=nothing, turned_NT=turned)
    by_rows, by_columns = (None, form) if columnwise else (form, None)
    return replace(quantized, splits=None, source=None, rowwise=by_rows, columnwise=by_columns)


def with_tensors(quantized: Quantized, tensors: list[Tensor], columnwise: bool) -> Quantized:
    """The inverse of `without_tensors`: the form of this direction with its tensors."""
    codes, scale, amax = tensors
    form = replace(quantized.form(columnwise), scale=scale, amax=amax)
    turned = _codes(form, columnwise) == "turned_NT"
    form = replace(form, turned_NT=codes) if turned else replace(form, codes_MN=codes)
    return replace(quantized, columnwise=form) if columnwise else replace(quantized, rowwise=form)
