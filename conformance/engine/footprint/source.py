"""One Python file: the text that decides what it does, what it imports, what its import does."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
# what can run code that no import statement names
HIDDEN = re.compile(
    r"((builtins\.)?(eval|exec|compile|globals|__import__)|.*\.__subclasses__|sys\.(modules|_getframe)"
    r"|inspect\.(currentframe|stack)|importlib(?!\.metadata|\.resources)|pkgutil|runpy|pydoc|gc|ctypes|cffi"
    r"|pickle|cloudpickle|dill|marshal|subprocess|os\.(system|popen|exec\w+|p?spawn\w*|posix_\w+)"
    r"|torch\.(ops|_ops|classes|_classes|utils\.cpp_extension))(\.|$)"
)
REGISTERING = re.compile(r"torch\._?library(\.|$)")  # gives an operator of torch an implementation

Import = tuple[str, str]  # a module, and a name in it; the name is empty if the module itself is imported


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass
class Source:
    """A parsed file.

    digest: of the code without docstrings, comments and layout
    imports: all imports of the file, those inside functions included
    bindings: the imports that bind a name, by this name
    assigned: the names that it binds by other statements than imports
    texts: the identifiers that stand in it as text, such as names of environment variables
    hides: whether it uses something of HIDDEN
    acts: whether importing it may do more than bind names: it changes another module, for instance
    called: the imports whose functions its import calls, as decorators too
    """

    package: str  # in which relative imports begin
    digest: str = ""
    imports: set[Import] = field(default_factory=set)
    bindings: dict[str, set[Import]] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    hides: bool = False
    acts: bool = False
    called: set[Import] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names: set[str] = set()  # with dots, as they stand in the code: "np.random.seed"

    def read(self, tree: ast.Module) -> "Source":
        self.digest = digest(self._text(tree))
        full_names = {full for name in self._names for full in self._full_names(name)}
        self.hides = any(map(HIDDEN.match, full_names))
        containers = {"self", "cls", "super", "__all__"}
        statements = list(_executed(tree))
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, CONTAINERS):
                containers |= {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
        self.acts = any(map(REGISTERING.match, full_names))
        self.acts |= any(_acts(statement, containers) for statement in statements)
        called = {_root(function) for statement in statements for function in _called(statement)}
        self.called = {imported for name in called for imported in self.bindings.get(name, ())}
        return self

    def _text(self, node: ast.AST) -> str:
        """The tree as text; notes the imports, names and texts in it."""
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := _dotted(node)):
            self._names.add(name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned.add(name)
            return name
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.isidentifier():
                self.texts.add(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._note_import(node)
        elif isinstance(node, ast.Call) and (module := _imported_by(node)):
            self.imports.add((module, ""))
            return f"import {module}"
        elif isinstance(node, SCOPES):
            self.assigned.add(getattr(node, "name", ""))
        parts = []
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                skipped = name == "body" and isinstance(node, SCOPES) and _is_docstring(value)
                inner = [self._text(x) if isinstance(x, ast.AST) else repr(x) for x in value[skipped:]]
                parts.append(f"[{','.join(inner)}]")
            else:
                parts.append(self._text(value) if isinstance(value, ast.AST) else repr(value))
        return f"{type(node).__name__}({','.join(parts)})"

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                imported = self._absolute(node.level, node.module or ""), alias.name
                self._note(imported, alias.asname or alias.name)
                if alias.name == "*":
                    self._names.add(imported[0])
            elif alias.asname:
                self._note((alias.name, ""), alias.asname)
            else:  # `import a.b` binds `a`, through which the code may use all that `a` holds
                self.imports.add((alias.name, ""))
                self._note((alias.name.partition(".")[0], ""), alias.name.partition(".")[0])

    def _note(self, imported: Import, name: str) -> None:
        self.imports.add(imported)
        self.bindings.setdefault(name, set()).add(imported)

    def _absolute(self, level: int, module: str) -> str:
        if not level:
            return module
        home = self.package.split(".")
        return ".".join([*home[: len(home) - level + 1], *filter(None, [module])])

    def _full_names(self, name: str) -> Iterator[str]:
        """A dotted name with the module that its first part was imported from."""
        first, dot, others = name.partition(".")
        yield name
        for imported in self.bindings.get(first, ()):
            yield ".".join(filter(None, imported)) + dot + others


@cache
def source_of(path: str, package: str) -> Source | None:
    """The parsed file; None if it is no Python source."""
    try:
        return Source(package).read(ast.parse(Path(path).read_bytes())) if path.endswith(".py") else None
    except (OSError, SyntaxError, ValueError):
        return None


def _is_docstring(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _dotted(node: ast.AST) -> str:
    """The name that an expression spells, such as "torch.ops"; empty if it is no name."""
    if isinstance(node, ast.Attribute):
        outer = _dotted(node.value)
        return outer and f"{outer}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported_by(call: ast.Call) -> str:
    """The module that `importlib.import_module("module")` imports; empty for other calls."""
    first = call.args[0] if call.args else None
    name = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    is_import = _dotted(call.func).rpartition(".")[2] == "import_module"
    return name if is_import and not name.startswith(".") else ""


def _root(node: ast.AST) -> str:
    """The name that an expression of attributes, calls and items begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that importing the file runs: at the top, in classes, and in the file's own
    functions and methods if such a statement calls them.
    """
    definitions = {node.name: node for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    waiting: list[ast.AST] = list(tree.body)
    entered: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
            for name in {_root(function) for function in _called(node)} & definitions.keys() - entered:
                entered.add(name)
                methods = [x for x in definitions[name].body if isinstance(definitions[name], ast.ClassDef)]
                bodies = [x.body for x in methods if isinstance(x, FUNCTIONS)] or [definitions[name].body]
                waiting += [statement for body in bodies for statement in body]
        if not isinstance(node, FUNCTIONS):
            waiting += [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.expr)]


def _called(statement: ast.stmt) -> Iterator[ast.expr]:
    """The functions that a statement itself calls, decorators and base classes included."""
    yield from (*getattr(statement, "decorator_list", ()), *getattr(statement, "bases", ()))
    waiting: list[ast.AST] = [statement.args] if isinstance(statement, FUNCTIONS) else [statement]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.Call):
                yield child.func
            if not isinstance(child, (ast.stmt, ast.Lambda)):
                waiting.append(child)


def _targets(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions that a statement assigns to or deletes."""
    for target in getattr(statement, "targets", None) or [getattr(statement, "target", None)]:
        if target is not None:
            yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _acts(statement: ast.stmt, containers: set[str]) -> bool:
    """Whether a statement may change something that is not the file's own.

    Args:
        containers: names of lists, dicts and sets that the file makes itself.
    """
    changed: list[ast.AST] = [x for x in _targets(statement) if isinstance(x, (ast.Attribute, ast.Subscript))]
    if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
        changed.append(statement.value)
    return any(
        (isinstance(x, ast.Call) and isinstance(x.func, ast.Name)) or _root(x) not in containers for x in changed
    )
