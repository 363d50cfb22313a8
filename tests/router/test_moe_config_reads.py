"""Which options the router and the stages read; any config; the installed megatron-core."""

import re
import warnings
from dataclasses import MISSING, fields, replace
from typing import get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.config import MoEConfig, RouterConfig, layer_config, router_config
from moe_ref.config.megatron.rule import kinds_of
from moe_ref.config.megatron.stages import GIVEN_BY_THE_CALL, SAME_RESULT
from moe_ref.router.selection import topk_indices
from tests.router.moe_config_cases import BASE, TENSOR
from tests.router.moe_config_helpers import config, is_accepted, refusing_rule
from tests.router.moe_config_values import CASES, ELSEWHERE, SIZES


@pytest.mark.parametrize(("kinds", "coeffs", "expected"), [
    ("aux_loss", 0.0, {}),
    ("aux_loss", 0.5, {"aux_loss": 0.5}),
    ("none", 0.5, {}),
    ("sinkhorn", 0, {}),
    (["seq_aux_loss"], [1], {"seq_aux_loss": 1}),
    (["seq_aux_loss", "none", "global_aux_loss", "aux_loss"], [0.1, 3.0, 0.2, 0.0],
     {"seq_aux_loss": 0.1, "global_aux_loss": 0.2}),
    ([], [], {}),
])  # fmt: skip
def test_balancing_coeffs_are_of_the_losses_that_count(kinds, coeffs, expected):
    router = router_config(config(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coeffs))
    assert router.balancing_coeffs == expected
    assert router.sinkhorn == (kinds == "sinkhorn")


def test_the_router_has_the_settings_of_its_configuration():
    router = router_config(
        config(
            moe_router_topk=4,
            moe_router_score_function="sigmoid",
            moe_router_pre_softmax=True,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_topk_scaling_factor=2.5,
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.25,
            moe_expert_capacity_factor=1.5,
            moe_pad_expert_input_to_capacity=True,
            moe_token_drop_policy="position",
            moe_z_loss_coeff=0.125,
            calculate_per_token_loss=True,
            moe_token_dispatcher_type="alltoall",
        )
    )
    assert router == RouterConfig(
        num_experts=8,
        topk=4,
        score_function="sigmoid",
        pre_softmax=True,
        num_groups=4,
        group_topk=2,
        scaling_factor=2.5,
        expert_bias=True,
        bias_update_rate=0.25,
        capacity_factor=1.5,
        drop_policy="position",
        pad_to_capacity=True,
        z_loss_coeff=0.125,
        loss_per_token=True,
    )
    assert topk_indices(torch.arange(16.0).view(2, 8), **router.selection).indices.shape == (2, 4)


def test_a_configuration_without_experts_has_no_router():
    with pytest.raises(ValueError, match="num_moe_experts is None; it must be given"):
        router_config(MoEConfig())


@pytest.mark.parametrize(("repeated", "depth", "times"), [(False, 3, 1), (True, 3, 3), (True, None, 1), (True, 0, 1)])
def test_only_a_repeated_layer_calls_its_router_more_than_once(repeated, depth, times):
    assert router_config(config(mtp_use_repeated_layer=repeated, mtp_num_layers=depth)).loss_divisor == times


# What the stages read


class Recorder:
    """A configuration that notes which of its options are read."""

    def __init__(self, config: MoEConfig, read: set[str]) -> None:
        self.made, self.read = config, read

    def __getattr__(self, name: str):
        self.read.add(name)
        return getattr(self.made, name)


def test_every_option_is_read_or_given_by_the_call_or_without_effect_on_results():
    read: set[str] = set()
    for options in (
        {},
        {"fp8": "e4m3"},
        {"fp4": "e2m1"},
        {"moe_token_dispatcher_type": "flex", **TENSOR},
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
        {"gated_linear_unit": True, "mtp_use_repeated_layer": True},
    ):
        layer_config(Recorder(config(**options), read))
    kinds = [read, GIVEN_BY_THE_CALL, SAME_RESULT, set(MoEConfig.deprecated)]
    assert set().union(*kinds) == {field.name for field in fields(MoEConfig)}
    assert sum(map(len, kinds)) == len(fields(MoEConfig))


def test_a_layer_has_the_jitter():
    assert layer_config(config(moe_input_jitter_eps=0.5)).jitter_eps == 0.5
    with pytest.raises(ValueError, match=r"eps is 1\.5"):
        layer_config(config(moe_input_jitter_eps=1.5))


# Any config


