"""shard_parameters and expand_shard."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload
from conformance.families.parameters.cases import PREFIX, ExpandCase, ShardCase, stacked
from conformance.families.parameters.states import Given, bitwise, entries
from conformance.interface import named_outputs
from conformance.judge import Expectation
from moe_ref.parameters import shards as reference

NAMES = {"fc1_weight": "linear_fc1.weight", "fc2_weight": "linear_fc2.weight",
         "fc1_bias": "linear_fc1.bias", "fc2_bias": "linear_fc2.bias"}  # fmt: skip
ARGUMENTS = (
    *("num_experts", "rank", "ranks", "tensor_rank", "tensor_ranks"),
    *("gated", "singleton", "prefix"),
)
FIELDS = ("key", "values", "shape", "offset", "writes")


class ShardParameters(Contract[ShardCase]):
    """`shard_parameters`: the places that are written, their values, and the whole shapes."""

    function = "shard_parameters"
    case_type = ShardCase
    signature = Signature(
        inputs=[
            Input("fc1_weight", "LGN", part_of="parameters"),
            Input("fc2_weight", "LNM", part_of="parameters"),
            Input("fc1_bias", "LG", optional="has_bias", part_of="parameters"),
            Input("fc2_bias", "LN", optional="has_bias", part_of="parameters"),
        ],
        outputs=[Output("places"), Output("shapes"), Output("values")],
        settings=("tensor_rank", "tensor_ranks", "gated", "singleton", "prefix"),
        required=("parameters", "num_experts", "rank", "ranks"),
    )

    def legal(self, case: ShardCase) -> Problem:
        tensors, settings = tensors_of(case), settings_of(case)

        def script(implementation: Any, tensors_given: Given) -> dict[str, Any]:
            arguments = {name: tensors_given[name] for name in ARGUMENTS if name in tensors_given}
            return shards_read(implementation.call(self.function, parameters_of(case, tensors_given), **arguments))

        layouts, first = {case.layout_of: case.layout}, {"parameters": parameters_of(case, tensors)}
        return Problem(self.function, tensors, settings, layouts, script=script, first=first)

    def expected(self, case: ShardCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        shards = reference.shard_parameters(parameters_of(case, problem.required), **problem.settings)
        expected_outputs = shards_read(shards)
        return {name: bitwise(x) for name, x in expected_outputs.items()}


def settings_of(case: ShardCase) -> dict[str, Any]:
    """The call's keyword arguments; defaults are omitted."""
    settings: dict[str, Any] = {"num_experts": case.experts * case.ranks, "rank": case.rank, "ranks": case.ranks}
    if case.tensor_ranks > 1:
        settings |= {"tensor_rank": case.tensor_rank, "tensor_ranks": case.tensor_ranks}
    return (
        settings
        | {name: True for name in ("gated", "singleton") if getattr(case, name)}
        | ({"prefix": PREFIX} if case.prefixed else {})
    )


def tensors_of(case: ShardCase) -> dict[str, Tensor]:
    count, rows, columns = case.experts, case.fc1_rows, case.columns
    tensors_by_name = {"fc1_weight": stacked(case, "fc1", count, rows, columns)}
    tensors_by_name |= {"fc2_weight": stacked(case, "fc2", count, columns, case.rows)}
    if case.has_bias:
        tensors_by_name |= {
            "fc1_bias": stacked(case, "b1", count, rows),
            "fc2_bias": stacked(case, "b2", count, columns),
        }
    return tensors_by_name


def parameters_of(case: ShardCase, tensors_given: Given) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for name, key in NAMES.items():
        if name in tensors_given:
            parameters |= entries(key, tensors_given[name], case.names)
    return parameters


def shards_read(shards: Any) -> dict[str, Any]:
    """Outputs, in any order of the shards: a row per shard (key, axes, offset, written), the whole
    shapes, and the values by their place.
    """
    fields = [named_outputs(shard, FIELDS) for shard in shards]
    fields.sort(key=lambda x: (x["key"], tuple(x["offset"]), not x["writes"]))
    codes = [[sum(map(ord, x["key"])), len(x["offset"]), *_three(x["offset"]), int(x["writes"])] for x in fields]
    outputs: dict[str, Any] = {"places": torch.tensor(codes, dtype=torch.int64).reshape(len(fields), 6)}
    shapes = [_three(x["shape"]) for x in fields]
    outputs["shapes"] = torch.tensor(shapes, dtype=torch.int64).reshape(len(fields), 3)
    for x in fields:
        outputs[f"values.{x['key']}{list(x['offset'])}"] = x["values"]
    return outputs


def _three(numbers: Any) -> list[int]:
    return ([int(n) for n in numbers] + [0] * 3)[:3]


class ExpandShard(Contract[ExpandCase]):
    """`expand_shard`: an entry per member, in order, and the elements of each."""

    function = "expand_shard"
    case_type = ExpandCase
    signature = Signature(
        inputs=[Input("members", "P", part_of="members"), Input("shard", "Q", optional="given", part_of="shard")],
        outputs=[Output("starts"), Output("values")],
        settings=("offset",),
        required=("members", "shard"),
    )

    def legal(self, case: ExpandCase) -> Problem:
        tensors = {"members": payload(case.seed, "members", (sum(case.sizes),), case.dtype)}
        if case.given:
            tensors["shard"] = payload(case.seed, "shard", (case.count,), case.dtype)
        settings = {"offset": case.offset} if case.offset else {}

        def script(implementation: Any, tensors_given: Given) -> dict[str, Any]:
            members = members_of(case, tensors_given["members"])
            arguments = {"offset": tensors_given["offset"]} if "offset" in tensors_given else {}
            entries = implementation.call(self.function, members, tensors_given.get("shard"), **arguments)
            return entries_read(entries, members)

        first = {"members": members_of(case, tensors["members"]), "shard": tensors.get("shard")}
        return Problem(self.function, tensors, settings, {case.layout_of: case.layout}, script=script, first=first)

    def expected(self, case: ExpandCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        members = members_of(case, problem.required["members"])
        entries = reference.expand_shard(members, problem.required.get("shard"), **problem.settings)
        expected_outputs = entries_read(entries, members)
        return {name: bitwise(x) for name, x in expected_outputs.items()}


def members_of(case: ExpandCase, flat: Tensor) -> Any:
    """A grouped parameter's members, every second one [n,1]; or one parameter."""
    if not case.grouped:
        return flat
    return [x[:, None] if i % 2 else x for i, x in enumerate(flat.split(list(case.sizes)))]


def entries_read(entries: Any, members: Any) -> dict[str, Any]:
    """Outputs: per entry, which member it is of, its start (-1: none), its length; the values."""
    all_members = [members] if isinstance(members, Tensor) else members
    fields = [named_outputs(entry, ("member", "values", "start")) for entry in entries]
    rows = []
    for x in fields:
        member_index = next((i for i, member in enumerate(all_members) if member is x["member"]), -1)
        start = -1 if x["start"] is None else int(x["start"])
        rows.append([member_index, start, -1 if x["values"] is None else len(x["values"])])
    outputs: dict[str, Any] = {"starts": torch.tensor(rows, dtype=torch.int64).reshape(len(fields), 3)}
    return outputs | {f"values.{i}": x["values"] for i, x in enumerate(fields) if x["values"] is not None}
