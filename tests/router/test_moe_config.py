"""`MoEConfig` refuses what it should, for the reason it should, and nothing next to it."""

import inspect
import re
import warnings
from dataclasses import MISSING, fields, replace
from typing import get_args

import pytest

from moe_ref.config import DROP_POLICIES, SCORE_FUNCTIONS, MoEConfig
from moe_ref.config.megatron.refused import REFUSED
from moe_ref.config.megatron.rule import fits, kinds_of
from tests.router.moe_config_helpers import RULES, config, refusing_rule
from tests.router.moe_config_values import CASES, OPTIONS, SIZES, WRONG_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def case_id(case):
    return f"{case[0]}-{'-'.join(name for name in case[1] if name != case[0])}"


@pytest.mark.parametrize(("option", "refused", "change"), CASES + SIZES, ids=[case_id(case) for case in CASES + SIZES])
def test_a_refusal_names_the_option_and_all_it_depends_on(monkeypatch, option, refused, change):
    rule, unchecked = refusing_rule(monkeypatch, refused)
    with pytest.raises(ValueError, match="; it must be ") as raised:
        config(**refused)
    assert rule.option == option
    assert str(raised.value).startswith(f"{option} is {getattr(unchecked, option)!r}")
    assert all(f" {name} {getattr(unchecked, name)!r}" in str(raised.value) for name in rule.depends.split())
    assert not re.search(r"[{}]", str(raised.value).partition("; it must be ")[2])


@pytest.mark.parametrize(("option", "refused", "change"), CASES + SIZES, ids=[case_id(case) for case in CASES + SIZES])
def test_the_neighbour_of_a_refused_config_is_accepted(option, refused, change):
    assert config(**{**refused, **change})


def test_every_rule_refuses_some_case(monkeypatch):
    refusing = {id(refusing_rule(monkeypatch, refused)[0]) for _, refused, _ in CASES + SIZES}
    assert [rule[:3] for rule in RULES if id(rule) not in refusing] == []


def test_a_rule_depends_on_no_option_that_it_does_not_name_or_that_does_not_exist():
    names = {field.name for field in fields(MoEConfig)}
    assert [(rule.option, rule.depends) for rule in RULES if not {rule.option, *rule.depends.split()} <= names] == []


@pytest.mark.parametrize(("option", "value"), WRONG_KINDS, ids=str)
def test_a_value_of_the_wrong_kind_is_refused(option, value):
    with pytest.raises(ValueError, match=f"^{option} is .*; it must be .+"):
        config(**{option: value})


def test_every_option_has_a_default_that_fits_its_kind():
    default = MoEConfig()
    assert all(
        field.default is not MISSING and fits(getattr(default, field.name), kinds_of(MoEConfig)[field.name])
        for field in fields(MoEConfig)
    )


def test_every_option_of_megatrons_table_is_a_field():
    assert OPTIONS - {field.name for field in fields(MoEConfig)} == set()


def test_the_words_are_those_of_the_router():
    assert get_args(kinds_of(MoEConfig)["moe_router_score_function"]) == SCORE_FUNCTIONS
    assert get_args(kinds_of(MoEConfig)["moe_token_drop_policy"]) == DROP_POLICIES


# Deprecated names, derived values, warnings


