"""Takes functions and classes out of a source file, without the imports of the rest of the file."""

import __future__

import ast
import dataclasses
import enum
import math
import typing
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STANDARD = {"dataclasses": dataclasses, "enum": enum, "math": math} | {
    name: getattr(typing, name) for name in ("Optional", "Tuple", "Union", "Iterable")
}


class _OnACpu(ast.NodeTransformer):
    """Replaces "cuda" by "cpu", and removes torch's decorators."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = [x for x in node.decorator_list if not ast.unparse(x).startswith("torch.")]
        self.generic_visit(node)
        return node


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {x.id for x in node.targets if isinstance(x, ast.Name)} if isinstance(node, ast.Assign) else set()


def load(path: Path, names: Iterable[str], **namespace: Any) -> SimpleNamespace:
    """The named functions, classes and constants of a file, run with the names of `namespace`.

    Raises:
        LookupError: the file does not have one of them.
    """
    wanted = set(names)
    tree = ast.parse(path.read_text())
    wanted_nodes = [node for node in tree.body if _names(node) & wanted]
    missing = wanted - {name for node in wanted_nodes for name in _names(node)}
    if missing:
        raise LookupError(f"{path.name} has no {', '.join(sorted(missing))}")
    return SimpleNamespace(**run(wanted_nodes, str(path), namespace))


def statements(path: Path, function: str, first: str, last: str) -> list[ast.stmt]:
    """The statements of a function from the one that assigns `first` to the one that assigns
    `last`.

    Raises:
        LookupError: there are none.
    """
    tree = ast.parse(path.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    places = {name: i for i, node in reversed([*enumerate(body)]) for name in _names(node)}
    ends = {name: i for i, node in enumerate(body) for name in _names(node)}
    if first not in places or last not in ends:
        raise LookupError(f"{path.name}: {function} assigns no {first} or {last}")
    return body[places[first] : ends[last] + 1]


def run(nodes: list[ast.stmt], name: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """The names after the statements, on a CPU."""
    module = ast.fix_missing_locations(_OnACpu().visit(ast.Module(nodes, [])))
    space = STANDARD | {"torch": torch, "__name__": __name__} | namespace
    exec(compile(module, name, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), space)
    return space
