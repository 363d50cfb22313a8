"""The modules whose code a function may run, found by their imports.

A function counts with the modules that it is defined in and with everything that these import, at
the top or inside functions. Of a package on the way to a module, such as `kernels` in
`kernels.router.gate`, Python runs the `__init__`; it counts itself, without what it imports. Where
code imports a name from a package, an `__init__` that only passes the name on leads to the module
that defines it. What imports do not show:

- *Values.* A registry, a table or a wrapper holds functions of modules that its own module does not
  import. The values of a module are searched for functions, classes and modules, as an import of
  the package leaves them.
- *Effects.* A module that does more at its import than bind names, such as `torch.relu = mine`,
  counts for every function, with all that it imports. So do functions of another module that an
  import calls, decorators for instance.
- *Hidden code.* Code that uses something of `source.HIDDEN`, and extension modules, may run any
  file: then all files of the packages count.

A module can say that calls reach less than it holds or imports: `__reaches__ = ("kernels.sums",)`
names the modules that count in place of both. An example is a registry of all functions that no
call reads, but a compiler.
"""

import ast
import gc
import inspect
import os
import sys
import textwrap
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from conformance.engine.footprint.packages import Packages, files_digest
from conformance.engine.footprint.source import Import, Source, digest, source_of

ANY = "(any module)"  # what hidden code may run
ALONE = ":"  # ends the name of a module that counts without what it imports
PACKAGE = "__init__.py"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
MEMOIZED = type(cache(len))
MOST = 50_000  # objects inside one value


