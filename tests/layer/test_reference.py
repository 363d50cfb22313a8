"""The layer of the reference: its stages' results, its jitter, a recipe, and Megatron's options.

`evidence.formulations.layer` computes the layer token by token, for the cases of tests/evidence;
test_tutorial.py compares it with plain loops.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import moe_ref
from moe_ref.config import (
    DISPATCHERS,
    LayerConfig,
    LayerParameters,
    MoEConfig,
    Recipe,
    RouterConfig,
    layer_config,
    quantization_alignment,
    split_experts,
)
from tests.common.fast import normal

HIDDEN, LATENT, WIDTH, EXPERTS = 6, 4, 3, 4
random = partial(normal, dtype=torch.float64)


def parameters(latent: bool = True, shared: bool = True) -> LayerParameters:
    width = LATENT if latent else HIDDEN
    tensors = {
        "router_weight": random(EXPERTS, HIDDEN, seed=1),
        "router_bias": random(EXPERTS, seed=2),
        "fc1_weight": random(EXPERTS, 2 * WIDTH, width, seed=3),
        "fc2_weight": random(EXPERTS, width, WIDTH, seed=4),
    }
    if latent:
        tensors |= {"latent_down": random(LATENT, HIDDEN, seed=5), "latent_up": random(HIDDEN, LATENT, seed=6)}
    if shared:
        tensors |= {"shared_fc1_weight": random(4, HIDDEN, seed=7), "shared_fc2_weight": random(HIDDEN, 2, seed=8)}
        tensors |= {"shared_gate_weight": random(1, HIDDEN, seed=9)}
    return LayerParameters(**{name: x.requires_grad_() for name, x in tensors.items()})


def config(dispatcher: str = "alltoall", **router) -> LayerConfig:
    settings = {"num_experts": EXPERTS, "topk": 2, "score_function": "sigmoid"} | router
    return LayerConfig(router=RouterConfig(**settings), dispatcher=dispatcher)


def run(x: Tensor, counts: tuple[int, ...], p: LayerParameters, layer_config: LayerConfig, **settings):
    states = [moe_ref.new_state(layer_config.router) for _ in counts]
    return moe_ref.moe_layer(x.split(counts), split_experts(p, len(counts)), layer_config, states=states, **settings)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_intermediate_is_that_of_its_stage(dispatcher):
    p, x = parameters(), random(10, HIDDEN, seed=10)
    out = run(x, (7, 3), p, config(dispatcher))
    assert_close(torch.cat(out.logits), moe_ref.gate(x, p.router_weight, bias=p.router_bias))
    routed = moe_ref.topk_routing(torch.cat(out.logits), topk=2, score_function="sigmoid")
    assert torch.equal(torch.cat([routed_rank.routing_map for routed_rank in out.routed]), routed.routing_map)
    counts = [dispatched.tokens_per_expert for dispatched in out.dispatched]
    assert torch.equal(torch.cat(counts), routed.routing_map.sum(0))
    assert [len(rows) for rows in out.expert_rows] == [int(count.sum()) for count in counts]
    shared = moe_ref.shared_experts(x, p.shared_fc1_weight, p.shared_fc2_weight, gate_weight=p.shared_gate_weight)
    assert_close(torch.cat(out.shared), shared)
    up = moe_ref.latent_projection(torch.cat(out.combined), p.latent_up)
    assert_close(torch.cat(out.output), up + shared)


def test_a_mask_of_other_tokens_or_ranks_is_refused():
    for mask in ([torch.zeros(3, dtype=torch.bool)], [torch.zeros(4, dtype=torch.bool)] * 2):
        with pytest.raises(ValueError, match="padding_mask is"):
            run(random(4, HIDDEN), (4,), parameters(), config(), padding_mask=mask)


def test_a_recipe_quantises_the_experts_products_and_nothing_else():
    p, x = parameters(latent=False, shared=False), random(10, HIDDEN, seed=10)
    fine, coarse = config(), LayerConfig(router=config().router, recipe=Recipe("current"), align=16)
    exact, low = (run(x, (7, 3), p, setup) for setup in (fine, coarse))
    assert torch.equal(torch.cat(exact.logits), torch.cat(low.logits))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(exact.dispatched, low.dispatched, strict=True))
    ratio = (torch.cat(low.output) - torch.cat(exact.output)).norm() / torch.cat(exact.output).norm()
    assert 1e-4 < ratio < 0.2


def test_the_router_alone_sees_the_jitter_whose_noise_is_given_or_drawn():
    p, x = parameters(latent=False, shared=False), random(10, HIDDEN, seed=10)
    options_of_layer = LayerConfig(router=config().router, jitter_eps=0.25)
    torch.manual_seed(3)
    drawn = run(x, (10,), p, options_of_layer)
    torch.manual_seed(3)
    noise = torch.rand_like(x)
    repeated = run(x, (10,), p, options_of_layer, noise=[noise])
    assert_close(repeated.logits[0], drawn.logits[0])
    assert_close(repeated.logits[0], moe_ref.gate(x * (0.75 + 0.5 * noise), p.router_weight, bias=p.router_bias))
    routing_map = repeated.routed[0].routing_map
    assert torch.equal(repeated.dispatched[0].rows, moe_ref.permute(x, routing_map).rows)
    with pytest.raises(ValueError, match="noise is of shape"):
        run(x, (10,), p, config(), noise=[noise])
    with pytest.raises(ValueError, match="noise is of shape"):
        run(x, (10,), p, options_of_layer, noise=[noise[1:]])


MEGATRON = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "add_bias_linear": False}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_megatrons_options_become_the_settings_of_the_layer():
    options = {"activation_func": "silu", "gated_linear_unit": True, "moe_router_score_function": "sigmoid"}
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    assert layer_config(MoEConfig(**MEGATRON, **options)) == config("allgather")
    assert layer_config(MoEConfig(**MEGATRON, **options, **flex)) == config("hybridep")
    sizes = {"moe_flex_dispatcher_num_sms": 4, "moe_hybridep_num_blocks_permute": 5}
    sizes |= {"moe_hybridep_num_blocks_unpermute": 6}
    sized = replace(config("hybridep"), num_sms=4, num_blocks_permute=5, num_blocks_unpermute=6)
    assert layer_config(MoEConfig(**MEGATRON, **options, **flex, **sizes)) == sized
    assert layer_config(MoEConfig(**MEGATRON, **options, **sizes)) == config("allgather")
    with pytest.raises(ValueError, match="num_blocks_permute is 5; it must be None with allgather"):
        replace(sized, dispatcher="allgather", num_sms=None)
    shaped = options | {"glu_linear_offset": 1.0}
    assert layer_config(MoEConfig(**MEGATRON, **shaped)).offset == 1
    assert layer_config(MoEConfig(**MEGATRON, **shaped, use_te_activation_func=True)).offset == 0
    cut = MEGATRON | {"moe_ffn_hidden_size": 2 * WIDTH, "expert_tensor_parallel_size": 2}
    tensor = layer_config(MoEConfig(**cut, **options))
    assert tensor == replace(config("allgather"), expert_tensor_parallel=2)
    fp8 = MoEConfig(**MEGATRON, fp8="e4m3", fp8_recipe="blockwise", moe_router_dtype="fp64")
    layer = layer_config(fp8)
    assert (layer.kind, layer.recipe, layer.router_dtype) == ("gelu", Recipe("block", fp8_format="e4m3"), "fp64")
    assert layer.align == quantization_alignment(fp8) == 16
    with pytest.raises(ValueError, match="activation_func is 'squared_relu' with gated_linear_unit"):
        layer_config(MoEConfig(**MEGATRON, activation_func="squared_relu", gated_linear_unit=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("padding", ["experts", "map", "dispatcher"])
def test_rows_are_padded_once_whichever_stage_the_options_give_it_to(padding):
    """Rows of MXFP8 that nobody pads are refused."""
    options = {
        "experts": {"moe_token_dispatcher_type": "alltoall"},
        "map": {"moe_token_dispatcher_type": "alltoall", "moe_router_padding_for_quantization": True},
        "dispatcher": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
    }[padding]
    recipe = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "moe_router_dtype": "fp32"}
    options_of_layer = layer_config(MoEConfig(**MEGATRON, **recipe, **options))
    assert options_of_layer.align == 32
    router, *both = (random(*shape, seed=len(shape)) for shape in ((EXPERTS, 32), *((EXPERTS, 32, 32),) * 2))
    weights = LayerParameters(router, *both)
    out = run(random(3, 32), (3,), weights, options_of_layer)
    assert (
        int(out.dispatched[0].tokens_per_expert.sum())
        == len(out.dispatched[0].rows)
        == 3 * options_of_layer.router.topk
    )
    with pytest.raises(ValueError, match="multiples of 32"):
        run(random(3, 32), (3,), weights, replace(options_of_layer, align=None))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dispatcher": "nccl"}, "dispatcher is 'nccl'"),
        ({"recipe": Recipe("delayed")}, "linear_states is None; it must be given with a recipe of delayed scaling"),
    ],
)
def test_an_illegal_configuration_is_refused(changed, named):
    with pytest.raises(ValueError, match=named):
        run(random(4, HIDDEN), (4,), parameters(), LayerConfig(**{"router": config().router} | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fc1_weight": random(2, 6, LATENT), "fc2_weight": random(2, LATENT, 3)}, "fc1_weight is of shape"),
        ({"latent_up": None}, "latent_up is None"),
        ({"shared_fc1_weight": None}, "shared_fc2_weight is given"),
    ],
)
def test_illegal_parameters_are_refused(changed, named):
    with pytest.raises(ValueError, match=named):
        run(random(4, HIDDEN), (4,), parameters()._replace(**changed), config())


def test_a_layer_over_ranks_that_do_not_divide_the_experts_is_refused():
    with pytest.raises(ValueError, match="num_experts is 4"):
        run(random(6, HIDDEN), (2, 2, 2), parameters(), config())
