"""Experts in a compiled graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_ref.config import Recipe
from tests.common.compiled import assert_compiles
from tests.common.compiler import compiled
from tests.common.fast import interpreted, normal
from tests.experts.traced import errors_of_products

pytestmark = interpreted
COUNTS = torch.tensor([[5, 0, 12], [1, 9, 3]])  # of two routings, of three experts
ROWS, H, F = 20, 32, 16


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Rows, counts, both weights and probs."""
    shapes = ((ROWS, H), (3, 2 * F, H), (3, H, F), (ROWS,))
    rows, fc1, fc2, probs = (normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes))
    return rows.requires_grad_(), COUNTS[seed % 2], fc1.requires_grad_(), fc2.requires_grad_(), probs.requires_grad_()


def mlp(rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, **settings: Any) -> Tensor:
    biases = {"fc1_bias": fc1[:, :, 0], "fc2_bias": fc2[:, :, 0]}
    return moe_fast.grouped_mlp(rows, counts, fc1, fc2, probs=probs, **biases, **settings)


def products(rows: Tensor, counts: Tensor, fc1: Tensor, _: Tensor, probs: Tensor) -> Any:
    out = moe_fast.grouped_linear(rows, fc1, counts)
    d_rows = moe_fast.grouped_dgrad(out, fc1, counts)
    d_weight = moe_fast.grouped_wgrad(out, rows, counts, accumulate_into=fc1)
    gradients = moe_fast.glu_backward(rows[:, :F].detach(), rows.detach(), probs=probs.detach())
    return out, d_rows.detach(), d_weight.detach(), *gradients


def shared(rows: Tensor, _: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor) -> Tensor:
    projected = moe_fast.latent_projection(rows, fc2[1] @ fc1[2, :F], bias=fc1[0, 0])
    gate = fc1[0, :1] * probs[0]
    return moe_fast.shared_experts(projected, fc1[1], fc2[2], gate_weight=gate, kind="geglu", recompute=True)


CALLS = {
    "products": products,
    "shared": shared,
    "recompute": lambda *x: mlp(*x, recompute="moe_act", fp8_input_store=True),
    "probs on input": lambda *x: mlp(*x, recompute="moe", probs_on_input=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_serves_all_counts_as_eager(name):
    used = (0, 2) if name == "products" else (0, 2, 3, 4)
    calls = [inputs(seed) for seed in (0, 1)]
    for call in calls:
        for i in (0, 2, 3, 4):
            call[i].requires_grad_(i in used)
    assert_compiles(CALLS[name], *calls)


def test_one_graph_serves_all_counts_in_low_precision():
    calls = [inputs(seed, torch.bfloat16) for seed in (0, 1)]
    assert_compiles(lambda *x: mlp(*x, recipe=Recipe("current")), *calls)


def test_products_are_traced_for_a_gpu_without_addresses():
    count, errors = compiled(errors_of_products)
    assert count > 100
    assert errors == []


def test_a_product_by_a_transposed_weight_is_one_graph():
    def product(rows: Tensor, counts: Tensor, fc1: Tensor, *_: Tensor) -> Tensor:
        return moe_fast.grouped_linear(rows, fc1.mT, counts)

    def transposed(seed: int) -> tuple[Any, ...]:
        rows, counts, fc1, *others = inputs(seed)
        return rows, counts, fc1.detach().mT.contiguous().requires_grad_(), *others

    assert_compiles(product, transposed(0)[:3], transposed(1)[:3])
