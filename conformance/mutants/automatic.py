"""Mutants of an implementation's source: one small change each, by `operators`."""

import ast
import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from conformance.interface import UsageError
from conformance.mutants.operators import changes

MOST_PER_LINE = 3
# operators of which a line has one change at most: pointer arithmetic would crowd the others out
COMMON = ("arithmetic", "swapped_axes", "dropped_cast")
SAME_RESULTS = ("tuning.py",)  # files of block sizes, which never change results


@dataclass(frozen=True)
class SourceMutant:
    """One file of the implementation with one change."""

    name: str  # such as "kernels/permutation.py:118 comparison 2"
    file: str  # relative to the folder that holds the package
    line: int
    operator: str
    begin: int  # of the change, in characters
    before: str
    after: str
    source: str  # of the whole file

    @property
    def original(self) -> str:
        """The file without the change."""
        return self.source[: self.begin] + self.before + self.source[self.begin + len(self.after) :]


@dataclass(frozen=True, order=True)
class Edit:
    """The change source[begin:end] = after. Changes sort in the order of mutants."""

    line: int
    begin: int
    operator: str
    end: int
    after: str


def source_mutants(implementation: str, files: Container[str] | None = None) -> list[SourceMutant]:
    """Every mutant of a package or module, by file, line, column and operator.

    Args:
        files: only mutants in these files, named as in `SourceMutant.file`; None for all.

    Raises:
        UsageError: no Python source of that name.
    """
    top, named = _locate(implementation)
    paths = sorted(path for path in named.rglob("*.py") if path.name not in SAME_RESULTS) if named.is_dir() else [named]
    folder = named if named.is_dir() else named.parent
    return [
        mutant
        for path in paths
        if files is None or path.relative_to(top.parent).as_posix() in files
        for mutant in _mutants_of(path, path.relative_to(top.parent).as_posix(), path.relative_to(folder).as_posix())
    ]


def home(implementation: str) -> Path:
    """The top-level package's folder, or module's file, whose parent holds `SourceMutant.file`."""
    return _locate(implementation)[0]


def enclosing_function(mutant: SourceMutant) -> str:
    """The qualified name of the innermost function that the change is in."""
    nodes = (x for x in ast.walk(ast.parse(mutant.source)) if isinstance(x, ast.FunctionDef | ast.ClassDef))
    around = [node for node in nodes if node.lineno <= mutant.line <= (node.end_lineno or node.lineno)]
    around.sort(key=lambda node: node.lineno)
    while around and isinstance(around[-1], ast.ClassDef):
        around.pop()
    qualified_names = [node.name if isinstance(node, ast.ClassDef) else f"{node.name}.<locals>" for node in around]
    return ".".join(qualified_names).removesuffix(".<locals>")


def write_copy(mutant: SourceMutant, implementation: str, folder: Path) -> None:
    """Copy the top-level package into `folder`, with the mutant.

    Raises:
        FileExistsError: as of `copy_package`.
    """
    copy_package(implementation, folder)
    (folder / mutant.file).write_text(mutant.source, encoding="utf-8")


def copy_package(implementation: str, folder: Path) -> None:
    """Copy the top-level package into `folder`, which replaces the original as the first entry of
    sys.path. Files other than Python are linked.

    Raises:
        FileExistsError: the folder holds a package of this name, whose bytecode could run instead.
    """
    top, _ = _locate(implementation)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / top.name).exists():
        raise FileExistsError(folder / top.name)
    if top.is_dir():
        shutil.copytree(
            top, folder / top.name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=_copy_or_link
        )


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".py"):
        shutil.copyfile(source, target)
    else:
        os.symlink(os.path.abspath(source), target)


def _locate(implementation: str) -> tuple[Path, Path]:
    """The top-level package or module, and the named part: a folder or file each, not imported.

    Raises:
        UsageError: no Python source of that name.
    """
    top_name, *inner = implementation.partition(":")[0].split(".")
    # the children's search order
    spec = importlib.util.find_spec(top_name) if top_name else None
    if spec is None or spec.loader is None:
        spec = PathFinder.find_spec(top_name, [os.getcwd()])
    location = spec and (next(iter(spec.submodule_search_locations or ()), None) or spec.origin)
    top = Path(location or "/").absolute()
    named = top.joinpath(*inner)
    if not named.is_dir():
        named = named.with_suffix(".py") if inner else named
    if not location or not (named.is_dir() or (named.suffix == ".py" and named.is_file())):
        raise UsageError(f"--impl {implementation}: there is no Python source of that name to mutate")
    return top, named


def _mutants_of(path: Path, file: str, short: str) -> Iterator[SourceMutant]:
    source = path.read_text(encoding="utf-8")
    numbers: Counter[tuple[int, str]] = Counter()
    for edit in _thinned(_edits(source)):
        mutated = source[: edit.begin] + edit.after + source[edit.end :]
        compile(mutated, str(path), "exec")
        numbers[edit.line, edit.operator] += 1
        name = f"{short}:{edit.line} {edit.operator} {numbers[edit.line, edit.operator]}"
        original = source[edit.begin : edit.end]
        yield SourceMutant(name, file, edit.line, edit.operator, edit.begin, original, edit.after, mutated)


def _edits(source: str) -> list[Edit]:
    """Every operator's changes as text; unchanged code keeps its layout."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    positions, parents = wrapper.resolve(PositionProvider), wrapper.resolve(ParentNodeProvider)
    begins = [0, *(newline.end() for newline in re.finditer("\n", source))]
    edits = set()
    for operator, node, replacement in changes(wrapper.module, parents):
        span = positions[node]
        begin, end = (begins[position.line - 1] + position.column for position in (span.start, span.end))
        if source[begin:end] != replacement:
            edits.add(Edit(span.start.line, begin, operator, end, replacement))
    return sorted(edits)


def _thinned(edits: list[Edit]) -> list[Edit]:
    """At most MOST_PER_LINE changes per line.

    Rare operators come first, and each operator in COMMON has at most one.
    """
    used: Counter[str] = Counter()
    retained = []
    for line in sorted({edit.line for edit in edits}):
        chosen: list[Edit] = []
        here = [edit for edit in edits if edit.line == line]
        while here and len(chosen) < MOST_PER_LINE:
            edit = min(here, key=lambda edit: (edit.operator in COMMON, used[edit.operator], edit))
            used[edit.operator] += 1
            chosen.append(edit)
            refused = {edit.operator, *(COMMON if len(chosen) > 1 else ())} & {*COMMON}
            here = [candidate for candidate in here if candidate != edit and candidate.operator not in refused]
        retained += chosen
    return sorted(retained)
