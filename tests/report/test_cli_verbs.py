"""Verbs of the command other than `run`, and the command in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.catalogue import CONTRACTS
from conformance.engine.choose.profiles import PROFILES
from tests.report.cli_helpers import smoke

SUITE = ("pytest", "-p", "no:cacheprovider", "-p", "conformance.plugin", "--pyargs", "conformance")


def smoke_items(implementation: str, *options: str) -> tuple[str, ...]:
    return ("--moe-impl", implementation, "--moe-profile", "smoke", *options)


def test_list_names_every_function_and_profile(call):
    code, out, _ = call("list")
    assert code == 0
    assert all(f"\n{name}(" in f"\n{out}" for name in CONTRACTS)
    assert all(f"profile {name}" in out for name in PROFILES)
    assert "  covering " not in out
    code, out, _ = call("list", "--function", "gate,jitter")
    assert (code, re.findall(r"^\w+(?=\()", out, re.MULTILINE)) == (0, ["gate", "jitter"])
    assert len(re.findall(r"  covering \d+ cases for \d+ pairs of values; \d+ pairs are no legal call", out)) == 2
    assert call("list", "--function", "premute")[0] == 2


def test_doctor_finds_this_machine_fit(call):
    code, out, _ = call("doctor")
    assert code == 0, out
    assert "finds the reference right: PASS" in out
    assert "a kernel that kills its process is noticed: CRASH" in out
    assert "FAIL" not in out


def test_check_adapter_says_what_is_offered(call):
    code, out, _ = call("check-adapter", "--impl", "moe_ref")
    assert (code, f"{len(CONTRACTS)} of {len(CONTRACTS)} functions can be judged" in out) == (0, True)
    code, out, _ = call("check-adapter", "--impl", "wrong")
    assert (code, "without align, capacity, num_rows" in out, f"1 of {len(CONTRACTS)} functions" in out) == (
        0,
        True,
        True,
    )
    code, out, _ = call("check-adapter", "--impl", "consuming")
    assert "unpermute takes results of this namespace's own permute, which is missing" in out
    code, out, _ = call("check-adapter", "--impl", "nothing")
    assert (code, f"0 of {len(CONTRACTS)} functions can be judged" in out) == (4, True)


def test_replay_ends_with_4_for_a_case_that_is_uninformative_or_not_offered(call):
    code, out, _ = call("replay", '{"function": "permute", "tokens": 0}', "--impl", "moe_ref")
    assert (code, "UNINFORMATIVE" in out) == (4, True)
    code, out, _ = call("replay", '{"function": "sort_chunks"}', "--impl", "good")
    assert (code, "NOT_OFFERED sort_chunks is not offered" in out) == (4, True)


# ---- as a process


def spawn(*arguments: str, **settings) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell that runs the tests in the background ignores SIGINT, and a process inherits that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **settings,
    )


def nobody_left(group: int, workdir: Path) -> bool:
    """Whether the processes of the group, and those that slept, end."""
    groups = [group, *map(int, (workdir / "asleep").read_text().split())]
    for _ in range(6000):
        alive = []
        for process_group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_group, 0)
                alive.append(process_group)
        if not alive:
            return True
        time.sleep(0.1)
    return False


def test_pytest_with_two_workers_runs_the_same_suite_and_names_a_report_that_is_not_written(call, workdir):
    (workdir / "full.json").symlink_to("/dev/full")
    processes = {
        name: spawn(*SUITE, "-n", "2", *smoke_items(name, f"--moe-report={name}.json", "--moe-report=full.json"))
        for name in ("two", "nobody")
    }
    printed = {name: process.communicate() for name, process in processes.items()}
    assert "moe-conformance: two, profile smoke; each process first imports torch" in printed["two"][0]
    assert "CONFORMANT   2 functions" in printed["two"][0]
    assert "--moe-report full.json: not written: No space left on device" in printed["two"][0]
    assert processes["two"].returncode == 3, printed["two"]
    assert call(*smoke("two", "--report", "alone.json"))[0] == 0
    spread, in_one_process = (json.loads((workdir / name).read_text()) for name in ("two.json", "alone.json"))
    assert spread["exit_code"] == in_one_process["exit_code"] == 0
    assert {name: function["cases"] for name, function in spread["functions"].items()} == {
        name: function["cases"] for name, function in in_one_process["functions"].items()
    }
    assert processes["nobody"].returncode == 2
    assert "--moe-impl nobody: there is no module 'nobody'" in "".join(printed["nobody"])
    assert "Traceback" not in "".join([*printed["two"], *printed["nobody"]])


@pytest.mark.parametrize("plugin", ["conformance.plugin", "no:conformance.plugin"])
def test_pytest_without_a_session_ends_with_one_sentence_on_what_is_missing(workdir, plugin):
    process = spawn("pytest", "-q", "-p", "no:cacheprovider", "-p", plugin, "--pyargs", "conformance")
    out, err = process.communicate()
    missing = "--moe-impl NAMESPACE" if plugin == "conformance.plugin" else "-p conformance.plugin --moe-impl NAMESPACE"
    assert process.returncode == 2, out + err
    assert f"moe-conformance has nothing to judge: add {missing}\n" in out
    assert "fixture" not in out and "Traceback" not in out + err


HOST_CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device")
    parser.addoption("--profile", action="store_true")
"""


