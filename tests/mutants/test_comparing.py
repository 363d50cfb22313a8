"""Mutants that are compared with the original tell in which cases they differ."""

import ast
import json
import subprocess
import sys

import pytest

pytest.importorskip("libcst")

from conformance.engine.child.changes import compared, take
from conformance.mutants.automatic import source_mutants
from conformance.mutants.comparing import comparing, differing, write_comparing
from tests.common.suite import gate_cases

PACKAGE = "sizes_for_comparing"
SOURCE = '''"""A docstring, é."""

from __future__ import annotations

import triton


@triton.jit
def kernel(x_ptr, n):
    """Never compared."""
    return n + 1


def plan(rows, width, wide=False):
    """Each expression may be compared; what a walrus names may not."""
    if rows > 0 and width > 0 and not wide:
        tiles = (rows + 1) * width
    else:
        tiles = max(rows, 0)
    if (half := width // 2) > 3:
        tiles = tiles - half
    return dict(tiles=tiles, name=f"{rows + 1}",
                last=rows % 4)
'''
RUN = f"""
import json, sys
sys.path.insert(0, sys.argv[1])
from conformance.engine.child.changes import take
import {PACKAGE} as package
found = []
for arguments in ((8, 2), (0, 5), (1, 8, True)):
    found.append((package.plan(*arguments), sorted(take())))
print(json.dumps(found))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / f"{PACKAGE}.py").write_text(SOURCE)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path, str(home)])
    return source_mutants(PACKAGE)


def test_all_but_kernels_and_names_given_inside_are_compared_and_lines_keep_their_places(package):
    text, names = comparing(package)
    not_compared = [mutant for mutant in package if mutant.name not in names]
    assert {mutant.before for mutant in not_compared} == {"n + 1", "(half := width // 2) > 3"}
    assert len(names) == 9
    lines = {node.name: node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    lines_before = {node.name: node.lineno for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)}
    assert lines == lines_before and text.count("\n") == SOURCE.count("\n")


def test_a_copy_has_the_same_results_and_tells_each_change_that_differs(package, tmp_path):
    """Against the truth: each mutant run by itself."""
    names = write_comparing(package, PACKAGE, tmp_path / "copy")
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "copy")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    original: dict = {}
    exec(compile(SOURCE, "original", "exec"), original)
    calls = ((8, 2), (0, 5), (1, 8, True))
    assert [result for result, _ in results] == [original["plan"](*call) for call in calls]
    changed = set()
    for mutant in package:
        if mutant.name in names:
            mutated: dict = {}
            exec(compile(mutant.source, "mutant", "exec"), mutated)
            for call, (result, names_that_differ) in zip(calls, results, strict=True):
                if mutated["plan"](*call) != result:
                    assert mutant.name in names_that_differ, (mutant, call)
                    changed.add(mutant.name)
    assert len(changed) > 6
    assert set(names) - {name for _, names_that_differ in results for name in names_that_differ} != set()


def test_a_change_is_compared_by_its_truth_where_only_that_is_used():
    take()
    assert compared(lambda: 3, True, ("same", lambda: 7), ("other", lambda: 0)) == 3
    assert compared(lambda: (1, 0.0), False, ("equal", lambda: (1, 0.0)), ("minus", lambda: (1, -0.0))) == (1, 0.0)
    assert compared(lambda: 1, False, ("type", lambda: True), ("raises", lambda: 1 // 0)) == 1
    assert take() == {"other", "minus", "type", "raises"}
    assert take() == set()


def test_what_a_change_calls_is_not_compared():
    take()

    def called() -> int:
        return compared(lambda: 1, False, ("inner", lambda: 2))

    assert compared(lambda: 1, False, ("outer", called)) == 1
    assert take() == set()


def test_a_mutant_differs_in_the_cases_that_need_what_it_changes():
    """The negative mark of an empty slot: a change that cases without one do not see."""
    cases = [case for case in gate_cases("multihot_to_indices") if not case.illegal][:24]
    mutants = source_mutants("moe_fast", {"moe_fast/permutation/routing_map.py"})
    differs = differing(mutants, "moe_fast", cases, 1)
    ids = {case.id for case in cases}
    assert all(case_ids <= ids for case_ids in differs.values())
    assert any(set() < case_ids < ids for case_ids in differs.values())
    assert any(case_ids == set() for case_ids in differs.values())
