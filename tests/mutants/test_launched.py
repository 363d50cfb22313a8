"""Launches of moe_fast's kernels count for all their functions: a GPU runs all their mutants."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_fast

FOLDER = Path(str(moe_fast.__file__)).parent


def compiled(file: Path) -> set[str]:
    """The functions in a file that Triton compiles, as "file:function"."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    names = [
        node.name for node in functions if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return {f"{file.relative_to(FOLDER.parent).as_posix()}:{name}" for name in names}


@pytest.fixture(scope="module")
def launched() -> dict[str, set[str]]:
    """The functions for which a launch of each kernel counts."""
    program, off = [sys.executable, "-m", "tests.mutants.launched"], {"TRITON_INTERPRET": "0"}
    done = subprocess.run(program, env=os.environ | off, capture_output=True, text=True, check=True)
    return {name: set(calls) for name, calls in json.loads(done.stdout).items()}


def test_launches_count_for_each_function_of_a_kernel(launched):
    functions = set().union(*(compiled(file) for file in FOLDER.rglob("_[a-z]*.py")))
    assert len(launched) > 50 and len(functions) > 200
    assert functions - set().union(*launched.values()) == set()


def test_a_launch_does_not_count_for_other_kernels(launched):
    calls = launched["moe_fast.permutation._chunks:sort_chunks_kernel"]
    kernels = {call for call in calls if os.path.basename(call).startswith("_")}
    chunks = "moe_fast/permutation/_chunks.py"
    assert kernels == {f"{chunks}:load_chunks", f"{chunks}:sort_chunks_kernel"}
