"""A family: the functions of one folder, as the record through which the engine reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from conformance.core.contract import Contract
from conformance.core.law import Law
from conformance.core.machine import Machine
from conformance.core.shapes import Shapes


@dataclass(frozen=True)
class Family:
    """Contracts, and by function: golden cases, illegal calls, laws, shapes and machines."""

    contracts: tuple[Contract[Any], ...]
    golden: Mapping[str, Mapping[str, Any]]  # name -> (problem, expected); lists with one per rank
    illegal: Mapping[str, Mapping[str, Any]]
    laws: Mapping[str, tuple[Law, ...]]
    space: Mapping[str, Shapes] = field(default_factory=dict)
    defects: str = ""  # a module whose DEFECTS are planted, besides those of the folder `defects`
    machines: Mapping[str, type[Machine]] = field(default_factory=dict)  # of functions with several calls


def by_function(*modules: ModuleType) -> dict[str, Any]:
    """The modules' constants by function: `golden.GATE` for `gate`; dicts are merged."""
    merged: dict[str, Any] = {}
    for module in modules:
        for constant, value in vars(module).items():
            if constant.isupper() and not constant.startswith("_"):
                name = constant.lower()
                both = isinstance(value, dict) and isinstance(merged.get(name), dict)
                merged[name] = merged[name] | value if both else value
    return merged