class Closure:
    """The modules of the user that the functions of an implementation reach."""

    def __init__(self, packages: Packages) -> None:
        self.packages = packages
        self.source = cache(self._source)
        self.reached = cache(self._reached)
        self.files = cache(files_digest)

    def homes(self, namespace: Any, name: str, function: str = "") -> set[str]:
        """The modules that an attribute of a namespace is defined in; see `held` for `function`."""
        values = [getattr(namespace, name)]
        modules: set[str] = set()
        if isinstance(namespace, ModuleType) and self.packages.path(namespace.__name__):
            modules.add(namespace.__name__ + ALONE)
            for imported in self._bindings(namespace.__name__, name):
                modules |= self.targets(imported)
        elif not isinstance(namespace, ModuleType):
            values.append(namespace if isinstance(namespace, type) else type(namespace))
        return modules | self.held(values, function)

    def acting(self) -> set[str]:
        """The modules that count for every function, because of what an import does."""
        sources = [(module, self.source(module)) for module in self.packages.loaded()]
        called = {imported for _, source in sources if source for imported in source.called}
        run = self._all({target for imported in called for target in self.targets(imported)}, values=False)
        return {module for module, source in sources if source and source.acts} | {name + ALONE for name in run}

    def digests(self, homes: set[str]) -> dict[str, str]:
        """The digest of each module that these modules reach, themselves included, and of the
        variables of the environment that the modules name.
        """
        out: dict[str, str] = {}
        modules = self._all(homes)
        for module in modules - {ANY}:
            path, source = self.packages.path(module), self.source(module)
            out[module] = source.digest if source else files_digest(Path(path)) if path else ""
            variables = (source.texts & os.environ.keys()) - {"_"} if source else ()
            out |= {f"{name} (variable)": digest(os.environ[name]) for name in variables}
        if ANY in modules:
            out |= {f"{name} (all files)": self.files(path) for name, path in self.packages.roots().items()}
        return out

    def _all(self, modules: set[str], values: bool = True) -> set[str]:
        """The modules with all that they reach, and the packages around them.

        Args:
            values: follow the values that modules hold too, not only imports.
        """
        reached, waiting = set(modules), list(modules)
        while waiting:
            fresh = self.reached(waiting.pop(), values) - reached
            reached |= fresh
            waiting += fresh
        names = {name.removesuffix(ALONE) for name in reached}
        around = {
            ".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts))
        }
        return names | {name for name in around if self.packages.path(name)}

    def _source(self, module: str) -> Source | None:
        path = self.packages.path(module)
        return source_of(path, module if path.endswith(PACKAGE) else module.rpartition(".")[0])

    def _reached(self, module: str, values: bool) -> set[str]:
        """The modules that one module reaches directly."""
        if module.endswith(ALONE):
            return set()
        loaded, source = vars(sys.modules[module]) if module in sys.modules else {}, self.source(module)
        if "__reaches__" in loaded:
            return set(loaded["__reaches__"])
        if source is None or source.hides:
            return {ANY}
        bound = [value for name, value in list(loaded.items()) if values and self._binds(module, name, value)]
        return self.held(bound) | {target for imported in source.imports for target in self.targets(imported)}

    def _binds(self, module: str, name: str, value: Any) -> bool:
        """Whether a module itself binds a name, and not only an import or that of a submodule."""
        source = self.source(module)
        if source is None or name.startswith("__") or name in source.assigned:
            return not name.startswith("__")
        is_submodule = type(value) is ModuleType and value.__name__ == f"{module}.{name}"
        return name not in source.bindings and not is_submodule

    def targets(self, imported: Import, ancestors: frozenset[Import] = frozenset()) -> set[str]:
        """The modules that an import leads to. For a name that the `__init__` of a package passes
        on these are the module that defines it, and the `__init__` alone.
        """
        module, name = imported
        path, source = self.packages.path(module), self.source(module)
        submodules = {f"{module}.{name}"} if name and self.packages.path(f"{module}.{name}") else set()
        bindings = [] if name in ("", "*") else self._bindings(module, name)
        is_circle = imported in ancestors
        if is_circle and submodules:
            return submodules
        passes_on = path.endswith(PACKAGE) and source and name not in source.assigned and (bindings or submodules)
        if not passes_on or is_circle:
            return submodules | ({module} if path else set())
        followed = [self.targets(binding, ancestors | {imported}) for binding in bindings]
        return submodules.union({module + ALONE}, *followed)

    def _bindings(self, module: str, name: str) -> list[Import]:
        """The imports of a module that bind a name."""
        source = self.source(module)
        if source is None or name in source.bindings or name in source.assigned:
            return list(source.bindings.get(name, ())) if source else []
        stars = [home for home, _ in source.bindings.get("*", ())]
        return [(home, name) for home in stars if hasattr(sys.modules.get(home), name)]

    def held(self, values: Iterable[Any], function: str = "") -> set[str]:
        """The modules of all code that values hold.

        Args:
            function: the first argument of functions among the values. Of a table that they read
                only at this argument, only this item counts.
        """
        modules: set[str] = set()
        visited_ids: set[int] = set()
        waiting = list(values)
        references = [waiting.copy()]  # so that no visited id is given to another object
        ids_of_arguments = {id(value) for value in waiting}
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in PLAIN or id(value) in visited_ids:
                continue
            visited_ids.add(id(value))
            if len(visited_ids) > MOST:
                return {ANY}
            inner: list[Any] = []
            if issubclass(kind, ModuleType):
                modules.add(value.__name__)
            elif issubclass(kind, type):
                if self._is_followed(value.__module__):
                    modules.add(value.__module__)
                    inner = [*value.__bases__, kind, *vars(value).values()]
            elif kind is FunctionType:
                home = value.__globals__.get("__name__")
                is_code_of_user = self.packages.is_followed(value.__code__.co_filename)
                modules.add(ANY if is_code_of_user and not self._is_followed(home) else home)
                cells = _cells(value, function if id(value) in ids_of_arguments else "")
                inner = [value.__defaults__, value.__kwdefaults__, vars(value), *cells]
            elif kind is dict and "__builtins__" in value:  # all names of a module
                modules.add(value.get("__name__"))
            elif issubclass(kind, weakref.ref):
                inner = [weakref.ref.__call__(value)]
            elif kind is MEMOIZED:  # whoever reads a result from its memory has the arguments that led to it
                inner = [value.__wrapped__]
            else:
                modules |= {value.__module__} if kind is BuiltinFunctionType else set()
                inner = [kind] if issubclass(kind, torch.Tensor) else [kind, *gc.get_referents(value)]
            waiting += inner
            references.append(inner)
        return {name for name in modules if name == ANY or self._is_followed(name)}

    def _is_followed(self, module: Any) -> bool:
        return module in sys.modules and bool(self.packages.path(module))


def _cells(function: FunctionType, argument: str) -> Iterator[Any]:
    """The values of the function's free variables; of a table that it reads only at its first
    argument, the item of this argument.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = _content(cell)
        is_table = argument and type(value) is dict and argument in value and _reads_one_item(function.__code__, name)
        yield value[argument] if is_table else value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def _reads_one_item(code: CodeType, table: str) -> bool:
    """Whether a function uses a table only as `table[x]`, where x is its first parameter."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))))
    except (OSError, TypeError, SyntaxError):
        return False
    names = [node for node in nodes if isinstance(node, ast.Name)]
    items = [node for node in nodes if isinstance(node, ast.Subscript)]
    reads = [node.slice for node in items if isinstance(node.value, ast.Name) and node.value.id == table]
    first = "".join(code.co_varnames[:1])
    is_changed = any(node.id == first and not isinstance(node.ctx, ast.Load) for node in names)
    keys = [key.id if isinstance(key, ast.Name) else "" for key in reads]
    return not is_changed and keys == [first for node in names if node.id == table]
