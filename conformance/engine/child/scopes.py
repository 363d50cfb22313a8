"""What a namespace says it is for: the predicate of each function, from its `scope`."""

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
    given, source = implementation.scopes, f"{implementation.name} has scope"
    offered = [contract for name, contract in CONTRACTS.items() if functions[name]["offered"]]
    if unknown := sorted(set(given) - {"", *CONTRACTS}):
        raise UsageError(f"{source} for {', '.join(unknown)}; known are {', '.join(CONTRACTS)}")
    found: dict[str, str] = {}
    for function, text in given.items():
        limited = [contract for contract in offered if function in ("", contract.function)]
        where = parsed(text, source)
        found |= dict.fromkeys(where.applies(limited, source), where.text)
    return found


def scope_of_function(implementation: Implementation, function: str) -> Where:
    """The predicate of one function; everywhere, if it has none."""
    given = implementation.scopes
    where = parsed(given.get(function, given.get("", "")), "scope")
    return EVERYWHERE if where.problem(CONTRACTS[function]) else where
