"""A family is added by one record, named in the environment, without a change of the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE, KERNELS = "tests.engine.toy", "tests.engine.toy.kernels"
LINES = 60  # limit for a family of one function
EVERY_LAW = {
    *("history", "determinism", "buffer_reuse", "scaling"),
    *("repeated", "interleaved", "other_thread", "inference_mode", "no_grad", "accumulated", "autocast", "own_memory"),
}


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"MOE_CONFORMANCE_FAMILIES": MODULE, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


CHOSEN = """
import json
from conformance.catalogue import CONTRACTS
from conformance.core.case import case_from
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
space = Space()
lists = {
    "drawn": drawn(strategy("reverse", space), 1, 200),
    "covered": covering_cases("reverse", space).cases,
    "far": scope_of("reverse", space).far(),
    "fixed": fixed_cases("reverse", space),
    "neighbours": [scope_of("reverse", space).neighbour(c) for c in drawn(strategy("reverse", space), 2, 20)],
    "without kept": drawn(strategy("reverse", Space(without={"reverse": frozenset({"kept"})})), 1, 40),
    "not differentiable": covering_cases("reverse", Space(not_differentiable=frozenset({"reverse"}))).cases,
}
for cases in lists.values():
    for case in cases:
        assert case_from(json.loads(case.text)) == case
        CONTRACTS["reverse"].problem(case)
print(json.dumps({kind: [case.record() for case in cases] for kind, cases in lists.items()}))
"""


@pytest.fixture(scope="module")
def chosen() -> dict[str, list[dict]]:
    done = python("-c", CHOSEN)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def values(cases: list[dict], field: str, default: object = "") -> set:
    return {case.get(field, default) for case in cases}


def test_a_family_of_one_function_is_short():
    code = [line for line in (ROOT / "tests/engine/toy/__init__.py").read_text().splitlines() if line.strip()]
    assert len(code) <= LINES


def test_random_cases_have_every_value_layout_gradient_and_law(chosen):
    cases = chosen["drawn"]
    assert values(cases, "dtype", "float32") == {"float32", "bfloat16", "float16"}
    assert values(cases, "kept", 0) == {0, 1, 2, 5}
    assert values(cases, "grads") == {"", "x"}
    assert {"strided", "transposed", "shifted", "expanded"} < values(cases, "layout")
    assert {("d_y", "expanded"), ("x", "strided")} <= {(c.get("layout_of"), c.get("layout")) for c in cases}
    assert values(cases, "law") == EVERY_LAW
    assert {0, 1} < values(cases, "rows", 1) and max(values(cases, "rows", 1)) > 60


def test_the_covering_array_has_every_pair(chosen):
    cases = chosen["covered"]
    for grads in ("", "x"):
        some = [case for case in cases if case.get("grads", "") == grads]
        assert values(some, "dtype", "float32") == {"float32", "bfloat16"}
        assert values(some, "kept", 0) == {0, 2}
        assert ("d_y" in values(some, "layout_of")) == (grads == "x")
    assert values(cases, "rows", 1) == {5}


def test_each_tensor_is_far_in_each_dimension(chosen):
    places = {(case["layout_of"], case["layout"]) for case in chosen["far"]}
    assert places == {(name, layout) for name in ("x", "d_y") for layout in ("wide_rows", "wide_columns")}
    assert values(chosen["far"], "dtype") == {"bfloat16"}


def test_a_refused_setting_or_gradient_is_not_asked_for(chosen):
    assert values(chosen["without kept"], "kept", 0) == {0}
    assert values(chosen["not differentiable"], "grads") == {""}


def test_golden_and_illegal_calls_are_listed(chosen):
    assert [case.get("golden") or case["illegal"] for case in chosen["fixed"]] == ["one_kept", "kept_negative"]


def test_the_command_lists_it():
    listed = python("-m", "conformance", "list")
    assert "reverse(kept) -> y" in listed.stdout, listed.stderr


def test_a_run_judges_it_and_finds_the_smallest_failing_case(tmp_path):
    honest = python("-m", "conformance", "run", "--impl", KERNELS, "--profile", "gate", "--jobs", "1")
    assert honest.returncode == 0, honest.stdout + honest.stderr
    assert "1 functions" in honest.stdout
    wrong = python("-m", "conformance", "run", "--impl", f"{MODULE}.wrong", "--profile", "gate", "--jobs", "1",
                   "--corpus", str(tmp_path))  # fmt: skip
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    saved = [json.loads(path.read_text())["case"] for path in tmp_path.glob("*.json")]
    assert {"schema": 1, "function": "reverse", "rows": 4, "dtype": "bfloat16"} in saved
    text = json.dumps({"function": "reverse", "rows": 4, "dtype": "bfloat16"})
    assert python("-m", "conformance", "replay", text, "--impl", f"{MODULE}.wrong").returncode == 1
    assert python("-m", "conformance", "replay", text, "--impl", KERNELS).returncode == 0


def test_its_planted_defect_is_killed():
    done = python("-m", "conformance", "mutants", "--impl", KERNELS, "--only", "TOY01", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed by value" in done.stdout
