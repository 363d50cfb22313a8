"""`compare`: what became worse or better between two reports."""

import copy
import json

import pytest

from conformance.cli import main
from conformance.report.compare import compared

CASE = {"schema": 1, "function": "permute", "tokens": 2, "experts": 1, "hidden": 1, "routing": [1, 1]}
FINDING = {"output": "rows", "check": "exact", "message": "row 1 holds token 0", "index": [1, 0]}
FAILURE = {"function": "permute", "case": CASE, "finding": FINDING, "status": "FAIL", "reason": "", "id": "x"}
GOOD = {"status": "conformant", "cases": 100, "counts": {"PASS": 100}, "without": []}
OLD = {
    "verdict": "CONFORMANT", "implementation": "mine", "profile": "gate", "seed": 0, "device": "CPU",
    "versions": {"torch": "2.11"}, "cases": 200, "seconds": 10.0, "kernels_compiled": 0, "failures": [],
    "functions": {"permute": GOOD, "gate": GOOD},
    "coverage": {"permute": {"fields": {"align": {"0": [5, 0], "16": [5, 0]}}, "seconds": 4.0}},
}  # fmt: skip


def changed(**fields) -> dict:
    return copy.deepcopy(OLD) | fields


def text_of(old: dict, new: dict) -> tuple[str, bool]:
    lines, worse = compared(old, new)
    return "\n".join(lines), worse


def test_equal_reports_differ_in_nothing():
    text, worse = text_of(OLD, changed())
    assert not worse
    assert text.splitlines() == [
        *("CONFORMANT → CONFORMANT   mine → mine", ""),
        "run        200 → 200 cases, 10 → 10 s",
    ]


def test_a_new_failure_is_worse_and_a_fixed_one_is_not():
    broken = changed(verdict="NOT CONFORMANT", failures=[FAILURE])
    text, worse = text_of(OLD, broken)
    assert worse and "new        permute: FAIL rows [exact] row 1 holds token 0 (T=2 H=1 E=1" in text
    text, worse = text_of(broken, OLD)
    assert not worse and "fixed      permute: FAIL" in text
    same_kind = {**FAILURE, "finding": {**FINDING, "message": "row 0 holds token 1"}}  # of the same kind
    assert not text_of(broken, changed(failures=[same_kind]))[1]
    another = {**FAILURE, "finding": {**FINDING, "output": "probs"}}
    assert text_of(broken, changed(failures=[another]))[1]


@pytest.mark.parametrize("status", ["differs", "not offered", "too little tested"])
def test_a_function_that_is_no_longer_conformant_is_worse(status):
    functions = {"permute": GOOD, "gate": {**GOOD, "status": status, "cases": 0}}
    text, worse = text_of(OLD, changed(functions=functions))
    assert worse and f"gate was conformant and is {status}" in text


def test_an_unchanged_function_has_its_earlier_verdict():
    unchanged = {"status": "unchanged since", "cases": 0, "counts": {}, "without": [], "earlier": GOOD}
    assert not text_of(OLD, changed(functions={"permute": GOOD, "gate": unchanged}))[1]


def test_drift_is_shown_and_is_not_worse():
    fewer = {**GOOD, "cases": 60, "counts": {"PASS": 50, "DECLARED_UNSUPPORTED": 10}}
    narrow = {"permute": {"fields": {"align": {"0": [5, 0]}}, "seconds": 9.0}}
    text, worse = text_of(OLD, changed(functions={"permute": fewer, "gate": GOOD}, coverage=narrow, device="H200"))
    assert not worse and "other device: CPU → H200" in text
    (line,) = (line for line in text.splitlines() if line.startswith("permute"))
    assert line.split(maxsplit=1)[1] == (
        "100 → 60 cases; 0% → 17% declared unsupported; 4.0 → 9.0 s; no longer covered: align=16"
    )


def test_an_error_that_comes_nearer_to_its_limit_is_shown():
    def scored(*bins: int, kind: str = "error") -> dict:
        covered = OLD["coverage"]["permute"] | {"scores": {kind: [int(i in bins) for i in range(20)]}}
        return changed(coverage={"permute": covered})

    assert "largest error 0.25 → 0.90 of its limit" in text_of(scored(0, 4), scored(1, 17))[0]
    assert "largest" not in text_of(scored(0, 4), scored(2, 5))[0]
    assert "largest" not in text_of(scored(4), scored(17, kind="ratio"))[0]
    assert "largest" not in text_of(OLD, scored(17))[0]


def test_the_command_ends_with_5_if_anything_became_worse(tmp_path, capsys):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, report in zip(paths, (OLD, changed(failures=[FAILURE])), strict=True):
        path.write_text(json.dumps(report))
    old, new = map(str, paths)
    assert (main(["compare", old, old]), main(["compare", old, new])) == (0, 5)
    assert main(["compare", old, str(tmp_path / "none.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
