"""The cases for which a namespace is meant: the predicate of each function, from its `scope`."""

from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.where import EVERYWHERE, Where, parsed
from conformance.interface import Implementation, UsageError


def scopes_of(implementation: Implementation, functions: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The predicates of offered functions, in canonical form.

    A text limits the functions that have cases it can be true of; the others have no scope.

    Raises:
        UsageError: it is no predicate, or no case of a function that it limits can match.
    """
    declared_scopes, source = implementation.scopes, f"{implementation.name} has scope"
    offered = [contract for name, contract in CONTRACTS.items() if functions[name]["offered"]]
    if unknown := sorted(set(declared_scopes) - {"", *CONTRACTS}):
        raise UsageError(f"{source} for {', '.join(unknown)}; known are {', '.join(CONTRACTS)}")
    scopes: dict[str, str] = {}
    for function, text in declared_scopes.items():
        limited = [contract for contract in offered if function in ("", contract.function)]
        where = parsed(text, source)
        scopes |= dict.fromkeys(where.applies(limited, source), where.text)
    return scopes


def scope_of_function(implementation: Implementation, function: str) -> Where:
    """The predicate of one function.

    A function without one has the predicate that is true everywhere.
    """
    declared_scopes = implementation.scopes
    where = parsed(declared_scopes.get(function, declared_scopes.get("", "")), "scope")
    return EVERYWHERE if where.problem(CONTRACTS[function]) else where
