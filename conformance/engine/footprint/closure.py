"""Everything that a function reaches: code and values, followed from name to name.

A function reaches the values that its code names: functions, classes, constants, kernels, whatever
wraps them. A class reaches all its methods and bases; a module used as a value reaches all that it
holds. Code that finds functions by other means, such as `eval`, reaches its whole package. So the
closure may be too large, and is never too small as long as external packages keep to themselves.
"""

import ast
import builtins
import functools
import sys
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from conformance.engine.footprint.expressions import Expressions, Fill, Part, content_of
from conformance.engine.footprint.names import (
    ABSENT,
    Named,
    Scope,
    constants,
    global_loads,
    is_readable,
    stored,
)
from conformance.engine.footprint.sources import (
    Packages,
    Source,
    digest,
    source_of,
    text,
)
from conformance.engine.footprint.statements import (
    called,
    is_effect,
    is_filled,
    is_generated,
    own_attribute,
)
from conformance.engine.footprint.values import Values

EMPTY = digest("")
OPEN = {"eval", "exec", "compile", "globals", "__import__"}  # builtins that reach any code
OPEN_MODULES = (
    *("importlib", "pkgutil", "runpy", "gc", "ctypes", "cffi", "pickle", "pydoc", "torch.ops", "torch._ops"),
    *("torch.library", "torch._library", "torch.classes", "torch._classes", "torch.utils.cpp_extension"),
)
OPEN_NAMES = ("sys:modules", "sys:_getframe", "inspect:currentframe", "inspect:stack")
SETTINGS = ("configs", "keys", "values", "noinline", "debug", "do_not_specialize", "do_not_specialize_on_alignment")


