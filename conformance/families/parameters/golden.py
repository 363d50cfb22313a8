"""Golden cases of parameters, worked out by hand."""

from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.literals import Golden, exactly, floats, ints
from conformance.families.parameters.extra_state import keys_of
from conformance.families.parameters.shards import entries_read, shards_read
from conformance.families.parameters.states import Given, bitwise, flattened, state_call
from conformance.judge import Exact

WHOLE = floats([[1, 2]], [[3, 4]])  # two experts, [1,2] each


def _state(
    function: str, state: dict[str, Any], expected_state: dict[str, Tensor], *absent_keys: str, **settings: Any
) -> tuple[Problem, dict[str, Any]]:
    """A call on `state`; its result has the keys of `expected_state`, and none of `absent_keys`."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    names = sorted({*expected_state, *absent_keys})
    call = state_call(
        function,
        tensors,
        settings,
        lambda tensors_given: {name: tensors_given.get(name, x) for name, x in state.items()},
        names,
    )
    keys = ints(len(expected_state), *(int(name in expected_state) for name in names))
    values = {f"state.{name}": Exact(x) for name, x in expected_state.items()}
    return Problem(function, **call), {"keys": keys, **values, "given": ints(1)}


NORMALIZE_PARAMETERS: Golden = {
    "packed": _state("normalize_parameters", {"weight0": WHOLE[0], "weight1": WHOLE[1]}, {"weight": WHOLE}, "weight0",
                     num_experts=2, packed=True),
    "one_missing": _state("normalize_parameters", {"weight0": WHOLE[0]}, {"weight0": WHOLE[0]}, "weight",
                          num_experts=2, packed=True),
    "by_expert": _state("normalize_parameters", {"a.weight": WHOLE},
                        {"a.weight0": WHOLE[0], "a.weight1": WHOLE[1]}, "a.weight",
                        num_experts=2, packed=False, prefix="a."),
    "rows_of_two_experts": _state(
        "normalize_parameters", {"weight": floats([1], [2], [3], [4])},
        {"weight0": floats([1], [2]), "weight1": floats([3], [4])}, "weight", num_experts=2, packed=False),
    "another_name_begins_alike": _state(
        "normalize_parameters", {"weight0": WHOLE[0], "weight1": WHOLE[1], "weight_scale": WHOLE[0]},
        {"weight": WHOLE, "weight_scale": WHOLE[0]}, "weight0", num_experts=2, packed=True),
    "bias_not_asked_for": _state("normalize_parameters", {"bias": WHOLE[:, 0]}, {"bias": WHOLE[:, 0]}, "bias0",
                                 num_experts=2, packed=False),
}  # fmt: skip
_TWICE = {"a.fc.weight0": WHOLE[0], "b.fc.weight0": WHOLE[1], "c.fc.weight": WHOLE[:1]}
NORMALIZE_MASTER_PARAMETERS: Golden = {
    "a_longer_name": _state("normalize_master_parameters", {"a.fc.weight0": WHOLE[0], "a.myfc.weight0": WHOLE[1]},
                            {"a.fc.weight": WHOLE[:1], "a.myfc.weight0": WHOLE[1]}, "a.fc.weight0", "a.myfc.weight",
                            name="fc.weight", num_experts=1, packed=True),
    "another_name_begins_alike": _state(
        "normalize_master_parameters", {"a.fc.weight0": WHOLE[0], "a.fc.weight_scale": WHOLE[1]},
        {"a.fc.weight": WHOLE[:1], "a.fc.weight_scale": WHOLE[1]}, "a.fc.weight0",
        name="fc.weight", num_experts=1, packed=True),
    "two_of_each_and_a_third": _state("normalize_master_parameters", _TWICE, _TWICE, "c.fc.weight0",
                                      name="fc.weight", num_experts=1, packed=False),
}  # fmt: skip
CONVERT_EXPERTS: Golden = {
    "a_module_per_expert": _state(
        "convert_experts", {"linear_fc2.weight": WHOLE, "gate": WHOLE[0]},
        {"local_experts.0.linear_fc2.weight": WHOLE[0], "local_experts.1.linear_fc2.weight": WHOLE[1],
         "gate": WHOLE[0]},
        "linear_fc2.weight0", num_experts=2, layout="sequential"),
}  # fmt: skip


def _shards(
    parameters: dict[str, Tensor], expected_shards: list[tuple[Any, ...]], **settings: Any
) -> tuple[Problem, dict[str, Any]]:
    def script(implementation: Any, tensors_given: Given) -> dict[str, Any]:
        shard_tensors = {name: tensors_given[name] for name in parameters}
        return shards_read(implementation.call("shard_parameters", shard_tensors, **settings))

    outputs = shards_read(
        [dict(zip(("key", "values", "shape", "offset", "writes"), x, strict=True)) for x in expected_shards]
    )
    expectations = {name: bitwise(x) for name, x in outputs.items()}
    return Problem(
        "shard_parameters", dict(parameters), settings, script=script, first={"parameters": parameters}
    ), expectations


_HALVES = floats([[1], [2], [3], [4]])  # one expert: u 1 2, v 3 4
SHARD_PARAMETERS: Golden = {
    # rank 1 of 2: expert 1; tensor rank 1 of 2: rows 2 3 of u and 6 7 of the eight
    "halves_of_a_gate": _shards(
        {"linear_fc1.weight": _HALVES},
        [("linear_fc1.weight", _HALVES[:, :2], (2, 8, 1), (1, 2, 0), True),
         ("linear_fc1.weight", _HALVES[:, 2:], (2, 8, 1), (1, 6, 0), True)],
        num_experts=2, rank=1, ranks=2, tensor_rank=1, tensor_ranks=2, gated=True),
    "the_first_expert_is_elsewhere": _shards(
        {"linear_fc1.weight1": floats([1, 2], [3, 4])},
        [("linear_fc1.weight", floats([[1, 2], [3, 4]]), (2, 2, 2), (1, 0, 0), True)],
        num_experts=2, rank=0, ranks=1),
    "a_bias_that_all_have": _shards(
        {"linear_fc2.bias": floats([5, 6])}, [("3.linear_fc2.bias", floats(5, 6), (2,), (0,), False)],
        num_experts=4, rank=3, ranks=4, tensor_rank=1, tensor_ranks=2, singleton=True),
}  # fmt: skip


def _expanded(
    sizes: tuple[int, ...], shard: Tensor, offset: int, expected_entries: list[tuple[Any, Any]]
) -> tuple[Problem, dict[str, Any]]:
    flat = torch.arange(sum(sizes), dtype=torch.float32)

    def script(implementation: Any, tensors_given: Given) -> dict[str, Any]:
        members = list(tensors_given["members"].split(list(sizes)))
        return entries_read(
            implementation.call("expand_shard", members, tensors_given["shard"], offset=offset), members
        )

    members = list(flat.split(list(sizes)))
    entries = [
        dict(zip(("member", "values", "start"), (m, *x), strict=True))
        for m, x in zip(members, expected_entries, strict=True)
    ]
    expectations = {name: bitwise(x) for name, x in entries_read(entries, members).items()}
    tensors = {"members": flat, "shard": shard}
    first = {"members": members, "shard": shard}
    return Problem("expand_shard", tensors, {"offset": offset}, script=script, first=first), expectations


EXPAND_SHARD: Golden = {  # elements 1 … 3 of members of 2, 0, 1 and 2
    "over_three_members": _expanded(
        (2, 0, 1, 2), floats(7, 8, 9), 1,
        [(floats(7), 1), (None, None), (floats(8), 0), (floats(9), 0)]),
    "nothing_of_one_member": _expanded((4,), floats(7)[:0], 2, [(None, None)]),
}  # fmt: skip


def _extra(scales: list[float], history: list[float], backward: list[float], experts: int) -> dict[str, Any]:
    return {
        "scale_fwd": floats(*scales),
        "amax_history_fwd": floats(history),
        "scale_bwd": floats(*backward),
        "amax_history_bwd": floats(backward),
        "extra_fp8_variables": {"num_gemms": experts},
    }


_OF_TWO = _extra([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [1, 2, 3, 4], 2)
_OF_EACH = [_extra([1, 3, 5], [6, 4, 2], [1, 3], 1), _extra([2, 4, 6], [5, 3, 1], [2, 4], 1)]


def _extra_state(
    function: str, state: dict[str, Any], expected_state: dict[str, Any], **settings: Any
) -> tuple[Problem, dict[str, Any]]:
    names = [*dict.fromkeys((*keys_of("", 2), *state))]
    tensors = {name: x for name, x in flattened(state).items() if isinstance(x, Tensor)}
    call = state_call(
        function,
        tensors,
        settings,
        lambda tensors_given: {
            key: {name: tensors_given.get(f"{key}.{name}", x) for name, x in extra.items()}
            for key, extra in state.items()
        },
        names,
    )
    expectations: dict[str, Any] = {
        "keys": ints(len(expected_state), *(int(name in expected_state) for name in sorted(names))),
        "given": ints(1),
    }
    for key, extra in expected_state.items():
        expectations |= {f"state.{key}.{name}": Exact(x) for name, x in extra.items() if isinstance(x, Tensor)}
        if extra:
            expectations[f"state.{key}.extra_fp8_variables.num_gemms"] = Exact(
                torch.tensor(extra["extra_fp8_variables"]["num_gemms"]), "integers"
            )
    return Problem(function, **call), expectations


_SPLIT = {"_extra_state": _OF_EACH[0], "_extra_state1": _OF_EACH[1]}
SPLIT_EXTRA_STATE: Golden = {
    "two_experts": _extra_state("split_extra_state", {"_extra_state": _OF_TWO}, _SPLIT, num_experts=2),
}
MERGE_EXTRA_STATE: Golden = {
    "two_experts": _extra_state("merge_extra_state", _SPLIT, {"_extra_state": _OF_TWO}, num_experts=2),
    "another_name_begins_alike": _extra_state(
        "merge_extra_state", _SPLIT | {"_extra_state_of_x": {}}, {"_extra_state": _OF_TWO, "_extra_state_of_x": {}},
        num_experts=2),
    "an_empty_one": _extra_state("merge_extra_state", {"_extra_state": {}, "_extra_state1": _OF_EACH[1]},
                                 {"_extra_state": {}, "_extra_state1": _OF_EACH[1]}, num_experts=2),
}  # fmt: skip
_ROUTER = floats([1], [2], [3], [4])
_DENSE = {"fc1_weight": floats([1], [3], [5], [7]), "fc2_weight": floats([1, 3])}
UPCYCLE: Golden = {
    # G = 4 slices of one copy; α = 4, of fc1 and of fc2 √4 = 2
    "four_slices": (
        Problem("upcycle", {"router_weight": _ROUTER, "fc1_weight": _ROUTER, "fc2_weight": floats([1, 3, 5, 7])},
                {"topk": 4, "granularity": 4, "kind": "relu", "fc2_bias": floats(6)}),
        {"router_weight": Exact(floats([1], [1], [1], [1])), "fc1_weight": exactly(floats([[2]], [[4]], [[6]], [[8]])),
         "fc2_weight": exactly(floats([[2]], [[6]], [[10]], [[14]])), "fc2_bias": Exact(floats([6], [6], [6], [6]))},
    ),
    # X = 8 copies of two slices: α = 8·2²/4, and its cube root 2
    "halves_of_a_gate": (
        Problem("upcycle", {"router_weight": _ROUTER.repeat(4, 1), **_DENSE},
                {"topk": 4, "granularity": 2, "pre_softmax": True}),
        {"fc1_weight": exactly(floats(*[[[2], [10]], [[6], [14]]] * 8)),
         "fc2_weight": exactly(floats(*[[[2]], [[6]]] * 8))},
    ),
}  # fmt: skip
