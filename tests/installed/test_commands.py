"""Every command of the documents runs, from a wheel, in a folder that has only a user's files."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.installed.conftest import listing, of_user, read_only
from tests.installed.documented import LEFT, MINE, P21, PAGES, ROOT, RUNS, Run, commands, could_run
from tests.installed.steps import REPLAY, transcript


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command.removeprefix("moe-conformance ")[:60])
def test_a_command_of_the_documents_ends_as_it_should(results_by_step, run: Run):
    ((code, out),) = results_by_step[run.command]
    assert code == run.code, out


def test_every_command_is_run_or_has_a_reason_not_to_be():
    with_a_step = {run.command for run in RUNS} | {command for command, _ in transcript()}
    for command, pages in commands().items():
        reasons = [omitted.reason for omitted in LEFT if re.match(omitted.pattern, command)]
        assert command in with_a_step or len(reasons) == 1, (command, pages, reasons)


def test_no_command_that_could_run_is_left_out():
    with_a_step = {run.command for run in RUNS}
    left_out = [c for c in commands() if c not in with_a_step and any(re.match(omitted.pattern, c) for omitted in LEFT)]
    assert len(left_out) > 20 and not [command for command in left_out if could_run(command)]


def test_every_reason_has_a_command_and_a_test_of_the_same_code():
    for omitted in LEFT:
        assert any(re.match(omitted.pattern, command) for command in commands()), omitted
        assert (ROOT / omitted.tested).exists(), omitted


def test_a_command_that_nobody_runs_is_found(monkeypatch):
    assert could_run("moe-conformance run --impl my_kernels --function permute")
    assert not could_run("moe-conformance run --impl moe_fast")
    assert not any(re.match(omitted.pattern, f"{MINE} --seconds 3") for omitted in LEFT)


def printed(page: str, command: str) -> list[str]:
    """The lines that a page prints after a command, up to the first that ends in an ellipsis."""
    text = (ROOT / page).read_text().split(f"    {command}", 1)[1]
    lines = [line.removeprefix("    ") for line in re.split(r"\n\n(?! {4})", text)[0].splitlines()[1:]]
    return [line for line in lines if re.match(r"NOT CONFORMANT|permute|  (smallest|replay)", line)]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_verdict_of_a_page_is_what_is_printed(results_by_step, page):
    head, *lines = printed(page, P21)
    out = results_by_step[P21][0][1].splitlines()
    assert len(lines) == 3 and set(lines) <= set(out)
    assert head.startswith("NOT CONFORMANT   1 of 6 functions differ")
    assert any(line.startswith("NOT CONFORMANT   1 of 1 functions differ") for line in out)


def lasting(line: str) -> str:
    """A line without the numbers that change with the suite and the machine."""
    line = re.sub(r"(d_\w+ \[\w+\]).*", r"\1", line)
    return re.sub(r"\d+ cases.*? s |\d+ cases|\d+ functions not offered|[\d.]+%", "#", line)


def test_the_commands_of_the_tutorial_print_what_it_shows(results_by_step):
    remaining = {command: iter(results) for command, results in results_by_step.items()}
    for command, lines in transcript():
        _, out = next(remaining[f"$ {command}"])
        assert {*map(lasting, lines)} <= {*map(lasting, out.splitlines())}, (command, out)


def test_a_page_that_shows_another_verdict_is_found(results_by_step):
    (_, out) = results_by_step[f"$ {REPLAY}"][0]
    assert "FAIL: probs [exact] [0] is 0.98" in out and "PASS" not in out
    assert "PASS" in results_by_step[f"$ {REPLAY}"][1][1]


def test_the_page_of_a_verdict_and_the_merged_one_are_files(results_by_step, user_folder):
    page = (user_folder / "verdict.html").read_text()
    assert page.startswith("<!doctype html>") and "CONFORMANT" in page
    ((_, merged),) = results_by_step["moe-conformance merge verdict-*.json --report verdict.html"]
    shards = [json.loads((user_folder / f"verdict-{i}.json").read_text())["cases"] for i in (1, 2)]
    assert all(shards) and f"· {sum(shards)} cases" in merged


def test_the_script_and_another_projects_options_work_beside_the_wheel(installed, user_folder):
    environment = of_user(installed)
    command = [str(installed / "bin" / "moe-conformance"), "--version"]
    assert subprocess.run(command, cwd=user_folder, env=environment, capture_output=True).stdout.startswith(b"moe-conf")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conformance.plugin", "--device", "x"]
    environment |= {"PYTHONSAFEPATH": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *command, "test_host.py"], cwd=user_folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_pages_with_commands_are_found():
    assert {str(page) for pages in commands().values() for page in pages} >= {"README.md", "docs/install.md"}
    assert len(PAGES) > 30


def test_no_command_creates_or_changes_a_file_of_the_installed_package(results_by_step):
    assert results_by_step["changed"] == []


def test_a_changed_new_or_removed_file_is_found_and_a_read_only_folder_refuses_it(tmp_path):
    (tmp_path / "old").write_text("x")
    (tmp_path / "inside").mkdir()
    listed = listing(tmp_path)
    (tmp_path / "inside" / "brief").touch()
    (tmp_path / "inside" / "brief").unlink()
    (tmp_path / "old").write_text("y")
    changed = {os.path.basename(name) for name, _ in listed.items() ^ listing(tmp_path).items()}
    assert changed == {"old", "inside"}
    if mounted := read_only(tmp_path):
        done = subprocess.run([*mounted, "touch", str(tmp_path / "new")], capture_output=True, text=True)
        assert done.returncode != 0 and "Read-only" in done.stderr
