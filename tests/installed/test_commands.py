"""Every command of the documents runs, from a wheel, in a folder that has only a user's files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.installed.documented import LEFT, MINE, P21, PAGES, ROOT, RUNS, Run, commands, could_run

# runs commands one after another: the words of each from stdin, its exit code and output to stdout
DRIVER = """
import contextlib, glob, io, json, os, pathlib, runpy, sys
from conformance.cli import main

def run(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            if isinstance(words, str):
                code = os.makedirs(words) or os.chdir(words) or 0
            elif isinstance(words, dict):
                code = [pathlib.Path(name).write_text(text) for name, text in words.items()] and 0
            elif words[0] == "moe-conformance":
                code = main([y for x in words[1:] for y in (sorted(glob.glob(x)) if "*" in x else [x])])
            else:
                sys.argv = words[1:]
                code = runpy.run_path(words[1], run_name="__main__") and 0
        except SystemExit as left:
            code = left.code or 0
    return code, out.getvalue()

print(json.dumps([run(words) for words in json.loads(sys.stdin.read())]))
"""
# also looks where it runs: in a child of the installed package, with the user's own environment
DISPATCH = """
import os

import conformance, moe_ref
from conformance.peers.reference_world import allgather_combine, allgather_dispatch

assert conformance.__file__.startswith({installed!r}) and moe_ref.__file__.startswith({installed!r})
assert os.environ["PYTHONPATH"] == {installed!r}
assert not set(os.environ) & {{"PYTHONSAFEPATH", "MOE_CONFORMANCE_ENVIRONMENT"}}
"""
HOST = "def pytest_addoption(parser):\n    parser.addoption('--device')\n    parser.addoption('--profile')\n"
REPLAY = "moe-conformance replay c8df06db888f --impl my_kernels"
Step = tuple[str, list[str]]  # a command, and the lines that the page prints after it


def kernels(page: str) -> str:
    """The first module that a page shows."""
    text = (ROOT / page).read_text()
    text = text[text.index("    from moe_ref") :]
    return (
        re.sub(r"^ {4}", "", re.split(r"^(?=\S| {4}\$)", text, flags=re.MULTILINE)[0], flags=re.MULTILINE).strip()
        + "\n"
    )


def transcript() -> list[Step]:
    """The commands of the first verdict with what they print; of gradients not the case, for it
    depends on the time that its reduction had.
    """
    found: list[Step] = []
    for line in re.findall(r"^ {4}(.*)$", (ROOT / "docs/first-verdict.md").read_text(), re.MULTILINE):
        if line.startswith("$ moe-conformance"):
            found.append((line.removeprefix("$ "), []))
        elif found and re.match(r"(CONFORMANT|NOT CONFORMANT|permute|FAIL|PASS|case:)", line):
            found[-1][1].append(line)
    return found


def stories() -> list[dict[str, str] | str]:
    """The first verdict: its files, written as its text says, and its commands."""
    wrong = kernels("docs/first-verdict.md")
    old = wrong[wrong.index("    row_probs = None\n") : wrong.index("    counts")]
    (right,) = re.findall(r"^ {8}(row_probs = None if .*)$", (ROOT / "docs/first-verdict.md").read_text(), re.MULTILINE)
    corrected = wrong.replace(old, f"    {right}\n")
    declared = corrected + '\n\ndef declares(function):\n    return {"accumulator": "storage"}\n'
    told = [command for command, _ in transcript()]
    assert told == [MINE, REPLAY, REPLAY, MINE, MINE]
    files = [{"my_kernels.py": text} for text in (wrong, corrected, declared)]
    return [files[0], *told[:2], files[1], *told[2:4], files[2], told[4]]


def of_user(installed: Path) -> dict[str, str]:
    """An environment in which the wheel is installed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return kept | {"PYTHONPATH": str(installed)}


@pytest.fixture(scope="module")
def place(installed, tmp_path_factory) -> Path:
    """A folder with a user's modules, and with names that belong to others."""
    place = tmp_path_factory.mktemp("place")
    (place / "my_kernels.py").write_text(kernels("docs/judge-a-kernel.md"))
    (place / "my_dispatch.py").write_text(DISPATCH.format(installed=str(installed)))
    (place / "conftest.py").write_text(HOST)
    (place / "test_host.py").write_text("def test(pytestconfig):\n    assert pytestconfig.getoption('device') == 'x'\n")
    for name in ("conformance", "moe_ref", "torch"):
        (place / name).mkdir()
        (place / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return place


@pytest.fixture(scope="module")
def told(installed, place, tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """(exit code, output) of each command, in order."""
    given = [run.command for run in RUNS]
    words: list[Any] = [f"{run.command} {run.short}".replace("examples/", f"{ROOT}/examples/").split() for run in RUNS]
    story = stories()
    given, words = [*given, ""], [*words, "story"]  # the story has a folder of its own
    words += [step if isinstance(step, dict) else step.split() for step in story]
    given += ["" if isinstance(step, dict) else f"$ {step}" for step in story]
    driver = tmp_path_factory.mktemp("bin") / "driver.py"  # as the installed script, not in the folder of the user
    driver.write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, str(driver)],
        input=json.dumps(words),
        cwd=place,
        env=of_user(installed),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, list[tuple[int, str]]] = {}
    for command, result in zip(given, json.loads(done.stdout.splitlines()[-1]), strict=True):
        out.setdefault(command, []).append((result[0], result[1]))
    return out


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command.removeprefix("moe-conformance ")[:60])
def test_a_command_of_the_documents_ends_as_it_should(told, run: Run):
    ((code, out),) = told[run.command]
    assert code == run.code, out


