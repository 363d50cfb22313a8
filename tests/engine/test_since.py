"""`--since` judges the functions that changed, and says what became of the others."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.engine.footprint.footprint import Footprints
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.revision import footprints_at
from conformance.engine.run.session import Session, judge
from conformance.engine.run.since import Since, since_report, since_revision, under
from conformance.engine.run.verdict import UNCHANGED, Verdict
from conformance.interface import UsageError
from conformance.report import report_text
from conformance.report.terminal import lines
from tests.engine.footprint_kit import edited
from tests.engine.footprint_kit import write as write_kit
from tests.engine.verdict_helpers import ENOUGH, Book

NOW = Footprints({"the suite": "s"}, {"gate": {"kit.gating": "a", "kit.registry": "b"}, "jitter": {"kit.noise": "c"}})
BOTH = ("gate", "jitter")
DESCRIPTION = {"device_name": "CPU", "ranks": 4, "versions": {"torch": "2.0"}}


def report_of(footprints: Footprints, **statuses: str) -> dict:
    """A report of `gate` and `jitter`, as JSON."""
    functions = {name: {"status": statuses.get(name, "conformant"), "cases": 3} for name in ("gate", "jitter")}
    return json.loads(json.dumps({"functions": functions, "footprints": footprints.record()}))


def with_part(name: str, label: str, digest: str) -> Footprints:
    return Footprints(NOW.conditions, NOW.functions | {name: NOW.functions[name] | {label: digest}})


# ---- what is judged


UNJUDGED = report_of(NOW)
UNJUDGED["functions"]["gate"] = {"status": UNCHANGED, "earlier": {}}  # a revision alone says that it is unchanged
WITHOUT = [None, {}, {"parts": ["a b"]}, {"parts": 3, "functions": {}, "conditions": {}}]


@pytest.mark.parametrize(
    ("now", "report", "reasons"),
    [
        (NOW, report_of(NOW), {}),
        (with_part("gate", "kit.registry", "other"), report_of(NOW), {"gate": "changed kit.registry"}),
        (NOW, report_of(with_part("gate", "kit.plain", "d")), {"gate": "changed kit.plain"}),
        (NOW, report_of(NOW, gate="differs"), {"gate": "differs in a.json"}),
        (NOW, report_of(Footprints(NOW.conditions, {"gate": NOW.functions["gate"]})), {"jitter": "new"}),
        (NOW, report_of(replace(NOW, conditions={"the suite": "other"})), dict.fromkeys(BOTH, "changed the suite")),
        *((NOW, report_of(NOW) | {"footprints": x}, dict.fromkeys(BOTH, "a.json has no footprints")) for x in WITHOUT),
        (NOW, UNJUDGED, {"gate": "not judged in a.json"}),
    ],
)
def test_a_function_is_judged_where_its_result_may_be_another(now, report, reasons):
    since = since_report(now, report, "a.json")
    assert since.reasons == reasons
    assert since.unchanged == {name: x for name, x in report["functions"].items() if name not in reasons}


def test_a_revision_says_nothing_about_results():
    assert since_revision(NOW, NOW, "HEAD").unchanged == {"gate": {}, "jitter": {}}


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        *(({name: x}, "CPU", "") for name, x in (("profile", "gate"), ("seed", 1), ("case_seconds", 9.0))),
        ({"implementation": "other"}, "CPU", ""),
        ({}, "H200", "changed the device"),
    ],
)
def test_other_options_and_another_device_change_every_function(options, device, reason):
    defaults = Options("kit", profile="smoke")
    earlier = under(NOW, defaults, DESCRIPTION, [], [])
    now = under(NOW, replace(defaults, **options), DESCRIPTION | {"device_name": device}, [], [])
    reasons = since_report(now, report_of(earlier), "a.json").reasons
    assert set(reasons) == set(BOTH) and reason in reasons["gate"]


# ---- the verdict


def verdict_of(folder: Path) -> Verdict:
    unchanged = {"permute": {"status": "conformant", "cases": 7}}
    since = Since(NOW, "a.json", unchanged, {"unpermute": "changed kit.sums"})
    return Book(folder).all_pass("permute").verdict(since=since)


def test_an_unchanged_function_is_not_tested_too_little(tmp_path):
    verdict = verdict_of(tmp_path)
    assert (verdict.exit_code, verdict.verdict, verdict.problems) == (0, "CONFORMANT", [])
    assert Book(tmp_path / "without").all_pass("permute").verdict().exit_code == 4
    assert verdict.functions["permute"].status == UNCHANGED
    assert verdict.functions["permute"].earlier == {"status": "conformant", "cases": 7}


def test_reports_name_what_was_judged_and_why(tmp_path):
    verdict = verdict_of(tmp_path)
    text = "\n".join(lines(verdict))
    assert "functions judged · 1 unchanged since a.json" in text
    assert "unchanged since a.json (conformant there): permute" in text
    assert f"conformant · {ENOUGH} cases · changed kit.sums" in text
    for ending, shown in ((".md", "unchanged since a.json (conformant there)"), (".xml", "unchanged since a.json")):
        (tmp_path / f"out{ending}").write_text(report_text(verdict, f"out{ending}"))
        assert shown in (tmp_path / f"out{ending}").read_text()


def test_a_run_that_was_interrupted_keeps_no_footprints(tmp_path):
    book = Book(tmp_path).all_pass()
    assert book.verdict(since=Since(NOW)).footprints == NOW.record()
    assert book.verdict(since=Since(NOW), interrupted=True).footprints == {}
    assert book.verdict(since=Since(NOW), is_complete=False).footprints == {}


def test_an_unchanged_function_is_no_regression_before_and_after(tmp_path):
    first = Book(tmp_path / "first").all_pass().verdict().record()
    unchanged = {"permute": first["functions"]["permute"]}
    since = Since(NOW, "a.json", unchanged)
    second = Book(tmp_path / "second").all_pass("permute").verdict(since=since, baseline=first)
    third = Book(tmp_path / "third").all_pass().verdict(baseline=second.record())
    assert (second.exit_code, third.exit_code) == (0, 0)


# ---- errors


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no such file"), ("{", "not a JSON report"), ("[]", "not a JSON report")]
)
def test_a_file_that_is_no_report_is_a_usage_error(tmp_path, content, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=rf"--since .*a\.json: .*{message}"):
        Session(Options("kit", since=str(path)), tmp_path / "ledger")


def test_an_unknown_revision_is_a_usage_error(tmp_path):
    git(write_kit(tmp_path), "init", "-q")
    with pytest.raises(UsageError, match=r"--since v9: is neither a JSON report nor a revision of .*, such as HEAD~1"):
        footprints_at("v9", ChildOptions("kit"), {"kit": str(tmp_path / "kit")})


def test_a_folder_outside_of_repositories_has_no_revisions(tmp_path):
    with pytest.raises(UsageError, match=r"--since main: .* is in no git repository"):
        footprints_at("main", ChildOptions("kit"), {"kit": str(write_kit(tmp_path) / "kit")})


# ---- whole runs


def git(folder: Path, *arguments: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def run(report: str, since: str = "") -> Verdict:
    """Judge the package in the working directory and write the report."""
    verdict = judge(Options("kit", profile="smoke", device="cpu", jobs=1, since=since, report=[report]))
    Path(report).write_text(report_text(verdict, report))
    return verdict


def judged(verdict: Verdict) -> dict[str, str]:
    """By judged function, why."""
    return {name: f.reason for name, f in verdict.functions.items() if f.status not in ("not offered", UNCHANGED)}


def test_a_chain_of_runs_judges_each_change_once(tmp_path, monkeypatch):
    git(write_kit(tmp_path), "init", "-q")
    git(tmp_path, "add", "kit")
    git(tmp_path, "commit", "-qm", "kit")
    monkeypatch.chdir(tmp_path)
    assert set(judged(run("first.json"))) == {"gate", "jitter", "z_loss"}
    for name, content in edited("scales.py", "return eps", "return 1 * eps").items():
        (tmp_path / "kit" / name).write_text(content)
    second = run("second.json", since="first.json")
    assert judged(second) == {"jitter": "changed kit.scales"}
    third = run("third.json", since="second.json")
    assert (third.verdict, third.exit_code, judged(third)) == ("UNCHANGED", 0, {})
    assert {f.earlier["status"] for f in third.functions.values() if f.status == UNCHANGED} == {"conformant"}
    assert third.functions["jitter"].earlier["cases"] == second.functions["jitter"].cases > 0
    assert judged(run("fourth.json", since="HEAD")) == {"jitter": "changed kit.scales"}