class Closure(Expressions):
    """The parts reached by the functions of an implementation.

    executing: follow what importing the packages executes, in place of what their functions do.
    """

    def __init__(self, packages: Packages, executing: bool = False) -> None:
        self.packages, self.executing = packages, executing
        self.values = Values(self)
        self._parts: dict[Any, Part] = {}
        self._kept: list[Any] = []  # keeps ids from being used again
        self._waiting: deque[tuple[Part, Fill]] = deque()

    def reached(self, *values: Any, first: str = "") -> dict[str, str]:
        """The label and digest of every part that the values reach.

        Args:
            first: the known value of the first parameter of functions among `values`.
        """
        return self._summary(self._root(values, first))

    def texts(self, value: Any) -> set[str]:
        """The identifiers that stand as text in what a value reaches."""
        return set().union(*(entry.texts for entry in self._all(self._root([value], ""))))

    def _root(self, values: Iterable[Any], first: str) -> Part:
        root = Part("")
        for value in values:
            self.use(Named(value), root, [first] if first else [])
        return root

    def _all(self, root: Part) -> list[Part]:
        """The part and all parts that it reaches."""
        while self._waiting:
            entry, fill = self._waiting.popleft()
            entry.digest = digest(fill(entry))
        reachable = dict.fromkeys([root])
        waiting = [root]
        while waiting:
            fresh = [used for used in waiting.pop().uses if used not in reachable]
            reachable.update(dict.fromkeys(fresh))
            waiting += fresh
        return list(reachable)

    def _summary(self, root: Part) -> dict[str, str]:
        by_label: dict[str, set[str]] = {}
        for entry in self._all(root):
            if entry.digest and entry.digest != EMPTY:
                by_label.setdefault(entry.label, set()).add(entry.digest)
        return {label: min(d) if len(d) == 1 else digest(*sorted(d)) for label, d in sorted(by_label.items())}

    def imports(self) -> dict[str, str]:
        """The parts reached by what importing the packages executes, and their data files."""
        root = Part("")
        for module in self.packages.modules():
            source = source_of(str(module.__file__))
            if source:
                fill: Fill = partial(self._import, module, source)
                self.link(root, ("import", module.__name__), f"{module.__name__} (import)", fill)
        for name, path in self.packages.roots().items():
            fill = partial(content_of, path, python=False)
            self.link(root, ("files", name), f"{name} (files)", fill)
        return self._summary(root)

    # ---- edges

    def use(self, named: Named, entry: Part, arguments: list[Any] | None = None) -> str:
        """Make `entry` use a value; returns the text that the digest of the entry has for it."""
        value, label = named.value, named.label
        reference = self.reference(value, entry, arguments or [])
        if reference is not None:
            return reference
        module = label.partition(":")[0]
        if not label:
            return self.values.form(value, entry)
        if not self.packages.has_module(module) or self._is_imported(label, named.dotted):
            return self.external(label, entry)
        self.link(
            entry,
            ("value", named.home, named.dotted),
            label,
            lambda filled_entry: self._value(value, filled_entry),
            value,
        )
        return label

    def reference(self, value: Any, entry: Part, arguments: list[Any]) -> str | None:
        """The text of a function, class, module or wrapper, which `entry` then uses, or None."""
        if value is ABSENT:
            return ABSENT
        if not is_readable(value):
            return None
        if isinstance(value, MethodType):
            owner = value.__self__
            first = owner if isinstance(owner, type) or self.is_followed(type(owner)) else None
            if isinstance(owner, type):
                self.reference(owner, entry, [])
            return self.reference(value.__func__, entry, [first, *arguments])
        if isinstance(value, FunctionType):
            return self._function(value, entry, arguments)
        if isinstance(value, (staticmethod, classmethod)):
            return self.reference(value.__func__, entry, arguments)
        if isinstance(value, (property, functools.cached_property)):
            getters = (
                (value.func,) if isinstance(value, functools.cached_property) else (value.fget, value.fset, value.fdel)
            )
            return "property " + " ".join(str(self.reference(f, entry, [])) for f in getters if f is not None)
        if isinstance(value, type):
            return self._class(value, entry)
        if isinstance(value, ModuleType):
            return self._module(value, entry)
        if isinstance(value, BuiltinFunctionType) or type(value).__name__ in (
            "wrapper_descriptor",
            "method_descriptor",
        ):
            return self._builtin(value, entry)
        inner = next(
            (x for x in (own_attribute(value, "fn"), own_attribute(value, "__wrapped__")) if callable(x)), None
        )
        is_wrapper = inner is not None and callable(value) and not isinstance(value, partial)
        if is_wrapper and not self.is_followed(type(value)):  # a kernel, a cached function
            settings = [self.values.form(own_attribute(value, name), entry) for name in SETTINGS]
            return f"{type(value).__qualname__} of {self.reference(inner, entry, arguments)} {settings}"
        return None

    def whole(self, entry: Part) -> None:
        """Make `entry` use all files of all packages: what it reaches is not known."""
        for name, path in self.packages.roots().items():
            self.link(entry, ("whole", name), f"{name} (all files)", partial(content_of, path))

    def link(self, entry: Part, key: Any, label: str, fill: Fill, *referents: Any) -> None:
        if key not in self._parts:
            self._parts[key] = Part(label)
            self._kept += referents
            self._waiting.append((self._parts[key], fill))
        if self._parts[key] not in entry.uses:
            entry.uses.append(self._parts[key])

    def external(self, label: str, entry: Part) -> str:
        """A leaf of another package; the whole package of the part if it can reach any code."""
        name = label.replace(":", ".")
        if label in OPEN_NAMES or any(name == m or name.startswith(f"{m}.") for m in OPEN_MODULES):
            self.whole(entry)
        return f"external {label}"

    def _builtin(self, value: Any, entry: Part) -> str:
        name = value.__name__
        if getattr(builtins, name, None) is value:
            if name in OPEN:
                self.whole(entry)
            if name == "open":
                self.reads(entry)
        return f"builtin {name}"

    def _module(self, module: ModuleType, entry: Part) -> str:
        if not self.packages.has_module(module.__name__):
            return self.external(module.__name__, entry)

        def fill(filled_entry: Part) -> str:
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    self.use(Named(value, f"{module.__name__}:{name}", id(vars(module)), name), filled_entry)
            return " ".join(sorted(vars(module)))

        self.link(entry, ("module", module.__name__), f"{module.__name__} (all names)", fill)
        return module.__name__

    def _is_imported(self, label: str, dotted: str) -> bool:
        """Whether a module's name is bound only by imports from packages that are not followed."""
        module, name = label.partition(":")[0], dotted.partition(".")[0]
        source = source_of(str(getattr(sys.modules.get(module), "__file__", "")))
        bindings = source.bindings.get(name, []) if source else []
        return bool(bindings) and all(
            isinstance(x, ast.ImportFrom) and not x.level and not self.packages.has_module(x.module) for x in bindings
        )

    def is_followed(self, cls: type) -> bool:
        return self.packages.has_module(cls.__module__)

    def unrooted(self, content: str) -> str:
        """Text without the packages' folders, which differ between copies."""
        for name, path in self.packages.roots().items():
            content = content.replace(str(path), f"({name})")
        return content

    # ---- contents

    def _value(self, value: Any, entry: Part) -> str:
        """The content of a value; an import may fill tables, and does not run what they hold."""
        return self.values.form(value, Part("") if self.executing else entry)

    def _function(self, function: FunctionType, entry: Part, arguments: list[Any]) -> str:
        code = function.__code__
        label = f"{function.__module__}:{function.__qualname__}"
        generated = code.co_filename.startswith("<") and self.packages.has_module(function.__module__)
        if not (generated or self.packages.has_file(code.co_filename)):
            self.link(
                entry,
                ("external", id(function)),
                label,
                lambda filled_entry: self._wrapped_by(function, filled_entry),
                function,
            )
            return self.external(label, entry)
        parameters = code.co_varnames[: code.co_argcount]
        bound = {k: v for k, v in zip(parameters, arguments, strict=False) if v is not None}
        key = ("function", id(function), tuple((k, v if isinstance(v, str) else id(v)) for k, v in bound.items()))
        self.link(
            entry,
            key,
            label,
            lambda filled_entry: self._definition(function, bound, filled_entry),
            function,
            *bound.values(),
        )
        return label

    def _wrapped_by(self, function: FunctionType, entry: Part) -> str:
        """The code that a function of another package holds; the function has no content itself."""
        held = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        self.values.callables([held, function.__defaults__, function.__kwdefaults__, vars(function)], entry)
        return ""

    def _definition(self, function: FunctionType, bound: dict[str, Any], entry: Part) -> str:
        """The content of a function: its source (code if it was generated) and what it holds."""
        code = function.__code__
        source = source_of(code.co_filename)
        nodes = source.function(code) if source else []
        cells = {
            name: cell.cell_contents
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
            if is_filled(cell)
        }
        scope = Scope(function.__module__ or "", function.__globals__, cells, {}, global_loads(code))
        fixed = set().union(*(stored(node) for node in nodes)) if nodes else set(bound)
        scope.bound = {name: value for name, value in bound.items() if name not in fixed}
        content = [text(node) for node in nodes] or [constants(code)]
        # a function may say what it reaches outside of a compiled graph, in which nothing is judged
        says = hasattr(function, "__eager__")
        for node in () if says else nodes:
            self.visit(node, scope, entry)
        if not nodes and not says:
            for name in (*(scope.loads or ()), *cells):
                self.visit(ast.Name(name, ast.Load()), scope, entry)
        held = {k: v for k, v in vars(function).items() if k != "__wrapped__"}
        content.append(self.values.form((function.__defaults__, function.__kwdefaults__, held), entry))
        if hasattr(function, "__wrapped__"):
            content.append(self.use(Named(function.__wrapped__), entry))
        return "\n".join(content)

    def _class(self, cls: type, entry: Part) -> str:
        label = f"{cls.__module__}:{cls.__qualname__}"
        if not self.is_followed(cls):
            return self.external(label, entry)
        self.link(entry, ("class", id(cls)), label, lambda filled_entry: self._members(cls, filled_entry), cls)
        return label

    def _members(self, cls: type, entry: Part) -> str:
        """The content of a class: its source and its attributes; it uses its bases."""
        source = source_of(str(getattr(sys.modules.get(cls.__module__), "__file__", "")))
        nodes = source.classes.get(cls.__qualname__, []) if source else []
        content = [text(node) for node in nodes]
        for base in (*cls.__bases__, type(cls)):
            content.append(str(self.reference(base, entry, [])))
        scope = Scope(cls.__module__, vars(sys.modules[cls.__module__]), bodies=False)
        for node in nodes:
            self.visit(node, scope, entry)
        for name, value in sorted(vars(cls).items()):
            if not is_generated(name, value):
                content.append(f"{name}={self.use(Named(value), entry)}")
        return "\n".join(content)

    def _import(self, module: ModuleType, source: Source, entry: Part) -> str:
        """What the import of a module does besides naming values: its statements, and its calls."""
        scope, content = Scope(module.__name__, vars(module), bodies=False), []
        for statement in source.tree.body:
            if is_effect(statement, scope):
                content.append(text(statement))
                self.visit(statement, scope, entry)
            for function in called(statement):
                named = scope.named(function)
                if named is not None:
                    self.use(named, entry)
        return "\n".join(content)
