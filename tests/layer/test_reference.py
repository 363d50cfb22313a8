"""The layer against a computation without permutation: matrix products per token and expert."""

from dataclasses import replace

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

HIDDEN, LATENT, WIDTH, EXPERTS = 6, 4, 3, 4
TOKENS = (5, 0, 3, 2)  # of each rank


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(latent: bool = True, shared: bool = True, biases: bool = False) -> LayerParameters:
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
    if biases:
        tensors |= {"fc1_bias": random(EXPERTS, 2 * WIDTH, seed=12), "fc2_bias": random(EXPERTS, width, seed=13)}
    return LayerParameters(**{name: x.requires_grad_() for name, x in tensors.items()})


def swiglu(x: Tensor, fc1: Tensor, fc2: Tensor, b1: Tensor | float = 0.0, b2: Tensor | float = 0.0) -> Tensor:
    gate, value = (fc1 @ x + b1).chunk(2)
    return fc2 @ (gate * gate.sigmoid() * value) + b2


def dense(x: Tensor, p: LayerParameters, topk: int) -> Tensor:
    """Σ_e p[t, e] · mlp_e(x[t]) + shared(x[t]), token by token, with sigmoid scores."""
    rows = []
    for x_H in x:
        score = (p.router_weight @ x_H + p.router_bias).sigmoid()
        chosen = score.argsort(descending=True)[:topk].tolist()
        total = sum(score[e] for e in chosen)
        inner = x_H if p.latent_down is None else p.latent_down @ x_H
        biases = [] if p.fc1_bias is None else [p.fc1_bias, p.fc2_bias]
        of_experts = [p.fc1_weight, p.fc2_weight, *biases]
        y = sum(score[e] / total * swiglu(inner, *(x[e] for x in of_experts)) for e in chosen)
        y = y if p.latent_up is None else p.latent_up @ y
        if p.shared_fc1_weight is not None:
            y = y + swiglu(x_H, p.shared_fc1_weight, p.shared_fc2_weight) * (p.shared_gate_weight[0] @ x_H).sigmoid()
        rows.append(y)
    return torch.stack(rows)


def config(dispatcher: str = "alltoall", **router) -> LayerConfig:
    settings = {"num_experts": EXPERTS, "topk": 2, "score_function": "sigmoid"} | router
    return LayerConfig(router=RouterConfig(**settings), dispatcher=dispatcher)


def run(x: Tensor, counts: tuple[int, ...], p: LayerParameters, how: LayerConfig, **settings):
    states = [moe_ref.new_state(how.router) for _ in counts]
    return moe_ref.moe_layer(x.split(counts), split_experts(p, len(counts)), how, states=states, **settings)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    ("counts", "latent", "shared"), [((10,), False, True), ((7, 3), True, False), (TOKENS, True, True)], ids=str
)
def test_a_layer_is_the_dense_computation_forward_and_backward(dispatcher, counts, latent, shared):
    p = parameters(latent, shared, biases=latent)
    x = random(10, HIDDEN, seed=10).requires_grad_()
    out = torch.cat(list(run(x, counts, p, config(dispatcher)).output))
    right = dense(x, p, topk=2)
    assert_close(out, right)
    leaves = [x, *(tensor for tensor in p if tensor is not None)]
    cotangent = random(10, HIDDEN, seed=11)
    for got, wanted in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (out, right)), strict=True):
        assert_close(got, wanted)
        assert wanted.any()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_intermediate_is_that_of_its_stage(dispatcher):
    p, x = parameters(), random(10, HIDDEN, seed=10)
    out = run(x, (7, 3), p, config(dispatcher))
    assert_close(torch.cat(out.logits), moe_ref.gate(x, p.router_weight, bias=p.router_bias))
    routed = moe_ref.topk_routing(torch.cat(out.logits), topk=2, score_function="sigmoid")
    assert torch.equal(torch.cat([one.routing_map for one in out.routed]), routed.routing_map)
    counts = [part.tokens_per_expert for part in out.dispatched]
    assert torch.equal(torch.cat(counts), routed.routing_map.sum(0))
    assert [len(rows) for rows in out.expert_rows] == [int(count.sum()) for count in counts]
    shared = moe_ref.shared_experts(x, p.shared_fc1_weight, p.shared_fc2_weight, gate_weight=p.shared_gate_weight)
    assert_close(torch.cat(out.shared), shared)
    up = moe_ref.latent_projection(torch.cat(out.combined), p.latent_up)
    assert_close(torch.cat(out.output), up + shared)


