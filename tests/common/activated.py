"""A stand-in for the kernel that quantises an activation where it is computed: two launches, which
any device has. The kernel is judged on a Hopper.
"""

from typing import Any

import pytest
from torch import Tensor

from moe_fast.experts import factors, mlp
from moe_fast.experts.activated import Activated
from moe_fast.experts.activations import activated
from moe_fast.quantization.quantize import quantize_for_products
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Recipe


def quantised(
    rows: Activated, recipe: Recipe, splits: Tensor | None, rowwise: bool, columnwise: bool, *, for_products: bool
) -> Quantized:
    """`quantize_activated` for products."""
    assert for_products
    x = activated(rows.h_PF2, rows.settings, probs=rows.probs)
    return quantize_for_products(x, recipe, splits=splits, rowwise=rowwise, columnwise=columnwise)


def as_on_a_hopper(monkeypatch: pytest.MonkeyPatch, kernel: Any = quantised) -> list[tuple[bool, bool]]:
    """No activation is written before it is quantised; the forms of each call, by rows and by
    columns.
    """
    forms: list[tuple[bool, bool]] = []

    def recorded(rows: Any, recipe: Any, splits: Any, rowwise: bool, columnwise: bool, **options: Any) -> Any:
        forms.append((rowwise, columnwise))
        return kernel(rows, recipe, splits, rowwise, columnwise, **options)

    monkeypatch.setattr(mlp, "can_quantize_activated", lambda rows, recipe: recipe.scaling == "block")
    monkeypatch.setattr(factors, "quantize_activated", recorded)
    return forms
