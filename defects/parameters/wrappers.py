"""Planted defects of parameters: of public checkpoints, and those that names and shards invite."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from moe_ref.config.parameters import COLUMNS

SKIPPED = "Megatron-LM !2529"
UPCYCLED = "Megatron-LM #5442"
DROPPED = "torchtitan #3626"
NAMES = "names of checkpoints: found by reading"
INVITED = "shards and states: invited"


# ---- names


def _by_letter(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Experts in the order of their keys' letters: 10 before 2."""
    out = normalize(state, **settings)
    added = [key for key in out if key not in state and isinstance(out[key], Tensor)]
    if settings["packed"] and added and settings["num_experts"] > 10:
        order = torch.tensor(sorted(range(settings["num_experts"]), key=str))
        return out | {key: out[key][order] for key in added}
    return out


def _unmatched_dropped(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Only keys that the layer knows are kept."""
    out = normalize(state, **settings)
    known = (settings.get("prefix", "") + "weight", settings.get("prefix", "") + "bias")
    return {key: x for key, x in out.items() if key.startswith(known)}


def _renamed_dropped(convert: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Keys that no rule renames are dropped."""
    out = convert(state, **settings)
    return {key: x for key, x in out.items() if "linear_fc" in key}


def _split_over_indexed(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """A packed key is split although an expert's key is there, too."""
    key = f"{settings.get('prefix', '')}weight"
    if settings["packed"] or key not in state:
        return normalize(state, **settings)
    own = {f"{key}{e}" for e in range(settings["num_experts"])}
    return normalize({name: x for name, x in state.items() if name not in own}, **settings)


def _packed_again(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Indexed keys are stacked over a packed one."""
    key = f"{settings.get('prefix', '')}weight"
    own = {f"{key}{e}" for e in range(settings["num_experts"])}
    if settings["packed"] and key in state and own <= state.keys():
        state = {name: x for name, x in state.items() if name != key}
    return normalize(state, **settings)


def _bias_always(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    return normalize(state, **settings | {"bias": True})


def _prefix_ignored(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    return normalize(state, **{name: x for name, x in settings.items() if name != "prefix"})


def _in_place(normalize: Wrapper, state: Any, **settings: Any) -> Any:
    """The state dict of the caller is changed."""
    out = normalize(state, **settings)
    state.clear()
    state.update(out)
    return out


def _without_boundary(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """A name matches the end of a longer one."""
    longer = [key for key in state if "shared_linear" in key]
    plain = {key.replace("shared_linear", "shared.linear"): x for key, x in state.items()}
    out = normalize(plain, **settings) if longer else normalize(state, **settings)
    return {key.replace("shared.linear", "shared_linear"): x for key, x in out.items()}


def _two_count_as_none(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Indexed keys that match twice count as none, so a packed key beside them is split."""
    out = normalize(state, **settings)
    name, count = settings["name"], settings["num_experts"]
    matching = [[key for key in state if key.endswith(f"{name}{e}")] for e in range(count)]
    whole = [key for key in state if key.endswith(name)]
    if settings["packed"] or len(whole) != 1 or not all(len(keys) == 2 for keys in matching):
        return out
    rest = {key: x for key, x in out.items() if key != whole[0]}
    return rest | {f"{whole[0]}{e}": x for e, x in enumerate(out[whole[0]])}


def _first_of_several(normalize: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Of several packed keys the first is split."""
    name = settings["name"]
    whole = [key for key in state if key == name or key.endswith(f".{name}")]
    hidden = {} if settings["packed"] else {key: state[key] for key in whole[1:]}
    return normalize({key: x for key, x in state.items() if key not in hidden}, **settings) | hidden


# ---- shards


def _index_of_the_last(shard: Wrapper, parameters: Mapping[str, Any], **settings: Any) -> Any:
    """The index of an expert is set in a loop that a parameter without elements skips."""
    shards, last = [], 0
    for x in shard(parameters, **settings):
        if x.values.numel() or settings.get("singleton"):
            last = x.offset[0]
            shards.append(x)
        else:
            shards.append(x._replace(offset=(last, *x.offset[1:])))
    return shards


# ---- extra states


def _column_by_column(split: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Columns of an expert are taken as neighbours: x[e·C + c] in place of x[c·L + e]."""
    out, count = split(state, **settings), settings["num_experts"]
    key = f"{settings.get('prefix', '')}_extra_state"
    whole = state.get(key)
    if not isinstance(whole, Mapping) or out.get(f"{key}1") is state.get(f"{key}1") or count == 1:
        return out
    for e in range(count):
        name = f"{key}{e or ''}"
        own = {n: whole[n].unflatten(-1, (count, c))[..., e, :] for n, c in COLUMNS.items()}
        out[name] = out[name] | own
    return out


def _number_left(split: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """Each expert's state says that it has all products."""
    out = split(state, **settings)
    for key, x in out.items():
        if key not in state or x is not state[key]:
            out[key] = x | {"extra_fp8_variables": x["extra_fp8_variables"] | {"num_gemms": settings["num_experts"]}}
    return out


def _merged_without(merge: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """A missing or empty state is the first's."""
    prefix, count = settings.get("prefix", ""), settings["num_experts"]
    first = state.get(f"{prefix}_extra_state")
    if not isinstance(first, Mapping) or len(first.get("scale_fwd", ())) != COLUMNS["scale_fwd"]:
        return merge(state, **settings)
    filled = {f"{prefix}_extra_state{e}": state.get(f"{prefix}_extra_state{e}") or first for e in range(1, count)}
    return merge({**state, **filled}, **settings)


def _indexed_left(merge: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """The experts' states stay in the result, with the merged one."""
    return {**state, **merge(state, **settings)}


def _history_of_the_first(merge: Wrapper, state: Mapping[str, Any], **settings: Any) -> Any:
    """All experts get the first one's amax history."""
    out, key = merge(state, **settings), f"{settings.get('prefix', '')}_extra_state"
    if out.get(key) is state.get(key) or settings["num_experts"] == 1:
        return out
    first = state[key]["amax_history_fwd"]
    return out | {key: out[key] | {"amax_history_fwd": first.repeat_interleave(settings["num_experts"], -1)}}


# ---- upcycling


def _swapped(upcycle: Wrapper, *weights: Tensor, **settings: Any) -> Any:
    """Granularity and slots are swapped on their way, where both values are legal."""
    topk, granularity = settings["topk"], settings.get("granularity", 1)
    experts, width = len(weights[0]), weights[2].shape[1]
    if experts % topk or width % topk:
        return upcycle(*weights, **settings)
    return upcycle(*weights, **settings | {"topk": granularity, "granularity": topk})


def _halves_as_one(upcycle: Wrapper, *weights: Tensor, **settings: Any) -> Any:
    """The slices of a gated layer are cut from both halves as if they were one."""
    out, granularity = upcycle(*weights, **settings), settings.get("granularity", 1)
    if weights[1].shape[0] == weights[2].shape[1]:
        return out
    first = out.fc1_weight[:granularity]
    rows = first.unflatten(1, (2, first.shape[1] // 2)).transpose(0, 1).reshape(first.shape)
    return out._replace(fc1_weight=rows.repeat(len(out.fc1_weight) // granularity, 1, 1))


def _copies_together(upcycle: Wrapper, *weights: Tensor, **settings: Any) -> Any:
    """Router rows repeat copy by copy, not slice by slice."""
    out, granularity = upcycle(*weights, **settings), settings.get("granularity", 1)
    return out._replace(router_weight=weights[0][: len(weights[0]) // granularity].repeat(granularity, 1))


def _same_scale_for_all(upcycle: Wrapper, *weights: Tensor, **settings: Any) -> Any:
    """The scale is a square root for every activation."""
    out, granularity = upcycle(*weights, **settings), settings.get("granularity", 1)
    gated = weights[1].shape[0] != weights[2].shape[1]
    if not gated and settings.get("kind") != "squared_relu":
        return out
    copies = len(weights[0]) // granularity
    alpha = copies * granularity**2 / settings["topk"] if settings.get("pre_softmax") else granularity
    return out._replace(fc2_weight=(out.fc2_weight.double() * alpha ** (1 / 6)).to(out.fc2_weight.dtype))


def _second_bias_scaled(upcycle: Wrapper, *weights: Tensor, **settings: Any) -> Any:
    out = upcycle(*weights, **settings)
    if out.fc2_bias is None:
        return out
    return out._replace(fc2_bias=out.fc2_bias * settings.get("granularity", 1) ** 0.5)


NORMALIZE, MASTERS, CONVERT = "normalize_parameters", "normalize_master_parameters", "convert_experts"
SHARD, EXPAND, SPLIT, MERGE = "shard_parameters", "expand_shard", "split_extra_state", "merge_extra_state"
DEFECTS: tuple[Defect, ...] = (
    Defect("CK01", "an expert's index is set in a loop that is skipped", SKIPPED, {SHARD: _index_of_the_last}),
    Defect("CK03", "arguments of upcycling are swapped", UPCYCLED, {"upcycle": _swapped}),
    Defect(
        "CK05",
        "keys that no rule names are dropped",
        DROPPED,
        {NORMALIZE: _unmatched_dropped, CONVERT: _renamed_dropped},
    ),
    Defect("CK06", "indexed keys that match twice count as none", NAMES, {MASTERS: _two_count_as_none}),
    Defect("CK07", "a name matches the end of a longer one", NAMES, {MASTERS: _without_boundary}),
    Defect("CK08", "of several packed keys the first is split", NAMES, {MASTERS: _first_of_several}),
    Defect("CK09", "experts in the order of keys' letters", NAMES, dict.fromkeys((NORMALIZE, MASTERS), _by_letter)),
    Defect("CK10", "a packed key is split over indexed ones", NAMES, {NORMALIZE: _split_over_indexed}),
    Defect("CK11", "indexed keys are stacked over a packed one", NAMES, {NORMALIZE: _packed_again}),
    Defect("CK12", "keys of biases are renamed without biases", NAMES, {NORMALIZE: _bias_always}),
    Defect("CK13", "the prefix is ignored", NAMES, dict.fromkeys((NORMALIZE, CONVERT, SPLIT, MERGE), _prefix_ignored)),
    Defect("CK14", "the caller's state is changed", NAMES, dict.fromkeys((NORMALIZE, MASTERS, CONVERT), _in_place)),
    Defect("CK23", "an expert's columns of a state are taken as neighbours", INVITED, {SPLIT: _column_by_column}),
    Defect("CK24", "an expert's state says that it has all products", INVITED, {SPLIT: _number_left}),
    Defect("CK25", "a missing extra state is the first's", INVITED, {MERGE: _merged_without}),
    Defect("CK26", "the experts' extra states stay beside the merged one", INVITED, {MERGE: _indexed_left}),
    Defect("CK27", "all experts get the first one's amax history", INVITED, {MERGE: _history_of_the_first}),
    Defect("CK28", "slices are cut from both halves of a gate as one", INVITED, {"upcycle": _halves_as_one}),
    Defect("CK29", "router rows repeat copy by copy", INVITED, {"upcycle": _copies_together}),
    Defect("CK30", "the scale is a square root for every activation", INVITED, {"upcycle": _same_scale_for_all}),
    Defect("CK31", "the second bias is scaled", INVITED, {"upcycle": _second_bias_scaled}),
)