def test_all_dispatchers_give_the_same_output_and_each_rank_its_own_tokens():
    p, x = parameters(), random(10, HIDDEN, seed=10)
    outputs = [run(x, TOKENS, p, config(dispatcher)).output for dispatcher in DISPATCHERS]
    assert all([len(part) for part in output] == list(TOKENS) for output in outputs)
    for output in outputs[1:]:
        assert_close(torch.cat(output), torch.cat(outputs[0]))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_tokens_over_the_capacity_are_dropped_and_padding_adds_nothing(dispatcher):
    p, x = parameters(shared=False), random(10, HIDDEN, seed=10)
    how = config(dispatcher, topk=1, capacity_factor=0.4, pad_to_capacity=True)
    out = run(x, (10,), p, how)
    kept = out.routed[0].routing_map & (out.routed[0].probs != 0)
    assert out.dispatched[0].tokens_per_expert.tolist() == [1] * EXPERTS and 0 < kept.sum() <= EXPERTS
    idle = ~kept.any(1)
    assert idle.any() and not out.output[0][idle].any()
    chosen = moe_ref.topk_routing(out.logits[0], topk=1, score_function="sigmoid").probs
    scale = chosen.sum(1)[~idle]
    assert_close(out.output[0][~idle], dense(x, p, topk=1)[~idle] * scale[:, None])


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_padding_changes_nothing_of_other_tokens_and_has_the_shared_output(dispatcher):
    p, x = parameters(), random(10, HIDDEN, seed=10)
    how = config(dispatcher, expert_bias=True, aux_loss_coeff=0.5, z_loss_coeff=0.5)
    mask = torch.arange(10) % 3 == 1
    out = run(x, (10,), p, how, padding_mask=[mask])
    alone = run(x[~mask], (7,), p, how)
    assert_close(out.output[0][~mask], alone.output[0])
    assert_close(out.output[0][mask], out.shared[0][mask])
    assert torch.equal(out.dispatched[0].tokens_per_expert, alone.dispatched[0].tokens_per_expert)
    assert torch.equal(out.routed[0].state.tokens_per_expert, alone.routed[0].state.tokens_per_expert)
    for name in ("aux_loss", "z_loss"):
        assert_close(getattr(out.routed[0].losses, name), getattr(alone.routed[0].losses, name))
    shares = run(x, TOKENS, p, how, padding_mask=mask.split(TOKENS))
    assert_close(torch.cat(shares.output), out.output[0])


def test_a_mask_of_other_tokens_or_ranks_is_refused():
    for mask in ([torch.zeros(3, dtype=torch.bool)], [torch.zeros(4, dtype=torch.bool)] * 2):
        with pytest.raises(ValueError, match="padding_mask is"):
            run(random(4, HIDDEN), (4,), parameters(), config(), padding_mask=mask)


def test_the_global_loss_counts_the_tokens_of_all_ranks_and_evaluation_leaves_no_trace():
    p, x = parameters(), random(10, HIDDEN, seed=10)
    how = config(global_aux_loss_coeff=0.5, expert_bias=True)
    alone, shares = (run(x, counts, p, how).routed for counts in ((10,), (5, 5)))
    losses = [out.losses.global_aux_loss for out in shares]
    assert_close(sum(losses), alone[0].losses.global_aux_loss)
    assert shares[0].state.global_tokens_per_expert.sum() == 20
    with torch.no_grad():
        quiet = run(x, (5, 5), p, how).routed
    for out in (*quiet, *run(x, (5, 5), p, how, training=False).routed):
        assert out.losses.global_aux_loss is None and not out.state.tokens_per_expert.any()


def test_a_recipe_quantises_the_experts_products_and_nothing_else():
    p, x = parameters(latent=False, shared=False), random(10, HIDDEN, seed=10)
    fine, coarse = config(), LayerConfig(router=config().router, recipe=Recipe("current"), align=16)
    right, low = (run(x, (7, 3), p, how) for how in (fine, coarse))
    assert torch.equal(torch.cat(right.logits), torch.cat(low.logits))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(right.dispatched, low.dispatched, strict=True))
    ratio = (torch.cat(low.output) - torch.cat(right.output)).norm() / torch.cat(right.output).norm()
    assert 1e-4 < ratio < 0.2


def test_the_router_alone_sees_the_jitter_whose_noise_is_given_or_drawn():
    p, x = parameters(latent=False, shared=False), random(10, HIDDEN, seed=10)
    how = LayerConfig(router=config().router, jitter_eps=0.25)
    torch.manual_seed(3)
    drawn = run(x, (10,), p, how)
    torch.manual_seed(3)
    noise = torch.rand_like(x)
    given = run(x, (10,), p, how, noise=[noise])
    assert_close(given.logits[0], drawn.logits[0])
    assert_close(given.logits[0], moe_ref.gate(x * (0.75 + 0.5 * noise), p.router_weight, bias=p.router_bias))
    routing_map = given.routed[0].routing_map
    assert torch.equal(given.dispatched[0].rows, moe_ref.permute(x, routing_map).rows)
    with pytest.raises(ValueError, match="noise is of shape"):
        run(x, (10,), p, config(), noise=[noise])
    with pytest.raises(ValueError, match="noise is of shape"):
        run(x, (10,), p, how, noise=[noise[1:]])


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
    how = layer_config(MoEConfig(**MEGATRON, **recipe, **options))
    assert how.align == 32
    router, *both = (random(*shape, seed=len(shape)) for shape in ((EXPERTS, 32), *((EXPERTS, 32, 32),) * 2))
    weights = LayerParameters(router, *both)
    out = run(random(3, 32), (3,), weights, how)
    assert int(out.dispatched[0].tokens_per_expert.sum()) == len(out.dispatched[0].rows) == 3 * how.router.topk
    with pytest.raises(ValueError, match="multiples of 32"):
        run(random(3, 32), (3,), weights, replace(how, align=None))


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
