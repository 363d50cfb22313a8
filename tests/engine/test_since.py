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
DESCRIPTION = {"device_name": "CPU", "ranks": 4, "versions": {"torch": "2.0"}}


def report_of(footprints: Footprints, **statuses: str) -> dict:
    """A report of `gate` and `jitter`, as JSON."""
    functions = {name: {"status": statuses.get(name, "conformant"), "cases": 3} for name in ("gate", "jitter")}
    return json.loads(json.dumps({"functions": functions, "footprints": footprints.record()}))


def with_part(name: str, label: str, digest: str) -> Footprints:
    return Footprints(NOW.conditions, NOW.functions | {name: NOW.functions[name] | {label: digest}})


# ---- what is judged


def test_nothing_changed_and_nothing_is_judged():
    since = since_report(NOW, report_of(NOW), "a.json")
    assert since.unchanged == report_of(NOW)["functions"]
    assert since.reasons == {}


def test_a_function_with_another_part_is_judged():
    since = since_report(with_part("gate", "kit.registry", "other"), report_of(NOW), "a.json")
    assert since.reasons == {"gate": "changed kit.registry"}
    assert set(since.unchanged) == {"jitter"}


def test_a_function_that_lost_a_part_is_judged():
    since = since_report(NOW, report_of(with_part("gate", "kit.plain", "d")), "a.json")
    assert since.reasons == {"gate": "changed kit.plain"}


def test_a_function_that_was_not_conformant_is_judged():
    since = since_report(NOW, report_of(NOW, gate="differs"), "a.json")
    assert since.reasons == {"gate": "differs in a.json"}


def test_a_function_that_the_report_lacks_is_judged():
    report = report_of(Footprints(NOW.conditions, {"gate": NOW.functions["gate"]}))
    assert since_report(NOW, report, "a.json").reasons == {"jitter": "new"}


def test_everything_is_judged_with_another_suite():
    report = report_of(replace(NOW, conditions={"the suite": "other"}))
    assert since_report(NOW, report, "a.json").reasons == dict.fromkeys(NOW.functions, "changed the suite")


@pytest.mark.parametrize("footprints", [None, {}, {"parts": ["a b"]}, {"parts": 3, "functions": {}, "conditions": {}}])
def test_everything_is_judged_if_the_report_has_no_footprints(footprints):
    report = report_of(NOW) | {"footprints": footprints}
    assert since_report(NOW, report, "a.json").reasons == dict.fromkeys(NOW.functions, "a.json has no footprints")


def test_a_revision_says_nothing_about_results():
    assert since_revision(NOW, NOW, "HEAD").unchanged == {"gate": {}, "jitter": {}}


def test_a_result_that_only_a_revision_vouches_for_is_no_result():
    report = report_of(NOW)
    report["functions"]["gate"] = {"status": UNCHANGED, "earlier": {}}
    assert since_report(NOW, report, "b.json").reasons == {"gate": "not judged in b.json"}


@pytest.mark.parametrize(
    "options", [{"profile": "gate"}, {"seed": 1}, {"case_seconds": 9.0}, {"implementation": "other"}]
)
def test_other_options_change_every_function(options):
    defaults = Options("kit", profile="smoke")
    earlier, now = (under(NOW, x, DESCRIPTION, [], []) for x in (defaults, replace(defaults, **options)))
    assert set(since_report(now, report_of(earlier), "a.json").reasons) == set(NOW.functions)


def test_another_device_changes_every_function():
    options = Options("kit", profile="smoke")
    earlier, now = (under(NOW, options, DESCRIPTION | {"device_name": name}, [], []) for name in ("CPU", "H200"))
    assert since_report(now, report_of(earlier), "a.json").reasons["gate"] == "changed the device"


# ---- the verdict


def verdict_of(folder: Path) -> Verdict:
    unchanged = {"permute": {"status": "conformant", "cases": 7}}
    since = Since(NOW, "a.json", unchanged, {"unpermute": "changed kit.sums"})
    return Book(folder).all_pass("permute").verdict(since=since)


def test_an_unchanged_function_is_not_tested_too_little(tmp_path):
    verdict = verdict_of(tmp_path)
    assert (verdict.exit_code, verdict.verdict, verdict.problems) == (0, "CONFORMANT", [])
    assert verdict.functions["permute"].status == UNCHANGED
    assert verdict.functions["permute"].earlier == {"status": "conformant", "cases": 7}


def test_the_same_function_without_since_is_tested_too_little(tmp_path):
    assert Book(tmp_path).all_pass("permute").verdict().exit_code == 4


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
    second = (
        Book(tmp_path / "second").all_pass("permute").verdict(since=Since(NOW, "a.json", unchanged), baseline=first)
    )
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