DEPRECATED = [
    ({"moe_router_topk_limited_devices": 2, "expert_model_parallel_size": 4},
     {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
     {"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    ({"moe_router_padding_for_fp8": True, "fp8": "hybrid", "moe_token_dispatcher_type": "alltoall"},
     {"moe_router_padding_for_quantization": True}, {"moe_router_padding_for_quantization": True}),
    ({"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}, {"moe_flex_dispatcher_backend": "deepep"},
     {"moe_flex_dispatcher_backend": "hybridep"}),
    ({"moe_deepep_num_sms": 24}, {"moe_flex_dispatcher_num_sms": 24}, {"moe_flex_dispatcher_num_sms": 20}),
    ({"moe_hybridep_num_sms": 16}, {"moe_flex_dispatcher_num_sms": 16}, {"moe_flex_dispatcher_num_sms": 16}),
    ({"moe_layer_recompute": True}, {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")},
     {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "replacement"), DEPRECATED, ids=[next(iter(old)) for old, _, _ in DEPRECATED])
def test_a_deprecated_name_becomes_the_new_one(old, new, replacement):
    name = next(iter(old))
    with pytest.warns(DeprecationWarning, match=f"^{name} is deprecated; say {next(iter(new))}="):
        built = config(**old)
    assert built == config(**{key: value for key, value in old.items() if key != name}, **new)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert replace(built) == built


@pytest.mark.parametrize(("old", "new", "replacement"), DEPRECATED, ids=[next(iter(old)) for old, _, _ in DEPRECATED])
def test_a_deprecated_name_beside_the_new_one_is_refused(old, new, replacement):
    name = next(iter(old))
    with pytest.raises(
        ValueError, match=f"^{name} is {old[name]} with .*; it must be left out: it is the deprecated name of "
    ):
        config(**old, **replacement)


def test_every_deprecated_name_is_tried():
    assert {next(iter(old)) for old, _, _ in DEPRECATED} == set(MoEConfig.deprecated)


def test_deepep_by_its_deprecated_name_needs_the_flex_dispatcher():
    with pytest.raises(
        ValueError,
        match="moe_enable_deepep is True with moe_token_dispatcher_type 'alltoall'; "
        "it must be False, or the dispatcher 'flex'",
    ):
        config(moe_enable_deepep=True, moe_token_dispatcher_type="alltoall")


@pytest.mark.parametrize(("options", "derived"), [
    ({"hidden_size": 16, "ffn_hidden_size": None, "moe_ffn_hidden_size": None},
     {"ffn_hidden_size": 64, "moe_ffn_hidden_size": 64}),
    ({"moe_ffn_hidden_size": None, "ffn_hidden_size": 48}, {"moe_ffn_hidden_size": 48}),
    ({"num_moe_experts": None, "moe_layer_freq": 2}, {"moe_ffn_hidden_size": None}),
    ({"num_moe_experts": None, "moe_layer_freq": [1, 0]}, {"moe_ffn_hidden_size": None, "moe_layer_freq": (1, 0)}),
    ({"tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}),
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 1}),
    ({}, {"recompute_modules": ("core_attn",)}),
    ({"use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True, "activation_func": "silu",
     "gated_linear_unit": True}, {"moe_use_grouped_tensor": True}),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_preprocess"]},
     {"cuda_graph_modules": ("moe_preprocess", "moe_router")}),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
     {"cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")}),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]},
     {"cuda_graph_modules": ("moe_router",)}),
])  # fmt: skip
def test_what_follows_from_other_options_is_filled_in(options, derived):
    built = config(**options)
    assert {name: getattr(built, name) for name in derived} == derived


@pytest.mark.parametrize(("changes", "message"), [
    ({"moe_ffn_hidden_size": None}, "moe_ffn_hidden_size is None; ffn_hidden_size, 32, is taken"),
    ({"num_moe_experts": None, "moe_layer_freq": 2}, "moe_ffn_hidden_size is 32 without num_moe_experts"),
    ({"num_moe_experts": 32}, "moe_router_dtype is None with num_moe_experts 32"),
    ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
     "sequence_parallel is False with tensor_model_parallel_size 2"),
    ({"moe_mlp_glu_interleave_size": 16, "moe_grouped_gemm": True, "activation_func": "silu",
     "gated_linear_unit": True}, "moe_mlp_glu_interleave_size is 16 without use_transformer_engine_op_fuser"),
])  # fmt: skip
def test_what_is_legal_but_seldom_meant_warns_at_the_callers_line(changes, message):
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}") as caught:
        config(**changes)
    assert {warning.filename for warning in caught} == {inspect.getfile(config)}


def test_a_plain_config_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(num_moe_experts=31)
        config(num_moe_experts=32, moe_router_dtype="fp32")
        MoEConfig()


def test_a_config_is_frozen_and_can_be_a_key():
    built = config(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2],
        recompute_modules=["moe"],
    )
    with pytest.raises(AttributeError):
        built.moe_router_topk = 4
    assert {built: 1}[replace(built)] == 1


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_without_an_implementation_is_refused_by_its_name(option):
    with pytest.raises(ValueError, match=f"^{option} is True; it must be left out: {re.escape(REFUSED[option])}"):
        MoEConfig(**{option: True})
    assert option not in {field.name for field in fields(MoEConfig)}
