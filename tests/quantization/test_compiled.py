"""Quantizers in a compiled graph."""

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_ref.config import Recipe
from tests.common.compiled import Graph, assert_compiles, same
from tests.common.fast import interpreted, normal

pytestmark = interpreted
SPLITS = torch.tensor([32, 0, 96])
RECIPES = [Recipe("block"), Recipe("nvfp4", stochastic_rounding=False)]  # of delayed scaling: below


def values(x: Tensor, recipe: Recipe) -> list[Tensor]:
    """Codes and values of both directions; with the gradient of the values."""
    quantized = moe_fast.quantize(x, recipe, splits=SPLITS, columnwise=True).quantized
    ways = (False, True)
    return [f(quantized, columnwise=columnwise) for f in (moe_fast.codes, moe_fast.dequantize) for columnwise in ways]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scaling)
def test_one_graph_serves_all_values_as_eager(recipe):
    calls = [(normal(128, 64, seed=seed, dtype=torch.bfloat16).requires_grad_(),) for seed in (0, 1)]
    assert_compiles(lambda x: values(x, recipe), *calls)


def test_a_state_of_delayed_scaling_goes_from_graph_to_graph():
    recipe = Recipe("delayed", amax_history_len=4)

    def step(x: Tensor, scale: Tensor, history: Tensor) -> list[Tensor]:
        state = moe_fast.new_quantizer_state(recipe)._replace(scale=scale, amax_history=history)
        quantized, state = moe_fast.quantize(x, recipe, state=state)
        return [moe_fast.dequantize(quantized), *moe_fast.update_scales(state, recipe)]

    graph = Graph(step)
    states = [list(moe_fast.new_quantizer_state(recipe))[::-1] for _ in range(2)]
    for seed in range(3):
        x = normal(32, 16, seed=seed)
        results = [function(x, *state) for function, state in zip((graph.function, step), states, strict=True)]
        assert same(*results)
        states = [result[:0:-1] for result in results]
    assert graph.compilations == 1


def test_what_a_graph_returns_is_a_whole_quantized_tensor():
    recipe, x = Recipe("block"), normal(256, 128, dtype=torch.bfloat16)
    quantized = Graph(lambda x: moe_fast.quantize(x, recipe, columnwise=True)).function(x).quantized
    eager = moe_fast.quantize(x, recipe, columnwise=True).quantized
    assert quantized.recipe == recipe and quantized.dtype == x.dtype
    for columnwise in (False, True):
        assert torch.equal(*(moe_fast.scales(q, columnwise=columnwise) for q in (quantized, eager)))
