"""The arguments of `MoELayer` that a configuration of transformers asks for."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_fast.layer.huggingface.families import FAMILIES, LACKING, Family
from moe_ref.config import LayerConfig, RouterConfig, require

# One option, which has another name in some configurations.
SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "routed_scaling_factor": ("route_scale", "router_scaling_factor", "moe_routed_scaling_factor"),
    "hidden_act": ("hidden_activation", "mlp_hidden_act"),
    "dtype": ("torch_dtype",),
}
GATED_KINDS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu_erf", "quick_gelu": "quick_geglu", "relu": "reglu"}
PLAIN_KINDS = {"silu": "silu", "gelu": "gelu", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "squared_relu"}
for _name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
    GATED_KINDS[_name], PLAIN_KINDS[_name] = "geglu", "gelu_tanh"
QUICK_SLOPE = 1.702  # the slope α of quick_geglu
# Options with a name like those of the layer which other parts of the model read: which layers have
# experts, the loss over all layers, the attention's choice of tokens. The last three are about how
# and where a sum is computed, and change no result.
_MODEL = """
output_router_logits router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux moe_layer_freq
first_k_dense_replace decoder_sparse_step mlp_only_layers moe_layers interleave_moe_layer_step
expert_layer_period expert_layer_offset moe_layer_start_index moe_layer_end_index moe_layer_interval
index_topk index_topk_blocks index_topk_freq index_topk_pattern index_topk_block_size num_kv_shared_layers
moe_shared_expert_overlap enable_moe_fp32_combine ep_size
"""
OF_THE_MODEL = frozenset(_MODEL.split())
OF_A_LAYER = re.compile("expert|moe|rout|top_?k|shared|swiglu|scor")  # in the name of an option
PRESETS = json.loads(Path(__file__).with_name("presets.json").read_text())


class Options:
    """The options of a configuration, in one spelling, and the names of those that were read.

    Raises:
        ValueError: two spellings of an option with different values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.fields = dict(config)
        for name, spellings in SPELLINGS.items():
            for spelling in set(spellings) & self.fields.keys():
                value = self.fields.pop(spelling)
                require(
                    self.fields.setdefault(name, value) == value, spelling, value, f"{self.fields[name]}, as {name}"
                )
        self.read = {"model_type"}

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.fields.get(name, default)

    def count(self, name: str) -> int:
        """A positive integer."""
        value = self.get(name)
        legal = isinstance(value, int) and not isinstance(value, bool) and value > 0
        require(legal, name, value, "a positive integer")
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        require(isinstance(value, int | float) and value > 0, name, value, "a positive number")
        return float(value)

    def one_of(self, name: str, values: tuple[Any, ...]) -> None:
        """The option has one of these values; it may be missing if None is one of them."""
        expected = f"{' or '.join(map(repr, values))}: the layer has no other"
        require(self.get(name) in values, name, repr(self.get(name)), expected)


def fields_of(source: Any) -> Mapping[str, Any]:
    """The options of the model's text, as a dict.

    Args:
        source: a configuration of transformers, its dict, the path of a `config.json` or of its
            folder, or the name of a preset.

    Raises:
        ValueError: no such file and no such preset.
    """
    if isinstance(source, str) and source in PRESETS:
        source = PRESETS[source]["config"]
    if isinstance(source, str | Path):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        expected = f"the path of a config.json, or one of {', '.join(PRESETS)}"
        require(path.is_file(), "config", repr(str(source)), expected)
        source = json.loads(path.read_text())
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else source.to_dict()
    for name in ("text_config", "thinker_config"):  # of models that read more than text
        if isinstance(fields.get(name), Mapping):
            return fields_of(fields[name])
    return fields


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family of a configuration.

    Raises:
        ValueError: a `model_type` that is unknown, or whose layer has a term that ours lacks.
    """
    name = fields.get("model_type")
    require(name not in LACKING, "model_type", repr(name), f"another: MoELayer lacks {LACKING.get(str(name))}")
    require(name in FAMILIES, "model_type", repr(name), f"one of {', '.join(FAMILIES)}")
    return FAMILIES[str(name)]


def arguments_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `MoELayer`, without the group and the device.

    Raises:
        ValueError: an option that the layer lacks, a missing one, or one that nothing reads.
    """
    family, options = family_of(fields), Options(fields)
    for name, values in family.legal.items():
        options.one_of(name, values)
    options.one_of("mlp_bias", (False, None))
    hashed = "hash_moe" in (options.get("mlp_layer_types") or ())
    require(not hashed, "mlp_layer_types", options.get("mlp_layer_types"), "without 'hash_moe': routers have no hashes")
    dtype = options.get("dtype")
    arguments = {
        "config": LayerConfig(
            router=_router(family, options),
            router_dtype=family.router_dtype,
            interleave=family.interleave,
            probs_on_input=family.probs_on_input,
            **_activation(family, options),
        ),
        "hidden": options.count("hidden_size"),
        "width": options.count(family.width),
        "latent": options.get("moe_latent_size") if family.latent else None,
        "shared_width": _shared_width(family, options),
        "shared_gate": family.shared_gate is not None,
        "bias": family.biases,
        "router_bias": family.biases,
        "dtype": getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype,
    }
    unread = {name: x for name, x in options.fields.items() if x and OF_A_LAYER.search(name)}
    for name in unread.keys() - options.read - OF_THE_MODEL - {*family.of_other_modules}:
        reason = f"left out: the layer of {options.fields['model_type']} does not read it"
        require(False, name, repr(unread[name]), reason)
    return arguments


