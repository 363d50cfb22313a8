"""Fused quantizers in a compiled graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_ref.config import Recipe
from tests.common.compiled import assert_compiles
from tests.common.fast import interpreted, normal

pytestmark = interpreted
SPLITS = torch.tensor([32, 64])


def read(quantized: Any) -> list[Tensor]:
    return [moe_fast.dequantize(quantized, columnwise=columnwise) for columnwise in (False, True)]


def activated(h: Tensor, probs: Tensor, recipe: Recipe) -> list[Tensor]:
    settings = {"splits": SPLITS, "probs": probs, "columnwise": True}
    quantized = moe_fast.glu_and_quantize(h, recipe, **settings).quantized
    gradient = moe_fast.glu_backward_and_quantize(h[:, :32].detach(), h.detach(), recipe, **settings)
    return [*read(quantized), *read(gradient.quantized), gradient.d_probs.detach()]


def permuted(x: Tensor, probs: Tensor, recipe: Recipe) -> list[Tensor]:
    routed = (probs > 0)[:, None].expand(-1, 2)
    settings = {"probs": probs[:, None].expand(-1, 2), "capacity": 64, "columnwise": True}
    out = moe_fast.permute_and_quantize(x, routed, recipe, **settings)
    return [*read(out.quantized), out.probs, out.tokens_per_expert]


@pytest.mark.parametrize(
    "function, scaling", [(activated, "current"), (permuted, "block")], ids=lambda x: getattr(x, "__name__", x)
)
def test_one_graph_serves_all_values_as_eager(function, scaling):
    calls = [(normal(96, 64, seed=seed, dtype=torch.bfloat16), normal(96, seed=seed + 2)) for seed in (0, 1)]
    leaves = [tuple(x.requires_grad_() for x in call) for call in calls]
    assert_compiles(lambda x, probs: function(x, probs, Recipe(scaling)), *leaves)
