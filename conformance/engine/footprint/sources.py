"""Python files as trees: their definitions, the text that decides what they do, their imports."""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
INSTALLED = ("site-packages", "dist-packages")
STDLIB = sysconfig.get_path("stdlib")
SKIPPED = ("__pycache__",)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def files_digest(folder: Path, python: bool | None = None) -> str:
    """A digest of the files in a folder, or of one file.

    Args:
        python: only Python source (True), or only other files (False).
    """
    out = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        hidden = any(path_part in SKIPPED or path_part.startswith(".") for path_part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and (python is None or python == (path.suffix == ".py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            out.update(f"{path.relative_to(folder)} {content}\n".encode())
    return out.hexdigest()[:16]


def text(node: ast.AST) -> str:
    """The tree as text: without docstrings, comments, layout and line numbers."""
    texts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (*FUNCTIONS, ast.ClassDef)) and isinstance(value, list):
            value = _without_docstring(value)
        if isinstance(value, list):
            texts.append(f"[{','.join(text(x) if isinstance(x, ast.AST) else repr(x) for x in value)}]")
        else:
            texts.append(text(value) if isinstance(value, ast.AST) else repr(value))
    return f"{type(node).__name__}({','.join(texts)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if body and _is_docstring(body[0]) else body


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class Source:
    """One Python file."""

    def __init__(self, path: str) -> None:
        self.tree = ast.parse(Path(path).read_bytes())
        self.functions: dict[tuple[int, str], list[ast.AST]] = {}  # by first line and name
        self.classes: dict[str, list[ast.ClassDef]] = {}  # by qualified name
        self.bindings: dict[str, list[ast.stmt]] = {}  # by the name they bind
        self._index(self.tree, "")
        for statement in self.tree.body:
            for name in _bound(statement):
                self.bindings.setdefault(name, []).append(statement)

    def _index(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, FUNCTIONS):
                name = getattr(child, "name", "<lambda>")
                first = min([child.lineno, *(x.lineno for x in getattr(child, "decorator_list", ()))])
                self.functions.setdefault((first, name), []).append(child)
                inner = f"{prefix}{name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                self.classes.setdefault(prefix + child.name, []).append(child)
                inner = f"{prefix}{child.name}."
            self._index(child, inner)

    def function(self, code: CodeType) -> list[ast.AST]:
        """The definitions that the code may be compiled from."""
        return self.functions.get((code.co_firstlineno, code.co_name), [])


@cache
def source_of(path: str) -> Source | None:
    """The parsed file; None if there is no Python source."""
    try:
        return Source(path) if path.endswith(".py") else None
    except (OSError, SyntaxError, ValueError):
        return None


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module may bind."""
    for node in executed(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the statement does: without bodies of functions and annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if (isinstance(node, FUNCTIONS) and name in ("body", "args", "returns")) or name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from executed(child)


class Packages:
    """The packages whose code is followed: the implementation's, and others that are not installed.

    Installed packages and the suite itself are compared as a whole.
    """

    def __init__(self, implementation: str, suite: tuple[Path, ...]) -> None:
        self.top = implementation.partition(":")[0].partition(".")[0]
        self.suite = tuple(str(folder) + os.sep for folder in suite)
        self._known: dict[str, bool] = {}
        self._roots: tuple[int, dict[str, Path]] = (0, {})

    def has_file(self, path: str | None) -> bool:
        if not path:
            return False
        if path not in self._known:
            self._known[path] = self._is_followed(path)
        return self._known[path]

    def _is_followed(self, path: str) -> bool:
        if (
            path.startswith(self.suite)
            or not os.path.isabs(path)
            or path == getattr(sys.modules["__main__"], "__file__", "")
        ):
            return False
        top = sys.modules.get(self.top)
        if path == getattr(top, "__file__", None) or path.startswith(
            tuple(f + os.sep for f in getattr(top, "__path__", []))
        ):
            return True
        is_foreign = path.startswith(STDLIB + os.sep) or any(f"{os.sep}{name}{os.sep}" in path for name in INSTALLED)
        return path.endswith((".py", ".so", ".pyc")) and not is_foreign

    def has_module(self, name: str | None) -> bool:
        return self.has_file(getattr(sys.modules.get(name or ""), "__file__", None))

    def modules(self) -> list[ModuleType]:
        """The modules imported so far, by name."""
        return [module for name, module in sorted(sys.modules.items()) if module is not None and self.has_module(name)]

    def roots(self) -> dict[str, Path]:
        """The folder or file of each package."""
        if self._roots[0] == len(sys.modules):
            return self._roots[1]
        out: dict[str, Path] = {}
        for module in self.modules():
            top = module.__name__.partition(".")[0]
            folders = list(getattr(sys.modules.get(top), "__path__", []))
            out[top] = Path(folders[0] if folders else str(module.__file__))
        self._roots = len(sys.modules), out
        return out
