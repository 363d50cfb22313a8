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


WRONG = json.dumps({"function": "reverse", "rows": 4, "dtype": "bfloat16"})
COMMANDS = {
    "list": ["list"],
    "honest": ["run", "--impl", KERNELS, "--profile", "gate", "--jobs", "1"],
    "wrong": ["run", "--impl", f"{MODULE}.wrong", "--profile", "gate", "--jobs", "1", "--corpus", "kept"],
    "replay wrong": ["replay", WRONG, "--impl", f"{MODULE}.wrong"],
    "replay honest": ["replay", WRONG, "--impl", KERNELS],
    "mutants": ["mutants", "--impl", KERNELS, "--only", "TOY01", "--jobs", "1"],
}
CALLED = """
import contextlib, io, json, sys
from conformance.cli import main
if __name__ == "__main__":
    for words in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(words)
        print(json.dumps([code, out.getvalue()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy")


def python(folder: Path, program: str, payload: object = None) -> list:
    """The lines that a program prints as JSON, where the environment names the family."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"MOE_CONFORMANCE_FAMILIES": MODULE, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(payload),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def chosen(folder) -> dict[str, list[dict]]:
    return python(folder, CHOSEN)[0]


@pytest.fixture(scope="module")
def told(folder) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each command."""
    return dict(zip(COMMANDS, python(folder, CALLED, [*COMMANDS.values()]), strict=True))


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


def test_the_command_lists_it(told):
    assert "reverse(kept) -> y" in told["list"][1]


def test_a_run_judges_it_and_finds_the_smallest_failing_case(told, folder):
    assert told["honest"][0] == 0 and "1 functions" in told["honest"][1], told["honest"]
    assert told["wrong"][0] == 1, told["wrong"]
    saved = [json.loads(path.read_text())["case"] for path in (folder / "kept").glob("*.json")]
    assert {"schema": 1} | json.loads(WRONG) in saved
    assert (told["replay wrong"][0], told["replay honest"][0]) == (1, 0)


def test_its_planted_defect_is_killed(told):
    assert told["mutants"][0] == 0 and "killed by value" in told["mutants"][1], told["mutants"]
