"""The values that expressions of a function name, as far as they are known before it runs."""

import ast
import builtins
import dis
import inspect
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

CONTAINERS = (dict, MappingProxyType)
ABSENT = "(absent)"  # an attribute or key that does not exist


@dataclass(frozen=True)
class Named:
    """A value; `label` and `home` (of a module's globals) name it, unless it is no global."""

    value: Any
    label: str = ""
    home: int = 0
    dotted: str = ""  # the attributes read of a global


@dataclass
class Scope:
    """The names that a piece of code sees."""

    module: str
    variables: dict[str, Any]  # of the module
    cells: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)  # parameters of known value
    loads: set[str] | None = None  # names that the code reads from the module; None: all
    bodies: bool = True  # whether functions inside the code run

    def named(self, node: ast.AST) -> Named | None:
        """The value of an expression; None if it is not known."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.named(node.value)
            return owner and _attribute(owner, node.attr)
        if isinstance(node, ast.Subscript):
            owner, key = self.named(node.value), self.constant(node.slice)
            return owner and _item(owner, key)
        return None

    def constant(self, node: ast.AST) -> str | None:
        """The text that an expression is: a literal, or a parameter of known value."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        value = self.bound.get(node.id) if isinstance(node, ast.Name) else None
        return value if isinstance(value, str) else None

    def _name(self, name: str) -> Named | None:
        for bindings in (self.bound, self.cells):
            if name in bindings:
                return Named(bindings[name])
        if self.loads is not None and name not in self.loads:
            return None
        if name in self.variables:
            return Named(self.variables[name], f"{self.module}:{name}", id(self.variables), name)
        return Named(getattr(builtins, name)) if hasattr(builtins, name) else None


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """An attribute of any object, some of which raise more than AttributeError."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def is_readable(value: Any) -> bool:
    """Whether the object answers for its class, as `isinstance` asks it."""
    return attribute(value, "__class__") is not None


def _attribute(owner: Named, name: str) -> Named | None:
    """An attribute of a module, or a stored attribute or method of an instance."""
    value = owner.value
    if value is ABSENT:
        return owner
    if isinstance(value, ModuleType):
        attribute_value = vars(value).get(name, ABSENT)
        if attribute_value is ABSENT:
            try:
                attribute_value = getattr(value, name)  # by the module's own __getattr__
            except Exception:
                attribute_value = ABSENT
        return Named(attribute_value, f"{value.__name__}:{name}", id(vars(value)), name)
    if isinstance(value, type) or type(value).__module__ == "builtins":
        return None
    attribute_value = inspect.getattr_static(value, name, ABSENT)
    if name in attribute(value, "__dict__", {}):
        dotted = f"{owner.dotted}.{name}"
        return Named(attribute_value, owner.label and f"{owner.label}.{name}", owner.home, dotted)
    return Named(MethodType(attribute_value, value)) if isinstance(attribute_value, FunctionType) else None


def _item(owner: Named, key: str | None) -> Named | None:
    """The item of a mapping whose keys are all text."""
    if owner.value is ABSENT:
        return owner
    if key is None or type(owner.value) not in CONTAINERS or not all(type(k) is str for k in owner.value):
        return None
    return Named(owner.value.get(key, ABSENT))


def contains(owner: Named | None, key: str | None) -> bool | None:
    """Whether a known mapping has a known key; None if either is not known."""
    if owner is None or key is None or type(owner.value) not in CONTAINERS:
        return None
    return key in owner.value


def code_objects(code: CodeType) -> list[CodeType]:
    """The code and all code nested in it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, CodeType) for inner in code_objects(x))]


def global_loads(code: CodeType) -> set[str]:
    """The names that the code, and all code nested in it, reads from the module."""
    return {
        str(step.argval)
        for nested_code in code_objects(code)
        for step in dis.get_instructions(nested_code)
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
    }


def constants(code: CodeType) -> str:
    """The code as text: instructions, constants and names, without docstring and line numbers."""
    texts = []
    for inner in code_objects(code):
        consts = [repr(x) for x in inner.co_consts if not isinstance(x, CodeType) and not isinstance(x, frozenset)]
        sets = [repr(sorted(map(repr, x))) for x in inner.co_consts if isinstance(x, frozenset)]
        texts.append(f"{inner.co_code.hex()} {consts} {sets} {inner.co_names} {inner.co_varnames} {inner.co_freevars}")
    return "\n".join(texts)


def stored(node: ast.AST) -> set[str]:
    """Names that the code inside a definition binds again, in nested functions too."""
    names: set[str] = set()
    for outer in ast.iter_child_nodes(node):
        for inner in ast.walk(outer):
            if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                names.add(inner.id)
            elif isinstance(inner, ast.arg) and not isinstance(outer, ast.arguments):
                names.add(inner.arg)
            elif isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                names.add(inner.name)
    return names
