"""Lengths that a reader can keep in view: of files, of functions, and of what is said twice."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("moe_ref", "moe_fast", "conformance", "benchmarks", "evidence", "examples", "tests")
MOST_LINES = 400  # of a file
MOST_LINES_OF_A_FUNCTION = 60
REPEATED = 12  # lines in two places


def sources() -> dict[str, str]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def too_long(path: str, source: str) -> list[str]:
    """The file and its functions with more lines than allowed."""
    lines = len(source.splitlines())
    found = [f"{path}: {lines} lines"] if lines > MOST_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            found += [f"{path}: {node.name}, {lines} lines"] if lines > MOST_LINES_OF_A_FUNCTION else []
    return found


def repeated(files: dict[str, str]) -> list[str]:
    """Places of the same REPEATED lines, imports and blank lines aside."""
    places = defaultdict(list)
    for path, source in files.items():
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped = {number for node in imports for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines = [x.strip() for i, x in enumerate(source.splitlines(), 1) if x.strip() and i not in skipped]
        for start in range(len(lines) - REPEATED + 1):
            places["\n".join(lines[start : start + REPEATED])].append(path)
    return sorted({" and ".join(sorted(found)) for found in places.values() if len(found) > 1})


def test_no_file_and_no_function_is_too_long():
    files = sources()
    assert len(files) > 500
    assert [problem for path, source in files.items() for problem in too_long(path, source)] == []


def test_no_two_places_say_the_same():
    assert repeated(sources()) == []


def test_long_and_repeated_code_is_found():
    function = "def f():\n" + "".join(f"    x = {number}\n" for number in range(60))
    assert too_long("a.py", function) == ["a.py: f, 61 lines"]
    assert too_long("a.py", "x = 1\n" * 401) == ["a.py: 401 lines"]
    lines = "".join(f"x = {number}\n" for number in range(12))
    assert repeated({"a.py": lines, "b.py": "\n" + lines, "c.py": lines[:-7]}) == ["a.py and b.py"]
