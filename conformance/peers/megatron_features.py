"""Finds out which functions that the adapter calls an installed megatron-core has, by their
signatures. No version number decides. A function is offered if every symbol that it calls exists,
accepts the keywords that are always passed, and requires no others. A setting is offered if its
symbol has a parameter for it. What cannot be read counts as missing.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ROOT = "megatron.core."
Parameters = Mapping[str, tuple[str, ...] | None]  # by symbol: its parameters, `name` or `name?`; None: no such symbol


@dataclass(frozen=True)
class Call:
    """A symbol below megatron.core, and the keywords passed to it."""

    symbol: str
    passes: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # of ours: its keyword, passed where it is given


UTILS, ROUTER = "transformer.moe.moe_utils.", "transformer.moe.router.TopKRouter"
CONFIGURATION = "transformer.transformer_config.TransformerConfig"
GLOBAL_LOSS = f"{ROUTER}.reset_global_aux_loss_tracker"
BIAS = "distributed.finalize_model_grads._update_router_expert_bias"
RESET = "distributed.finalize_model_grads.reset_model_temporary_tensors"
GROUPS = (f"{UTILS}get_default_pg_collection", f"{UTILS}get_default_model_comm_pgs")  # from 0.15 on, and before
TRACKER = f"{UTILS}get_moe_layer_wise_logging_tracker"
METRICS = "transformer.moe.moe_logging.get_moe_metrics_tracker"  # from 0.18 on
REPLAY = "transformer.moe.router_replay.RouterReplay"

NAMES = {  # of settings of ours, in the package's configuration
    "num_experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "scaling_factor": "moe_router_topk_scaling_factor",
    "expert_bias": "moe_router_enable_expert_bias",
    "bias_update_rate": "moe_router_bias_update_rate",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "loss_per_token": "calculate_per_token_loss",
}
MODEL: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "num_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 1,
    "ffn_hidden_size": 1,
    "moe_ffn_hidden_size": 1,
    "add_bias_linear": False,
    "perform_initialization": False,
    "use_cpu_initialization": True,
}
LOSSES = ("moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_aux_loss_coeff")

_REPLAYED = {"precomputed_indices": "router_replay"}
_SCORED = ("num_groups", "group_topk", "scaling_factor", "score_function", "expert_bias")
_ROUTED = Call(
    f"{UTILS}topk_routing_with_score_function",
    ("logits", "topk", "use_pre_softmax"),
    {name: name for name in _SCORED} | _REPLAYED,
)
CALLS: dict[str, tuple[Call, ...]] = {
    "permute": (
        Call(f"{UTILS}permute", ("tokens", "routing_map", "probs", "num_out_tokens"), {"capacity": "drop_and_pad"}),
    ),
    "unpermute": (
        Call(
            f"{UTILS}unpermute",
            ("permuted_tokens", "sorted_indices", "restore_shape", "probs", "routing_map", "drop_and_pad"),
        ),
    ),
    "sort_chunks": (Call(f"{UTILS}sort_chunks_by_idxs", ("input", "split_sizes", "sorted_idxs", "probs")),),
    "pad_routing_map": (Call(f"{UTILS}pad_routing_map", ("routing_map", "pad_multiple")),),
    "gate": (Call(f"{UTILS}router_gating_linear", ("inp", "weight", "router_dtype"), {"bias": "bias"}),),
    "jitter": (Call(f"{ROUTER}.apply_input_jitter", ("self", "input")),),
    "topk_indices": (_ROUTED, Call(f"{REPLAY}.get_recorded_indices", ("self",))),
    "topk_routing": (_ROUTED,),
    "sinkhorn_routing": (Call(f"{ROUTER}.sinkhorn_load_balancing", ("self", "logits")),),
    "drop_tokens": (
        Call(
            f"{UTILS}apply_router_token_dropping",
            ("routing_probs", "routing_map", "router_topk", "capacity_factor", "drop_policy", "pad_to_capacity"),
        ),
    ),
    "aux_loss_scores": (
        Call(
            f"{UTILS}compute_routing_scores_for_aux_loss",
            ("logits", "topk", "score_function"),
            {"padding_mask": "padding_mask"},
        ),
    ),
    "load_balancing_loss": (
        Call(
            f"{UTILS}switch_load_balancing_loss_func",
            ("probs", "tokens_per_expert", "total_num_tokens", "topk", "num_experts", "moe_aux_loss_coeff"),
        ),
    ),
    "z_loss": (Call(f"{UTILS}z_loss_func", ("logits", "z_loss_coeff"), {"padding_mask": "padding_mask"}),),
    "attach_loss": (Call(f"{UTILS}MoEAuxLossAutoScaler.set_loss_scale", ("scale",)),),
    "update_expert_bias": (
        Call(
            f"{UTILS}get_updated_expert_bias",
            ("tokens_per_expert", "expert_bias", "expert_bias_update_rate"),
        ),
    ),
    "route": (
        Call(f"{ROUTER}.routing", ("self", "logits"), {"padding_mask": "padding_mask"}),
        Call(BIAS, ("model", "config")),
        Call(
            CONFIGURATION,
            (*MODEL, *NAMES.values(), *LOSSES),
            {"replay": "moe_enable_routing_replay", "replay_target": "moe_enable_routing_replay"},
        ),
    ),
}
SYMBOLS = tuple(
    dict.fromkeys(
        [*(call.symbol for calls in CALLS.values() for call in calls), GLOBAL_LOSS, RESET, *GROUPS, TRACKER, METRICS]
    )
)


def find(symbol: str) -> Any:
    """The symbol below megatron.core, or None."""
    module, _, name = symbol.rpartition(".")
    try:
        return getattr(importlib.import_module(ROOT + module), name, None)
    except ModuleNotFoundError:
        return getattr(find(module), name, None) if "." in module else None


def read(symbol_finder: Callable[[str], Any] = find) -> dict[str, tuple[str, ...] | None]:
    """The parameters of every symbol; those with a default, or of any name, end in "?"."""
    return {symbol: _parameters(symbol_finder(symbol)) for symbol in SYMBOLS}


@functools.cache
def installed() -> dict[str, tuple[str, ...] | None]:
    """The parameters in the installed release."""
    return read()


def has(symbol: str, keyword: str = "") -> bool:
    """Whether the installed release has the symbol, and that it has a parameter of that name."""
    names = installed()[symbol]
    return names is not None and (not keyword or keyword in {name.rstrip("?") for name in names})


def _parameters(function: Any) -> tuple[str, ...] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name + "?" * (p.default is not p.empty or p.kind in several) for p in parameters)


def lacking(function: str, parameters: Parameters) -> frozenset[str] | None:
    """The settings for which the release has no parameter; None if the function is not offered."""
    missing: set[str] = set()
    for call in CALLS[function]:
        takes = parameters[call.symbol]
        names = {name.rstrip("?") for name in takes or ()}
        required = {name for name in takes or () if not name.endswith("?")}
        if takes is None or not names.issuperset(call.passes) or required - {*call.passes, *call.settings.values()}:
            return None
        missing |= {setting for setting, keyword in call.settings.items() if keyword not in names}
    return frozenset(missing)


def offered(function: Callable[..., Any], parameters: Parameters | None = None) -> Any:
    """The function with a signature of what the release has; None if it lacks the function."""
    without = lacking(function.__name__, installed() if parameters is None else parameters)
    if without is None:
        return None
    if without:
        signature = inspect.signature(function)
        parameters_of_function = [
            p for p in signature.parameters.values() if p.name not in without and p.kind is not p.VAR_KEYWORD
        ]
        known_names = {*without, *(p.name for p in parameters_of_function)}
        extra_names = dict.fromkeys(
            name for call in CALLS[function.__name__] for name in call.settings if name not in known_names
        )
        parameters_of_function += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra_names
        ]
        function.__signature__ = signature.replace(parameters=parameters_of_function)  # type: ignore[attr-defined]
    return function
