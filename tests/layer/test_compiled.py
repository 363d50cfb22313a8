"""The layer in a compiled graph, on one rank."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import moe_fast
from moe_ref.config import LayerConfig, Recipe, RouterConfig
from tests.common.compiled import Graph, same
from tests.common.fast import interpreted, normal

pytestmark = interpreted
ROUTER = RouterConfig(
    num_experts=4, topk=2, score_function="sigmoid", expert_bias=True, aux_loss_coeff=1e-2, capacity_factor=1.5
)
OPTIONS = {
    "all": {"latent": 16, "shared_width": 16, "shared_gate": True, "bias": True},
    "recompute": {"shared_width": 16, "recompute": "moe"},
    "less saved": {"recompute": ("permute", "moe_act")},
}


def step(layer: moe_fast.MoELayer, run, x: Tensor) -> list[Tensor]:
    """One training step: output, gradients, and the state after it."""
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    results = [y.detach(), x.grad, *gradients, *(b.clone() for b in layer.buffers()), layer.losses.aux_loss]
    layer.finish_batch()
    return results


@pytest.mark.parametrize("name", OPTIONS)
def test_two_steps_of_one_graph_are_those_of_the_eager_layer(name):
    torch.manual_seed(0)
    eager = moe_fast.MoELayer(LayerConfig(router=ROUTER), 32, 16, init_std=0.3, **OPTIONS[name])
    compiled = copy.deepcopy(eager)
    graph = Graph(compiled)
    for seed in (0, 1):
        x = normal(20, 32, seed=seed)
        assert same(step(compiled, graph.function, x), step(eager, eager, x))
    assert graph.compilations == 1
    graph.check_operators()


@pytest.mark.parametrize(
    "settings", [LayerConfig(router=ROUTER), ROUTER, Recipe("mxfp8")], ids=lambda x: type(x).__name__
)
def test_torch_maps_settings_to_any_values_after_a_graph_has_called_a_function(settings):
    Graph(moe_fast.gate).function(normal(3, 4), normal(2, 4))
    mapped = pytree.tree_map(lambda _: None, settings)  # as the checkpoint of torch 2.11 maps all arguments
    assert type(mapped) is type(settings)
    assert mapped != settings
    assert pytree.tree_map_with_path(lambda path, x: x, settings) == settings
