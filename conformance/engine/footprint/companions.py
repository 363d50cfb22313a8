"""The functions of an implementation that the suite calls while it judges another one.

`unpermute` is given the row map of `permute`; a quantised result is read by `codes` and `scales`.
They are found at the calls in the suite's source. A variable `function` names the judged function
itself. Where a call computes the name, all functions of the family count, and every function that
stands as text in the module.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.catalogue import CONTRACTS, FAMILIES, MODULES

ASKING = ("call", "offers", "lacks", "supports")  # methods of Implementation


def companions(function: str) -> set[str]:
    """The names that judging a function may call, without its own."""
    contract = CONTRACTS[function]
    names = {contract.signature.producer, *contract.companions}
    for module in _modules(contract):
        names |= _names_of_calls(module)
    return names - {"", function}


def _modules(contract: Any) -> set[str]:
    """The modules of the contract and its laws, and the families' modules they import."""
    types = [type(x) for x in (contract, *vars(contract).values())]
    held = [
        *(cls for cls_of_part in types for cls in cls_of_part.__mro__),
        *(law.check for law in contract.laws.values()),
    ]
    modules = {x.__module__ for x in held if x.__module__.startswith(MODULES)}
    waiting = list(modules)
    while waiting:
        fresh = _imported(waiting.pop()) - modules
        modules |= fresh
        waiting += fresh
    return modules


@cache
def _imported(module: str) -> set[str]:
    """The modules of the families in which a module's names are defined."""
    homes = {getattr(value, "__module__", None) for value in vars(sys.modules[module]).values()}
    modules = {x.__name__ for x in vars(sys.modules[module]).values() if isinstance(x, ModuleType)}
    return {str(name) for name in homes | modules if str(name).startswith(MODULES)}


@cache
def _names_of_calls(module: str) -> set[str]:
    """The functions that a module's code calls of an implementation."""
    names: set[str] = set()
    nodes = list(ast.walk(ast.parse(Path(str(sys.modules[module].__file__)).read_bytes())))
    for node in nodes:
        for argument in _named_function(node):
            name = _name(argument, module)
            names |= _possible_names(nodes, module) if name is None else {name}
    return names


def _possible_names(nodes: list[ast.AST], module: str) -> set[str]:
    """The functions that stand as text in a module, and those of its family."""
    homes = zip(MODULES, FAMILIES, strict=True)
    beside = {contract.function for home, family in homes if module.startswith(home) for contract in family.contracts}
    known_names = {name for contract in CONTRACTS.values() for name in (contract.function, *contract.companions)}
    return beside | {x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)} & known_names


def _named_function(node: ast.AST) -> Iterator[ast.expr]:
    """The expression that names the function, if the node is such a call."""
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Attribute):
        is_of_contract = isinstance(called.value, ast.Name) and called.value.id == "self"  # `Contract.call`
        asks = called.attr in ASKING and not is_of_contract
    elif isinstance(called, ast.Subscript):
        asks = isinstance(called.slice, ast.Constant) and called.slice.value in ASKING
    else:
        asks = isinstance(called, ast.Name) and called.id == "Problem"
        if isinstance(called, ast.Name) and called.id in ("Problem", "replace"):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "function")
    if asks and node.args:
        yield node.args[0]


def _name(node: ast.expr, module: str) -> str | None:
    """The function that a call names: text, or `Permute.function`; None if it is computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id == "function":
        return ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "self" and node.attr == "function":
            return ""
        return getattr(vars(sys.modules[module]).get(node.value.id), node.attr, None)
    return None
