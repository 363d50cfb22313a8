"""A family: everything the suite holds about the functions of one folder. The engine reads a family through this record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.core.contract import Contract
from conformance.core.law import Law
from conformance.core.scope import Shapes

Wrapper = Callable[..., Any]


@dataclass(frozen=True)
class Defect:
    """A planted defect: what it is, where it was seen, and the functions that have it."""

    name: str
    title: str
    origin: str
    wrappers: dict[str, Wrapper]  # by function: called as wrapper(base function, *args, **settings)


@dataclass(frozen=True)
class Family:
    """Contracts, and by function: golden cases, illegal calls, laws and shapes."""

    contracts: tuple[Contract[Any], ...]
    golden: Mapping[str, Mapping[str, Any]]  # name -> (problem, right outputs), of ranks as lists
    illegal: Mapping[str, Mapping[str, Any]]
    laws: Mapping[str, tuple[Law, ...]]
    space: Mapping[str, Shapes] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()