def values(name):
    """Values that options of the kind have, some wrong."""
    kind = kinds_of(MoEConfig)[name]
    words = [
        word
        for kind_part in (kind, *get_args(kind))
        if get_origin(kind_part) is not None
        for word in get_args(kind_part)
        if isinstance(word, str)
    ]
    words += [word for kind_part in get_args(kind) for inner in get_args(kind_part) for word in get_args(inner)]
    by_type = {bool: st.booleans(), int: st.integers(-1, 9), float: st.floats(-1, 3) | st.integers(0, 2)}
    typed = [by_type[kind_part] for kind_part in (kind, *get_args(kind)) if kind_part in by_type] + (
        [st.none()] if type(None) in get_args(kind) else []
    )
    listed = (
        [st.lists(st.sampled_from(words) if words else st.integers(0, 1) | st.floats(0, 1), max_size=3)]
        if "Sequence" in str(kind)
        else []
    )
    odd = st.sampled_from([None, True, -1, 0, 0.0, float("nan"), "x", (), [None], 10**400, object(), torch.ones(2), {}])
    usual = st.one_of(*typed, *listed, *([st.sampled_from(words)] if words else []))
    return st.integers(0, 30).flatmap(lambda dice: odd if dice == 0 else usual)


@settings(deadline=None, database=None, max_examples=100)
@given(st.data())
def test_a_config_is_made_or_refused_by_a_value_error(data):
    names = data.draw(st.lists(st.sampled_from([field.name for field in fields(MoEConfig)]), unique=True, max_size=12))
    changes = {name: data.draw(values(name), label=name) for name in names}
    try:
        built = config(**changes)
    except ValueError as refusal:
        assert re.match(r"\w+ is .*; it must be ", str(refusal), re.DOTALL)
        assert str(refusal).split(" ")[0] in {field.name for field in fields(MoEConfig)}
    else:
        assert replace(built) == built
        assert hash(built) == hash(replace(built))
        assert built.num_moe_experts is None or router_config(built).num_experts == built.num_moe_experts


# The installed Megatron


DEFAULTS = {  # option: why the default is another one than in megatron-core 0.16.1
    "activation_func": "a word instead of a function",
    "params_dtype": "a word instead of a dtype",
    "offload_modules": "a tuple instead of a list",
    "moe_deepep_num_sms": "deprecated since, None there too",
    "moe_hybridep_num_sms": "deprecated since, None there too",
}


WORDS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer import transformer_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformer_config, "is_te_min_version", lambda *version, **settings: True
        )  # versions are not a matter of settings
        yield transformer_config.TransformerConfig


def test_defaults_are_megatrons(megatron):
    theirs = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(megatron)
    }
    different = {
        field.name for field in fields(MoEConfig) if field.name in theirs and theirs[field.name] != field.default
    }
    assert different == set(DEFAULTS)


def theirs(cls, changes):
    """The same settings for Megatron, or None where it has no such option."""
    attention = {"num_attention_heads": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0, "normalization": "RMSNorm"}
    options = {"num_layers": 2, **attention, **BASE, **changes}
    fields_of_theirs = {field.name for field in fields(cls)}
    if "cuda_graph_modules" in options and "cuda_graph_modules" not in fields_of_theirs:
        options["cuda_graph_scope"] = options.pop("cuda_graph_modules")
        if options["cuda_graph_impl"] == "full_iteration":
            return None
    if options.get("pipeline_model_parallel_size", 1) > 1:
        options["pipeline_dtype"] = torch.bfloat16
    if "activation_func" in options:
        from megatron.core.activations import squared_relu
        from megatron.core.transformer.transformer_config import quick_gelu

        special = {"squared_relu": squared_relu, "quick_gelu": quick_gelu}
        name = options["activation_func"]
        options["activation_func"] = special[name] if name in special else getattr(torch.nn.functional, name)
    if "params_dtype" in options:
        options["params_dtype"] = WORDS[options["params_dtype"]]
    return (
        options if set(options) <= fields_of_theirs and "moe_permute_fusion" not in options else None
    )  # its kernels are not installed


def test_megatron_refuses_the_same(megatron, monkeypatch):
    """The installed Megatron has each rule whose options it has, except the listed ones."""
    different = set()
    for option, refused, change in CASES + SIZES:
        refused_options, neighbour = theirs(megatron, refused), theirs(megatron, {**refused, **change})
        rule = refusing_rule(monkeypatch, refused)[0]
        if (
            refused_options
            and rule.who in ("V", "A")
            and (is_accepted(megatron, refused_options) or (neighbour and not is_accepted(megatron, neighbour)))
        ):
            different.add((option, rule.depends))
    assert different == set(ELSEWHERE)
