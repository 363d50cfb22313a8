"""The standalone scripts of the findings need torch and Transformer Engine, and nothing of ours."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "te_findings").glob("*.py"))
PAGE = (ROOT / "docs" / "findings.md").read_text()
ALLOWED = {"subprocess", "sys", "torch", "transformer_engine"}
MOST = 40


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_there_is_a_script_for_every_finding_of_the_page():
    numbers = [path.name.partition("_")[0] for path in SCRIPTS]
    assert numbers == [f"{n:02}" for n in range(1, len(SCRIPTS) + 1)]
    headed = [n for n in range(1, 100) if f"**{n}. " in PAGE]
    assert [int(number) for number in numbers] == headed
    assert [path.name for path in SCRIPTS if f"`examples/te_findings/{path.name}`" not in PAGE] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_stands_alone(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) < MOST
    assert {name.partition(".")[0] for name in imported(tree)} <= ALLOWED
    assert (ast.get_docstring(tree) or "").startswith(f"Finding {int(path.name[:2])}: ")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_without_the_package_a_script_says_so(path, tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise ImportError('no such package')")
    (tmp_path / "torch.py").write_text("")
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    sentence = "This script needs transformer_engine and a GPU: no such package\n"
    assert (done.stdout, done.stderr, done.returncode) == (sentence, "", 2)
