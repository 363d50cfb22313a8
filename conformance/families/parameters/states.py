"""Calls on state dicts: a script builds the dict of the call's tensors, and reads the result's."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.judge import Exact, Expectation

Given = Mapping[str, Any]
Build = Callable[[Given], dict[str, Any]]


def state_call(
    function: str, tensors: dict[str, Tensor], settings: dict[str, Any], build: Build, universe: Iterable[str]
) -> dict[str, Any]:
    """The fields of a Problem whose function takes the state that `build` makes of the tensors.

    Outputs: `keys`, the number of the result's keys and which of `universe` it has; its values by
    key; `given`, whether the argument is as it was.
    """
    names = sorted(universe)

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        state = build(tensors)
        entries_before = flattened(state)
        result = implementation.call(function, state, **{name: tensors[name] for name in settings})
        entries_after = flattened(state)
        same = list(entries_after) == list(entries_before) and all(
            entries_after[name] is x for name, x in entries_before.items()
        )
        return read(result, names) | {"given": torch.tensor([same])}

    return {"required": tensors, "settings": settings, "script": script, "first": {"state": build(tensors)}}


def read(result: Any, names: list[str]) -> dict[str, Any]:
    keys = torch.tensor([len(result), *(name in result for name in names)])
    values = {name: torch.tensor(x) if isinstance(x, int) else x for name, x in flattened(result).items()}
    return {"keys": keys} | {f"state.{name}": x for name, x in values.items()}


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key; those in lists and dicts by key and place."""
    values_by_key: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, list | tuple):
            values_by_key |= {f"{name}.{i}": x for i, x in enumerate(value)}
        elif isinstance(value, Mapping):
            values_by_key |= {f"{name}.{inner}": x for inner, x in flattened(value).items()}
        else:
            values_by_key[name] = value
    return values_by_key


def expected_of(
    function: Callable[..., Any], problem: Problem, build: Build, universe: Iterable[str]
) -> dict[str, Expectation]:
    """The reference's state, bit by bit."""
    result = function(build(problem.required), **problem.settings)
    expectations: dict[str, Expectation] = {name: bitwise(x) for name, x in read(result, sorted(universe)).items()}
    return expectations | {"given": Exact(torch.tensor([True]), "integers")}


def bitwise(x: Tensor) -> Exact:
    """The same bits; of counts and places the same numbers."""
    return Exact(x, "integers" if x.dtype == torch.int64 else "bits")


def key_explained(universe: Iterable[str], output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
    """A wrong entry of `keys` in words."""
    if output == "given":
        return "changes the state dict that it is given"
    if output != "keys" or index == (0,):
        return None
    name = sorted(universe)[index[0] - 1]
    return f"the result has the key {name!r}" if observed[index] else f"the result lacks the key {name!r}"


def spelled(key: str, experts: int) -> list[str]:
    """The key of all experts, and each expert's."""
    return [key, *(f"{key}{e}" for e in range(experts))]


def entries(key: str, parameter: Tensor, storage: str) -> dict[str, Any]:
    """A parameter [L,…] in one of the storages that the cases list."""
    indexed = {f"{key}{e}": x for e, x in enumerate(parameter)}
    last = f"{key}{len(parameter) - 1}"
    by_word: dict[str, dict[str, Any]] = {
        "indexed": indexed,
        "packed": {key: parameter},
        "both": {key: parameter} | indexed,
        "some": {name: x for name, x in indexed.items() if name != last},
        "rest": {last: indexed[last]},
        "none": {},
    }
    if storage == "flat":
        return {key: parameter.flatten(0, 1)}
    return {key: list(parameter)} if storage == "members" else by_word[storage]