def _router(family: Family, options: Options) -> RouterConfig:
    score = family.score if family.score in ("softmax", "sigmoid") else options.get(family.score)
    for name in {"scoring_func"} & options.fields.keys():
        options.one_of(name, (score,))
    normalised = options.get("norm_topk_prob") if family.normalised is None else family.normalised
    if family.normalised is True:
        options.one_of("norm_topk_prob", (True, None))
    if family.score == "expert_selection_fn":
        normalised = normalised or score == "softmax"  # the softmax of the chosen logits
    require(isinstance(normalised, bool), "norm_topk_prob", normalised, "True or False")
    experts, topk = options.count("num_experts"), options.count("num_experts_per_tok")
    single = score == "softmax" or normalised == (topk > 1)
    reason = "True with several experts a token and False with one: weights that are not softmax's have no other form"
    require(single, "norm_topk_prob", f"{normalised} with {topk} experts a token and {score}", reason)
    if family.score_bias is not None and "topk_method" in options.fields:
        options.one_of("topk_method", ("noaux_tc",))
    if family.score_bias is not None and "use_routing_bias" in options.fields:
        options.one_of("use_routing_bias", (True,))
    return RouterConfig(
        num_experts=experts,
        topk=topk,
        score_function=score,
        pre_softmax=score == "softmax" and not normalised,
        scaling_factor=options.number("routed_scaling_factor") if family.scale else None,
        expert_bias=family.score_bias is not None,
        **_groups(family, options, topk, judged_by_logits=score == "softmax" and bool(normalised)),
    )


def _groups(family: Family, options: Options, topk: int, *, judged_by_logits: bool) -> dict[str, Any]:
    """The groups of the choice. Every family sums the two best scores of a group, and our router
    the K // g best keys.
    """
    if not family.groups or options.get("n_group") in (None, 1):
        options.get("topk_group")
        return {}
    groups, chosen = options.count("n_group"), options.count("topk_group")
    require(not judged_by_logits, "n_group", groups, "1: groups of softmax with norm_topk_prob are judged by logits")
    expected = f"{topk / 2:g}, half of the {topk} experts a token: a group is judged by its two best"
    require(topk // chosen == 2, "topk_group", chosen, expected)
    return {"num_groups": groups, "group_topk": chosen}


def _activation(family: Family, options: Options) -> dict[str, Any]:
    """The activation of all experts, routed and shared."""
    name = options.get("hidden_act", "silu")
    kinds = GATED_KINDS if family.gated else PLAIN_KINDS
    require(name in kinds, "hidden_act", repr(name), f"one of {', '.join(kinds)}")
    settings: dict[str, Any] = {"kind": kinds[name]}
    if family.limit:
        bound = options.get("swiglu_limit")
        settings["clamp"] = None if bound is None else options.number("swiglu_limit")
    if family.slope:
        slope = options.get("swiglu_alpha", QUICK_SLOPE)
        require(slope == QUICK_SLOPE, "swiglu_alpha", slope, f"{QUICK_SLOPE}: the layer's gate has no other slope")
        settings |= {"kind": "quick_geglu", "offset": 1.0}
    return settings


def _shared_width(family: Family, options: Options) -> int | None:
    """The width of all shared experts together; None for none."""
    strategy = "shared_expert_combination_strategy"
    options.get(strategy)
    if not family.shared_width or 0 in [options.get(name) for name in family.shared_width]:
        return None
    options.one_of(strategy, ("sum", None))
    width = 1
    for name in family.shared_width:
        width *= options.count(name)
    return width
