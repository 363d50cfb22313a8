"""What megatron-core does unexpectedly: state of the router, groups, dtypes, masks."""

import inspect
from dataclasses import fields

import pytest
import torch

try:
    from evidence.megatron_claims.router import moe_utils, settings, top_k_router
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from megatron.core.fusions.fused_bias_swiglu import WeightedSwiGLUFunction
from megatron.core.transformer import transformer_config
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import router as router_module

from evidence.megatron_claims.common import BALANCED_BY_BIAS, inf, nan, rows_of

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


@torch.no_grad()
def test_jitter_is_active_in_evaluation_without_gradients():
    router = top_k_router(moe_input_jitter_eps=0.1).eval()
    x = torch.ones(64, 1, 8)
    jittered = router.apply_input_jitter(x)
    assert not torch.equal(jittered, x)
    assert (jittered - x).abs().max() <= 0.1 + 1e-6
    assert not torch.equal(router(x)[0], router(x)[0])


def test_jitter_keeps_the_dtype_of_its_first_call():
    router = top_k_router(moe_input_jitter_eps=0.1)
    half, single = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 8)
    assert router.apply_input_jitter(half).dtype == torch.bfloat16
    assert router.apply_input_jitter(single).dtype == torch.float32
    float32_first = top_k_router(moe_input_jitter_eps=0.1)
    assert float32_first.apply_input_jitter(single).dtype == torch.float32
    assert float32_first.apply_input_jitter(half).dtype == torch.float32


# Groups


def test_more_groups_than_choices_makes_the_groups_arbitrary():
    settings(
        num_moe_experts=8,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    )
    logits = 5 * torch.eye(8)  # token t wants expert t
    _, routing_map = moe_utils.topk_routing_with_score_function(
        logits, 1, use_pre_softmax=True, num_groups=4, group_topk=2
    )
    missed = [t for t in range(8) if not routing_map[t, t]]
    assert missed == [0, 1, 2, 3]  # a group scores its 1 // 2 = 0 best experts, so all are equal


def test_more_choices_from_a_group_than_it_has_experts_raises():
    settings(num_moe_experts=8, moe_router_topk=6, moe_router_num_groups=4, moe_router_group_topk=1)
    with pytest.raises(RuntimeError, match="k out of range"):
        moe_utils.topk_routing_with_score_function(torch.randn(1, 8), 6, num_groups=4, group_topk=1)


@pytest.mark.parametrize(
    ("score", "weights"),
    [
        ({"score_function": "sigmoid"}, lambda x: [nan, 0, 0]),
        ({"score_function": "sigmoid", "expert_bias": torch.zeros(8)}, lambda x: x.sigmoid() / x.sigmoid().sum()),
        ({}, lambda x: [0, *x[1:].softmax(0)]),
        ({"use_pre_softmax": True}, lambda x: [-inf, *torch.arange(8.0).softmax(0)[6:]]),
    ],
    ids=["sigmoid", "sigmoid with bias", "softmax", "softmax first"],
)
def test_too_few_experts_in_the_kept_groups_route_to_an_expert_of_another_group(score, weights):
    settings(num_moe_experts=8, moe_router_topk=3, moe_router_num_groups=8, moe_router_group_topk=2)
    logits = torch.arange(8.0)[None]
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, 3, num_groups=8, group_topk=2, **score)
    third, *best = sorted(rows_of(routing_map[0]))
    assert best == [6, 7] and third < 5  # ties decide which; it is not expert 5, the third best
    chosen = [third, 6, 7]
    assert torch.allclose(
        probs[0, chosen], torch.tensor([float(w) for w in weights(logits[0, chosen])]), equal_nan=True
    )  # why: float32 in another order; the claim is about tens of per cent


# Configuration, and what 0.16.1 does not have


def test_the_graph_guard_knows_the_old_name_of_map_padding_only(monkeypatch):
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda version: True)
    captured = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["moe_router", "moe_preprocess"],
        "moe_token_dispatcher_type": "alltoall",
    }
    with pytest.raises(AssertionError, match="moe_preprocess cuda graph is not supported"):
        settings(**captured, **BF16, fp8="e4m3", moe_router_padding_for_fp8=True)
    assert settings(
        **captured, **BF16, fp8="e4m3", moe_router_padding_for_quantization=True
    ).moe_router_padding_for_quantization


