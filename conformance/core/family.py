"""A family: everything the suite holds about the functions of one folder. The engine reads a family through this record."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.core.contract import Contract
from conformance.core.defect import Defect
from conformance.core.law import Law
from conformance.core.scope import Shapes


@dataclass(frozen=True)
class Family:
    """Contracts, and by function: golden cases, illegal calls, laws and shapes."""

    contracts: tuple[Contract[Any], ...]
    golden: Mapping[str, Mapping[str, Any]]  # name -> (problem, right outputs), of ranks as lists
    illegal: Mapping[str, Mapping[str, Any]]
    laws: Mapping[str, tuple[Law, ...]]
    space: Mapping[str, Shapes] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()


def merged(*tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """One table of a family from its files: by function, the entries of all."""
    return {
        function: {name: entry for table in tables for name, entry in table.get(function, {}).items()}
        for function in dict.fromkeys(function for table in tables for function in table)
    }
