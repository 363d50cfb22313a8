"""`MoELayer.from_config`: each of Megatron's options is used, refused by name, or the trainer's."""

from dataclasses import fields

import pytest
import torch
from torch.testing import assert_close

import moe_ref
from moe_fast import MoELayer
from moe_fast.layer.configured import OF_THE_TRAINER, arguments_of
from moe_ref.config import MoEConfig, rank_budget
from tests.common.fast import interpreted, normal

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::UserWarning")]
HIDDEN, WIDTH, EXPERTS, TOKENS = 8, 6, 4, 5
BUDGET = {
    "moe_expert_rank_capacity_factor": 1.5, "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep", "use_transformer_engine_op_fuser": True,
}  # fmt: skip
PLAIN = {
    "hidden_size": HIDDEN, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "add_bias_linear": False,
    "activation_func": "silu", "gated_linear_unit": True, "moe_grouped_gemm": True,
}  # fmt: skip


class Recorder:
    """A configuration that notes which options are read."""

    def __init__(self, config: MoEConfig) -> None:
        self.config, self.names = config, set()

    def __getattr__(self, name: str):
        self.names.add(name)
        return getattr(self.config, name)


def test_every_option_is_read_or_the_trainers():
    recorder = Recorder(MoEConfig(**PLAIN, **BUDGET, recompute_granularity="selective"))
    arguments_of(recorder, TOKENS)
    by_group = {"expert_model_parallel_size", "expert_tensor_parallel_size"}  # of `check_world`
    only_with_another = {"fp8_recipe", "fp4_recipe", "mtp_num_layers"}  # of which these are details
    unread = {field.name for field in fields(MoEConfig)} - recorder.names - by_group - only_with_another
    assert unread - {*MoEConfig.deprecated} == OF_THE_TRAINER - recorder.names
    assert not OF_THE_TRAINER & recorder.names


def test_options_reach_the_module():
    options = {
        "moe_latent_size": 4, "moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True,
        "recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act"),
        "moe_single_grouped_weight": True, "params_dtype": "bf16",
    }  # fmt: skip
    layer = MoELayer.from_config(MoEConfig(**PLAIN | options | BUDGET), num_tokens=TOKENS)
    shapes = {name: (*x.shape,) for name, x in layer.named_parameters()}
    assert shapes == {
        "router.weight": (EXPERTS, HIDDEN),
        "experts.linear_fc1.weight": (EXPERTS, 2 * WIDTH, 4),
        "experts.linear_fc2.weight": (EXPERTS, 4, WIDTH),
        "fc1_latent_proj.weight": (4, HIDDEN),
        "fc2_latent_proj.weight": (HIDDEN, 4),
        "shared_experts.linear_fc1.weight": (20, HIDDEN),
        "shared_experts.linear_fc2.weight": (HIDDEN, 10),
        "shared_experts.gate_weight": (1, HIDDEN),
    }
    assert layer.recompute == "moe_act" and layer.router.weight.dtype == torch.bfloat16
    assert layer.config.num_rows == rank_budget(TOKENS, topk=2, capacity_factor=1.5, align=256)
    whole = MoEConfig(**PLAIN, recompute_granularity="selective", recompute_modules=("moe",))
    assert MoELayer.from_config(whole).recompute == "moe"
    beside = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "bf16": True}
    travelling = {"moe_token_dispatcher_type": "alltoall", "delay_wgrad_compute": True}
    assert arguments_of(MoEConfig(**PLAIN, **beside, **travelling), None)["delay_wgrad"]


def test_with_biases_the_router_has_one_and_the_layer_is_the_references():
    torch.manual_seed(0)
    layer = MoELayer.from_config(MoEConfig(**PLAIN | {"add_bias_linear": True}), init_std=0.5)
    for name, x in layer.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    assert {"router.bias", "experts.linear_fc1.bias0"} <= {*layer.state_dict()}
    x = normal(TOKENS, HIDDEN).requires_grad_()
    expected = moe_ref.moe_layer([x], [layer.layer_parameters], layer.config, states=[layer.router.state])
    wanted = (x, layer.router.bias, layer.router.weight)
    expected_gradients = torch.autograd.grad(expected.output[0].sum(), wanted)
    output = layer(x)
    assert_close(output, expected.output[0])
    for gradient, expected_gradient in zip(torch.autograd.grad(output.sum(), wanted), expected_gradients, strict=True):
        assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is True; it must be False: MoELayer does not"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be positive"),
        (BUDGET, "num_tokens is None; it must be the most tokens of a rank"),
        ({"expert_model_parallel_size": 2}, "group is of 1 ranks; it must be of 2 ranks, expert_model_parallel_size ×"),
        ({"recompute_granularity": "selective", "recompute_modules": ("shared_experts",),
          "moe_shared_expert_intermediate_size": 8}, "recompute_modules is .*shared_experts"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_the_layer_lacks_is_refused_by_name(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoELayer.from_config(MoEConfig(**PLAIN | options))