def test_repeated_mtp_layers_do_not_exist_and_no_loss_is_divided_for_them():
    assert not [field.name for field in fields(settings()) if "repeated" in field.name]
    assert "is_mtp" not in str(inspect.signature(router_module.TopKRouter.__init__))
    grads = []
    for layers in (None, 2):
        router = top_k_router(
            moe_aux_loss_coeff=0.1,
            moe_router_load_balancing_type="aux_loss",
            moe_z_loss_coeff=0.1,
            mtp_num_layers=layers,
        )
        torch.manual_seed(1)
        router(torch.randn(6, 1, 8))[0].sum().backward()
        grads.append(router.weight.grad)
    assert torch.equal(*grads) and grads[0].any()


def test_there_is_no_inference_router():
    assert not [name for name in dir(router_module) if "Inference" in name]


def test_an_unknown_load_balancing_name_is_plain_top_k():
    x = torch.randn(6, 1, 8)
    unbalanced = top_k_router(moe_router_load_balancing_type="none")(x)
    for name in ("quantile_balancing", "no such thing"):
        probs, routing_map = top_k_router(moe_router_load_balancing_type=name)(x)
        assert torch.equal(probs, unbalanced[0]) and torch.equal(routing_map, unbalanced[1])


# The fp8 store of SwiGLU's input


@pytest.mark.parametrize(("gate", "stored"), [(400.0, 384.0), (500.0, 448.0), (inf, 448.0)])
def test_the_fp8_store_of_an_activation_saturates_silently(gate, stored):
    hidden = torch.tensor([[gate, 1.0]], requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        WeightedSwiGLUFunction.apply(hidden, torch.ones(1, 1), True).sum().backward()
    # not silu(gate)
    assert hidden.grad[0, 1] == torch.tensor(stored) * torch.tensor(stored).sigmoid()


# Counters below float32


def test_counters_become_bfloat16_with_the_model_and_the_bias_does_not():
    chosen = {
        **BALANCED_BY_BIAS,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        **BF16,
    }
    router = top_k_router(**chosen)
    Float16Module(router.config, router)
    assert {buffer.dtype for buffer in router.buffers()} == {torch.bfloat16}
    router(torch.randn(1, 1, 8, dtype=torch.bfloat16))
    assert {name: buffer.dtype for name, buffer in router.named_buffers()} == {
        "expert_bias": torch.float32,
        "local_tokens_per_expert": torch.bfloat16,
        "global_tokens_per_expert": torch.bfloat16,
        "ga_steps": torch.bfloat16,
    }


def test_a_bfloat16_counter_rounds_1001_tokens_to_1000():
    router = top_k_router(**BALANCED_BY_BIAS, **BF16)
    Float16Module(router.config, router)
    router.expert_bias.data = torch.tensor([9.0, 9, 0, 0])  # everything goes to experts 0 and 1
    router(torch.randn(1001, 1, 8, dtype=torch.bfloat16))
    assert router.local_tokens_per_expert.tolist() == [1000, 1000, 0, 0]


def test_bfloat16_counters_stop_at_256_under_steps_of_one():
    chosen = {
        **BALANCED_BY_BIAS,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        **BF16,
    }
    router = top_k_router(**chosen)
    Float16Module(router.config, router)
    router.expert_bias.data = torch.tensor([9.0, 9, 0, 0])
    for _ in range(300):
        router(torch.ones(1, 1, 8, dtype=torch.bfloat16))
    assert router.local_tokens_per_expert.tolist() == [256, 256, 0, 0]
    assert router.ga_steps == 256


# Padding masks


def test_the_balancing_loss_takes_a_mask_of_the_opposite_sense():
    scores = torch.tensor([[1.0, 0.0], [10.0, 0.0]])
    loss = moe_utils.switch_load_balancing_loss_func(
        scores, torch.ones(2), 1, 1, 2, 1.0, padding_mask=torch.tensor([True, False])
    )
    assert loss == 2 * 1.0  # row 0, marked True, is the one that counts; E / (K · N²) is 2
    _, aux_scores = moe_utils.compute_routing_scores_for_aux_loss(
        scores, 1, "softmax", padding_mask=torch.tensor([True, False])
    )
    assert not aux_scores[0].any() and aux_scores[1].any()
