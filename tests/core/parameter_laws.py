"""For each law of parameters, a case and a namespace that is right on it but breaks the law."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.families.parameters import cases
from tests.common.suite import wrapped

LAYER = cases.StateCase(function="normalize_parameters", experts=3, rows=2, columns=4, weights="packed")
MASTER = cases.MasterCase(function="normalize_master_parameters", experts=3, rows=2, columns=4, packed=True)
MODULES = cases.ConvertCase(function="convert_experts", experts=3, rows=2, columns=4, biases="indexed")
SHARDS = cases.ShardCase(function="shard_parameters", experts=2, rows=3, columns=2, ranks=2, tensor_ranks=2, gated=True)
ENTRIES = cases.ExpandCase(function="expand_shard", sizes=(3, 0, 2), length=4)
EXTRA = cases.ExtraStateCase(function="split_extra_state", experts=3, history=2)
DENSE = cases.UpcycleCase(function="upcycle", copies=2, granularity=2, width=3, hidden=4, topk=2)


def where(function: str, condition: Callable[..., bool], spoil: Callable[[Any], Any]) -> SimpleNamespace:
    """The reference, with `spoil` of its result where the settings fulfil the condition."""

    def wrapper(original: Any, *arguments: Any, **settings: Any) -> Any:
        out = original(*arguments, **settings)
        return spoil(out) if condition(settings) else out

    return wrapped(function, wrapper)


def nothing(out: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(x) if isinstance(x, Tensor) else x for name, x in out.items()}


def one_copy_a_bit_larger(out: Any) -> Any:
    weight = out.fc1_weight.clone()
    weight[2:] = torch.nextafter(weight[2:], torch.tensor(9.0))
    return out._replace(fc1_weight=weight)


PARAMETER_TWINS = [
    ("round_trip", LAYER, where("normalize_parameters", lambda s: s["packed"], nothing)),
    ("round_trip", MASTER, where("normalize_master_parameters", lambda s: not s["packed"], nothing)),
    ("round_trip", MODULES, where("convert_experts", lambda s: s["layout"] == "grouped", nothing)),
    ("round_trip", EXTRA, where("merge_extra_state", lambda s: True, lambda out: dict(list(out.items())[1:]))),
    ("whole_again", SHARDS, where("shard_parameters", lambda s: s["rank"] == 1, lambda out: out[1:])),
    ("reassembled", ENTRIES, where("expand_shard", lambda s: "offset" in s, lambda out: out[:-1])),
    ("copies", DENSE, where("upcycle", lambda s: True, one_copy_a_bit_larger)),
]
