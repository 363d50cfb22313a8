"""What statements of a module do, and which attributes a class has from its source."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from conformance.engine.footprint.names import Named, Scope, attribute
from conformance.engine.footprint.sources import FUNCTIONS, executed

ENVIRONMENT = ("environ", "getenv")
DERIVED = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
DERIVED |= {"__match_args__"}


def is_generated(name: str, value: Any) -> bool:
    """Whether Python or `dataclass` made an attribute of a class, from the class's source."""
    code = attribute(value, "__code__")
    is_slot = type(value).__name__ in ("getset_descriptor", "member_descriptor", "_tuplegetter")
    wrapped = attribute(value, "__wrapped__")  # a dataclass's __repr__
    return (
        is_slot
        or name in DERIVED
        or name.startswith(("__dataclass_", "_abc_", "__annot"))
        or (
            name.startswith("__")
            and any(
                str(attribute(c, "co_filename", "")).startswith("<") for c in (code, attribute(wrapped, "__code__"))
            )
        )
    )


def is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def own_attribute(value: Any, name: str) -> Any:
    """An attribute that the instance itself holds."""
    return inspect.getattr_static(value, name, None) if name in attribute(value, "__dict__", {}) else None


def is_environment(node: Any) -> bool:
    """Whether an expression reads os.environ, or calls os.getenv."""
    nodes = node if isinstance(node, list) else [node]
    while nodes and isinstance(nodes[0], (ast.Attribute, ast.Name)):
        if getattr(nodes[0], "attr", getattr(nodes[0], "id", "")) in ENVIRONMENT:
            return True
        nodes = [nodes[0].value] if isinstance(nodes[0], ast.Attribute) else []
    return False


def called(statement: ast.stmt) -> Iterator[ast.AST]:
    """The functions that a module's statement calls, decorators included."""
    for node in executed(statement):
        if isinstance(node, ast.Call):
            yield node.func
        yield from getattr(node, "decorator_list", ())


def is_effect(statement: ast.stmt, scope: Scope) -> bool:
    """Whether a statement may do more than bind names and change the packages' own values."""
    if isinstance(statement, (ast.Import, ast.ImportFrom, *FUNCTIONS, ast.ClassDef, ast.Pass)):
        return False
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        places = [x for target in targets for x in ast.walk(target) if isinstance(x, (ast.Attribute, ast.Subscript))]
        return not all(is_container(scope.named(target.value)) for target in places)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return not (isinstance(function, ast.Attribute) and is_container(scope.named(function.value)))
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def is_container(named: Named | None) -> bool:
    return named is not None and bool(named.label) and type(named.value) in (list, dict, set)
