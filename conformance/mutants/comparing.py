"""Makes a copy of an implementation that compares mutants with the original (weak mutation).

A mutant changes an expression. If the changed expression has the original's value each time that a
case evaluates it, the mutant behaves in that case like the original, and need not run. One run of
the cases on the copy shows this for all mutants. Kernels are not compared, because Python does not
run them.
"""

import ast
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.core.case import Case
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.engine.run.session import FAILING
from conformance.mutants.automatic import SourceMutant, copy_package

IMPORT = "from conformance.engine.child.changes import compared as __compared__"
DISTURBED = (*FAILING, "BLOCKED")  # marks cases in which computing the changes has changed the original's behaviour
COMPILED = re.compile(r"jit|constexpr")  # decorators of what Python does not run
NOT_TWICE = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
NOT_TWICE_TEXT = re.compile(r"#|\bsuper\(|['\"]{3}")


@dataclass(frozen=True)
class Place:
    """An expression that may be computed twice."""

    begin: int
    end: int
    tested: bool  # whether only the truth of its value is used


def differing(
    mutants: Iterable[SourceMutant], implementation: str, cases: Iterable[Case], jobs: int
) -> dict[str, set[str]]:
    """The ids of the cases in which each mutant differs, by the names of the mutants that can be
    compared. A case that the copy does not pass counts for all of them.
    """
    with tempfile.TemporaryDirectory(prefix="moe-conformance-comparing-") as folder:
        differs: dict[str, set[str]] = {name: set() for name in write_comparing(mutants, implementation, Path(folder))}
        with Pool(ChildOptions(implementation, search=(folder,)), jobs) as pool:
            for case, outcome in pool.run(cases):
                for name in differs if outcome.status in DISTURBED else outcome.calls:
                    differs[name].add(case.id)
    return differs


def write_comparing(mutants: Iterable[SourceMutant], implementation: str, folder: Path) -> set[str]:
    """Copy the top-level package, with mutants compared where they can be; the names of these."""
    copy_package(implementation, folder)
    by_file: dict[str, list[SourceMutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    names = set()
    for file, group in by_file.items():
        source, compared = comparing(group)
        (folder / file).write_text(source, encoding="utf-8")
        names |= compared
    return names


def comparing(mutants: list[SourceMutant]) -> tuple[str, set[str]]:
    """The source of the mutants' file with each of them compared where it can be, and their names.

    Lines keep their numbers, so that kernels keep their places in a cache.
    """
    original = mutants[0].original
    places = {(comparison.begin, comparison.end): comparison for comparison in _places(original)}
    changes: dict[Place, list[tuple[str, str]]] = {}
    for mutant in mutants:
        begin, original_text, mutated_text = _value(mutant)
        comparison = places.get((begin, begin + len(original_text)))
        if comparison and _may_run_twice(original_text) and _may_run_twice(mutated_text):
            changes.setdefault(comparison, []).append((mutant.name, mutated_text))
    inner = sorted(changes, key=lambda comparison: (comparison.begin, -comparison.end))
    text = "".join(_written(original, 0, len(original), inner, changes))
    return _with_import(text), {name for group in changes.values() for name, _ in group}


def _value(mutant: SourceMutant) -> tuple[int, str, str]:
    """The start of the changed expression, with its original and its mutated text. For `dim=0`
    these begin with the 0.
    """
    original_keyword, mutated_keyword = (re.match(r"(\w+=)(?!=)", text) for text in (mutant.before, mutant.after))
    if original_keyword and mutated_keyword and original_keyword[0] == mutated_keyword[0]:
        skipped = original_keyword.end()
        return mutant.begin + skipped, mutant.before[skipped:], mutant.after[skipped:]
    return mutant.begin, mutant.before, mutant.after


def _may_run_twice(text: str) -> bool:
    if NOT_TWICE_TEXT.search(text):
        return False
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except SyntaxError:
        return False  # a statement
    return not any(isinstance(node, NOT_TWICE) for node in ast.walk(tree))


def _written(
    source: str, begin: int, end: int, inner: list[Place], changes: dict[Place, list[tuple[str, str]]]
) -> Iterator[str]:
    """The pieces of source[begin:end] with its comparisons, outer ones around inner ones."""
    while inner:
        outermost = inner[0]
        within = [candidate for candidate in inner[1:] if candidate.end <= outermost.end]
        inner = inner[1 + len(within) :]
        alternatives = "".join(
            f", ({name!r}, lambda: ({' '.join(mutated_text.split())}))" for name, mutated_text in changes[outermost]
        )
        yield source[begin : outermost.begin]
        yield "__compared__(lambda: ("
        yield from _written(source, outermost.begin, outermost.end, within, changes)
        yield f"), {outermost.tested}{alternatives})"
        begin = outermost.end
    yield source[begin:end]


def _with_import(source: str) -> str:
    """The source with the import behind its docstring and its imports from the future."""
    last = None
    for statement in ast.parse(source).body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        last = statement
    if last is None:
        return f"{IMPORT}\n{source}"
    end = _Offsets(source).end(last)
    return f"{source[:end]}; {IMPORT}{source[end:]}"


class _Offsets:
    """Where syntax nodes begin and end in a text, in characters."""

    def __init__(self, source: str) -> None:
        self.lines = source.splitlines(keepends=True)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))

    def begin(self, node: ast.stmt | ast.expr) -> int:
        return self._at(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return self.begins[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def _places(source: str) -> Iterator[Place]:
    """The expressions in the bodies of functions that Python runs."""
    offsets = _Offsets(source)

    def inside(node: ast.AST, function: bool, tested: bool) -> Iterator[Place]:
        if isinstance(node, ast.FunctionDef):
            if not any(COMPILED.search(ast.unparse(decorator)) for decorator in node.decorator_list):
                for statement in node.body:
                    yield from inside(statement, True, False)
            return
        if isinstance(node, ast.ClassDef | ast.JoinedStr | ast.AsyncFunctionDef):
            function = False
        if isinstance(node, ast.expr) and function and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            yield Place(offsets.begin(node), offsets.end(node), tested)
            if isinstance(node, ast.BoolOp):
                yield from beginnings(node, tested)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from inside(child, function, _is_tested(node, field, tested))

    def beginnings(node: ast.BoolOp, tested: bool) -> Iterator[Place]:
        """The start of `a and b` in `a and b and c`, which is no syntax node of its own."""
        for value, following in zip(node.values[1:-1], node.values[2:], strict=True):
            between = source[offsets.end(value) : offsets.begin(following)]
            if word := re.search(r"\s*\b(and|or)\b", between):
                yield Place(offsets.begin(node), offsets.end(value) + word.start(), tested)

    return inside(ast.parse(source), False, False)


def _is_tested(node: ast.AST, field: str, tested: bool) -> bool:
    """Whether only the truth of the node's parts in this field is used."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return field == "test"
        case ast.comprehension():
            return field == "ifs"
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp():
            return tested
    return False