@pytest.mark.parametrize("options", [(), ("-p", "conformance.plugin")], ids=["alone", "with the plugin"])
def test_another_project_keeps_its_own_pytest_options(workdir, options):
    (workdir / "conftest.py").write_text(HOST_CONFTEST)
    (workdir / "test_host.py").write_text(
        "def test(pytestconfig):\n    assert pytestconfig.getoption('device') == 'x'\n"
    )
    process = spawn("pytest", "-p", "no:cacheprovider", *options, "--device", "x", "--profile", "test_host.py")
    out, err = process.communicate()
    assert (process.returncode, "1 passed" in out) == (0, True), out + err


@pytest.mark.parametrize(
    ("front", "number"),
    [
        (("conformance", *smoke("sleeping")), signal.SIGTERM),
        ((*SUITE, *smoke_items("sleeping")), signal.SIGINT),
    ],
    ids=["conformance-SIGTERM", "pytest-SIGINT"],
)
def test_an_interrupted_run_reports_what_was_judged_and_leaves_nothing_running(workdir, front, number):
    prefix = "--moe-" if front[0] == "pytest" else "--"
    options = {"case-seconds": "100", "jobs": "2", "report": "out.json"}
    process = spawn(*front, *(word for name, value in options.items() for word in (prefix + name, value)))
    with ended(process, workdir):
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
        assert (process.returncode, "INTERRUPTED" in out) == (4, True), err
        assert "Traceback" not in out + err
        report = json.loads((workdir / "out.json").read_text())
        assert (report["verdict"], report["exit_code"]) == ("INTERRUPTED", 4)
        reason = "a signal" if front[0] == "pytest" else number.name
        assert report["problems"] == [f"{reason} ended the run after {report['cases']} cases"]
        assert report["functions"]["permute"]["status"] in ("not run", "too little tested")
        assert nobody_left(process.pid, workdir)


def test_a_run_that_is_killed_leaves_nothing_running(workdir):
    process = spawn("conformance", *smoke("sleeping", "--case-seconds", "100"))
    with ended(process, workdir):
        process.kill()
        assert "CONFORMANT" not in process.communicate(timeout=600)[0]
        assert nobody_left(process.pid, workdir)


@contextlib.contextmanager
def ended(process: subprocess.Popen, workdir: Path) -> Iterator[None]:
    """A block that begins when a case hangs, and ends with the process."""
    try:
        while not ((workdir / "asleep").exists() and (workdir / "asleep").read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