def test_every_command_is_run_or_has_a_reason_not_to_be():
    given = {run.command for run in RUNS} | {command for command, _ in transcript()}
    for command, pages in commands().items():
        reasons = [left.reason for left in LEFT if re.match(left.pattern, command)]
        assert command in given or len(reasons) == 1, (command, pages, reasons)


def test_no_command_that_could_run_is_left_out():
    given = {run.command for run in RUNS}
    left_out = [c for c in commands() if c not in given and any(re.match(left.pattern, c) for left in LEFT)]
    assert len(left_out) > 20 and not [command for command in left_out if could_run(command)]


def test_every_reason_has_a_command_and_a_test_of_the_same_code():
    for left in LEFT:
        assert any(re.match(left.pattern, command) for command in commands()), left
        assert (ROOT / left.tested).exists(), left


def test_a_command_that_nobody_runs_is_found(monkeypatch):
    assert could_run("moe-conformance run --impl my_kernels --function permute")
    assert not could_run("moe-conformance run --impl moe_fast")
    assert not any(re.match(left.pattern, f"{MINE} --seconds 3") for left in LEFT)


def printed(page: str, after: str) -> list[str]:
    """The lines that a page prints after a command, up to the first that ends in an ellipsis."""
    text = (ROOT / page).read_text().split(f"    {after}", 1)[1]
    lines = [line.removeprefix("    ") for line in re.split(r"\n\n(?! {4})", text)[0].splitlines()[1:]]
    return [line for line in lines if re.match(r"NOT CONFORMANT|permute|  (smallest|replay)", line)]


@pytest.mark.parametrize("page", ["README.md", "docs/judge-a-kernel.md"])
def test_the_verdict_of_a_page_is_what_is_printed(told, page):
    head, *lines = printed(page, P21)
    out = told[P21][0][1].splitlines()
    assert len(lines) == 3 and set(lines) <= set(out)
    assert head.startswith("NOT CONFORMANT   1 of 6 functions differ")
    assert any(line.startswith("NOT CONFORMANT   1 of 1 functions differ") for line in out)


def lasting(line: str) -> str:
    """A line without the numbers that change with the suite and the machine."""
    line = re.sub(r"(d_\w+ \[\w+\]).*", r"\1", line)
    return re.sub(r"\d+ cases.*? s |\d+ cases|\d+ functions not offered|[\d.]+%", "#", line)


def test_the_first_verdict_prints_what_its_page_shows(told):
    left = {command: iter(results) for command, results in told.items()}
    for command, lines in transcript():
        _, out = next(left[f"$ {command}"])
        assert {*map(lasting, lines)} <= {*map(lasting, out.splitlines())}, (command, out)


def test_a_page_that_shows_another_verdict_is_found(told):
    (_, out) = told[f"$ {REPLAY}"][0]
    assert "FAIL: probs [exact] [0] is 0.98" in out and "PASS" not in out
    assert "PASS" in told[f"$ {REPLAY}"][1][1]


def test_the_page_of_a_verdict_and_the_merged_one_are_files(told, place):
    page = (place / "verdict.html").read_text()
    assert page.startswith("<!doctype html>") and "CONFORMANT" in page
    ((_, merged),) = told["moe-conformance merge verdict-*.json --report verdict.html"]
    shards = [json.loads((place / f"verdict-{i}.json").read_text())["cases"] for i in (1, 2)]
    assert all(shards) and f"· {sum(shards)} cases" in merged


def test_the_script_and_another_projects_options_work_beside_the_wheel(installed, place):
    environment = of_user(installed)
    command = [str(installed / "bin" / "moe-conformance"), "--version"]
    assert subprocess.run(command, cwd=place, env=environment, capture_output=True).stdout.startswith(b"moe-conf")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conformance.plugin", "--device", "x"]
    environment |= {"PYTHONSAFEPATH": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *command, "test_host.py"], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_pages_with_commands_are_found():
    assert {str(page) for pages in commands().values() for page in pages} >= {"README.md", "docs/install.md"}
    assert len(PAGES) > 30
