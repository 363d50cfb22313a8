"""`MoELayer.from_config` with the `TransformerConfig` of the installed megatron-core."""

from dataclasses import fields

import pytest
import torch
from torch.nn import functional as F

from moe_fast import MoELayer
from moe_fast.layer.megatron import OF_THE_TRAINER, ONLY_DEFAULT, USED
from moe_ref.config import MoEConfig
from tests.common.fast import interpreted

transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")
TransformerConfig = transformer_config.TransformerConfig
pytestmark = [interpreted, pytest.mark.filterwarnings("ignore")]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 8}
PLAIN = SIZES | {"add_bias_linear": False, "activation_func": F.silu, "gated_linear_unit": True}


def test_every_option_is_used_refused_or_the_trainers():
    theirs = {field.name for field in fields(TransformerConfig)}
    ours = {field.name for field in fields(MoEConfig)}
    kinds = [ours & theirs, {*USED}, {*OF_THE_TRAINER}, {*ONLY_DEFAULT} - ours]
    assert theirs <= set().union(*kinds)
    assert theirs >= OF_THE_TRAINER | USED
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "an option of two kinds"


def test_the_layer_is_that_of_the_same_options():
    options = {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 12, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    }  # fmt: skip
    layer = MoELayer.from_config(TransformerConfig(**PLAIN | options, params_dtype=torch.bfloat16, bf16=True))
    written = {name: x for name, x in PLAIN.items() if name != "num_attention_heads"}
    written |= {"activation_func": "silu", "params_dtype": "bf16", "bf16": True}
    expected = MoELayer.from_config(MoEConfig(**written | options))
    assert layer.config == expected.config
    assert {name: (x.shape, x.dtype) for name, x in layer.state_dict().items()} == {
        name: (x.shape, x.dtype) for name, x in expected.state_dict().items()
    }


def test_initial_weights_and_delayed_scaling_have_the_options_that_moe_config_lacks():
    scaling = {"fp8": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    config = TransformerConfig(**PLAIN, init_method_std=0.5, moe_grouped_gemm=True)
    for name, value in scaling.items():
        setattr(config, name, value)  # its constructor asks for Transformer Engine
    layer = MoELayer.from_config(config)
    recipe = layer.config.recipe
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (1, 16, "max")
    assert layer.experts.scaled[0].state.input.amax_history.shape[1] == 16
    assert 0.4 < float(layer.experts.linear_fc1.weight.std()) < 0.6
    assert float(MoELayer.from_config(TransformerConfig(**PLAIN), init_std=0.0).router.weight.abs().max()) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"moe_router_force_load_balancing": True},
            "moe_router_force_load_balancing is True; it must be False: logits",
        ),
        ({"fp8_interval": 2}, "fp8_interval is 2; it must be 1: scales are updated each step"),
        ({"deterministic_mode": True}, "deterministic_mode is True; it must be False: no function has such a mode"),
        ({"activation_func": F.mish}, "activation_func is 'mish'"),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is True; it must be False: MoELayer does not"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_layer_lacks_is_refused_by_name(options, sentence):
    config = TransformerConfig(**PLAIN)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=sentence):
        MoELayer.from_config(config)


def test_an_option_of_a_later_release_is_refused_unless_it_has_its_default():
    import dataclasses

    later = dataclasses.make_dataclass(
        "LaterConfig", [("moe_router_temperature", float, dataclasses.field(default=1.0))], bases=(TransformerConfig,)
    )
    assert MoELayer.from_config(later(**PLAIN)).config.router.num_experts == 4
    with pytest.raises(ValueError, match=r"moe_router_temperature is 0.5; it must be 1.0: MoELayer does not know this"):
        MoELayer.from_config(later(**PLAIN, moe_router_temperature=0.5))
