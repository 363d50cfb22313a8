"""The values that expressions use: names, calls, imports inside functions, the environment."""

import ast
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conformance.engine.footprint.names import ABSENT, Named, Scope, contains
from conformance.engine.footprint.sources import FUNCTIONS, Packages, digest, files_digest
from conformance.engine.footprint.statements import is_environment

READS = ("read_text", "read_bytes", "fromfile")
CHAINS = (ast.Name, ast.Attribute, ast.Subscript)


@dataclass(eq=False)
class Part:
    """A piece of code or a value, with a digest of its own and the parts that it uses."""

    label: str
    digest: str = ""
    texts: set[str] = field(default_factory=set)  # identifiers in it as text
    uses: list["Part"] = field(default_factory=list)


Fill = Callable[[Part], str]  # the content of a part; makes it use others


class Expressions(ABC):
    """Follows the expressions of a piece of code."""

    packages: Packages

    @abstractmethod
    def use(self, named: Named, entry: Part, arguments: list[Any] | None = None) -> str:
        """Make `entry` use a value."""

    @abstractmethod
    def whole(self, entry: Part) -> None:
        """Make `entry` use all files of all packages."""

    @abstractmethod
    def link(self, entry: Part, key: Any, label: str, fill: Fill, *referents: Any) -> None:
        """Make `entry` use the entry of this key."""

    @abstractmethod
    def external(self, label: str, entry: Part) -> str:
        """A name of a package that is not followed."""

    def visit(self, node: ast.AST, scope: Scope, entry: Part) -> None:
        """Make `entry` use every value that the code names."""
        if isinstance(node, ast.Constant) and str(node.value).isidentifier():
            entry.texts.add(str(node.value))
        if self._is_special(node, scope, entry):
            return
        is_read = isinstance(node, CHAINS) and isinstance(node.ctx, ast.Load)
        if is_read and (named := scope.named(node)) is not None:
            self.use(named, entry)
            return
        children = [child for name, child in ast.iter_fields(node) if name not in ("annotation", "returns")]
        if isinstance(node, ast.Call) and (named := scope.named(node.func)) is not None:
            constants_of_arguments = [scope.constant(x) if isinstance(x, ast.Name) else None for x in node.args]
            self.use(named, entry, constants_of_arguments)
            children = [*node.args, *node.keywords]
        elif isinstance(node, FUNCTIONS) and not scope.bodies:
            children = [node.args, *getattr(node, "decorator_list", ())]
        for child in children:
            for nested_node in child if isinstance(child, list) else [child]:
                if isinstance(nested_node, ast.AST):
                    self.visit(nested_node, scope, entry)

    def _is_special(self, node: ast.AST, scope: Scope, entry: Part) -> bool:
        """Follow an import, a test of a known mapping, the environment; False: it is none."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if scope.bodies:  # at the import of a module: the other module has a part of its own
                self._local_import(node, scope, entry)
            return True
        if isinstance(node, ast.Attribute) and node.attr in READS:
            self.reads(entry)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            held = contains(scope.named(node.comparators[0]), scope.constant(node.left))
            if held is not None:
                entry.uses.append(Part(f"{entry.label} ({ast.unparse(node)[:60]})", digest(str(held))))
                return True
        owner = {ast.Call: "func", ast.Subscript: "value", ast.Compare: "comparators"}.get(type(node))
        if owner is None or not is_environment(getattr(node, owner)):
            return False
        names = [
            x.value
            for x in ast.walk(node)
            if isinstance(x, ast.Constant) and isinstance(x.value, str) and x.value.isidentifier()
        ]
        for name in names or sorted(os.environ):
            entry.uses.append(Part(f"environment {name}", digest(str(os.environ.get(name)))))
        return True

    def reads(self, entry: Part) -> None:
        """A file is read. Files of packages are in every footprint; others are not known."""
        if any(path.is_file() for path in self.packages.roots().values()):
            entry.uses.append(Part("files next to a module", os.urandom(8).hex()))

    def _local_import(self, node: ast.Import | ast.ImportFrom, scope: Scope, entry: Part) -> None:
        """An import inside a function: the modules, or the names taken from one."""
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            package = scope.variables.get("__package__") or ""
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, (base if node.level else "", node.module)))
            imported = sys.modules.get(module)
            if imported is None:
                self._not_imported(module, entry)
                return
            for name in names:
                value = getattr(imported, name, sys.modules.get(f"{module}.{name}", ABSENT))
                self.use(Named(value, f"{module}:{name}", id(vars(imported)), name), entry)
            return
        for name in names:
            if name in sys.modules:
                self.use(Named(sys.modules[name]), entry)
            else:
                self._not_imported(name, entry)

    def _not_imported(self, module: str, entry: Part) -> None:
        """A module that no one has imported yet: all files of its package, if it is followed."""
        top = module.partition(".")[0]
        spec = importlib.util.find_spec(top)
        path = spec and (next(iter(spec.submodule_search_locations or ()), None) or spec.origin)
        if path and (top in self.packages.roots() or self.packages.has_file(f"{path}.py")):
            self.link(entry, ("whole", top), f"{top} (all files)", partial(content_of, Path(path)))
            self.whole(entry)
        self.external(module, entry)


def content_of(path: Path, _: Part, python: bool | None = None) -> str:
    return files_digest(path, python)
