"""No lines of code are written twice."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("moe_ref", "moe_fast", "conformance", "fast_interpreter", "benchmarks", "evidence", "examples", "tests")
REPEATED = 12  # lines in two places


def sources() -> dict[str, str]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def repeated(files: dict[str, str]) -> list[str]:
    """The files that share REPEATED consecutive lines; imports and blank lines do not count."""
    paths_by_lines = defaultdict(list)
    for path, source in files.items():
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped = {number for node in imports for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines = [x.strip() for i, x in enumerate(source.splitlines(), 1) if x.strip() and i not in skipped]
        for start in range(len(lines) - REPEATED + 1):
            paths_by_lines["\n".join(lines[start : start + REPEATED])].append(path)
    return sorted({" and ".join(sorted(paths)) for paths in paths_by_lines.values() if len(paths) > 1})


def test_no_two_files_have_the_same_lines():
    assert repeated(sources()) == []


def test_repeated_code_is_found():
    lines = "".join(f"x = {number}\n" for number in range(12))
    assert repeated({"a.py": lines, "b.py": "\n" + lines, "c.py": lines[:-7]}) == ["a.py and b.py"]
