"""Planted defects of parameters: of public checkpoints, and those that names and shards invite."""

from collections.abc import Mapping
from typing import Any

from conformance.mutants.defect import Defect, Wrapper

SKIPPED = "Megatron-LM !2529"
NAMES = "names of checkpoints: found by reading"


# ---- names


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


# ---- upcycling


NORMALIZE, MASTERS, CONVERT = "normalize_parameters", "normalize_master_parameters", "convert_experts"
SHARD, EXPAND, SPLIT, MERGE = "shard_parameters", "expand_shard", "split_extra_state", "merge_extra_state"
DEFECTS: tuple[Defect, ...] = (
    Defect("CK01", "an expert's index is set in a loop that is skipped", SKIPPED, {SHARD: _index_of_the_last}),
    Defect("CK07", "a name matches the end of a longer one", NAMES, {MASTERS: _without_boundary}),
    Defect("CK14", "the caller's state is changed", NAMES, dict.fromkeys((NORMALIZE, MASTERS, CONVERT), _in_place)),
)
