"""`--sanitize`: a tool's report is a failure of its case; a tool that is not there is refused."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from conformance import sanitizing
from conformance.catalogue import CONTRACTS
from conformance.engine.child import poison, sanitizer
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.processes import ended
from conformance.engine.child.sanitizer import Sanitizer, explained, sentence_of
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.choice import Choice, must_compare
from conformance.engine.run.pool import Pool
from conformance.engine.run.verdict import assemble
from conformance.interface import UsageError, load
from conformance.report.terminal import lines
from tests.engine.verdict_helpers import ROWS_WRONG, SMALL, Book

OUTSIDE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at fill_kernel+0x2f0 in fills.py:12
=========     by thread (0,0,0) in block (1,0,0)
=========     Access to 0x7f0a5b600200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0a5b600000 of size 512 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at fill_kernel+0x2f0 in fills.py:12
"""
FOUND = "Invalid __global__ write of size 4 bytes, at fill_kernel in fills.py:12"
ASSERTED = "copies.py:7: unknown: block: [0,0,0], thread: [1,0,0] Assertion `Buffer has outstanding writes.` failed.\n"
LOST = "the device was lost: CUDA error"


NO_ERROR = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
FAR_OUTSIDE = f"{FOUND}, 1 bytes after the nearest allocation of size 512 bytes"


@pytest.mark.parametrize(("log", "sentence"), [(OUTSIDE, FAR_OUTSIDE), ("", ""), (NO_ERROR, "")])
def test_a_report_is_what_happened_where_and_how_far_outside(log, sentence):
    assert sentence_of(log) == sentence


@pytest.fixture
def memcheck(tmp_path, monkeypatch):
    """The file of the tool, read by this process."""
    log = tmp_path / "memcheck.log"
    monkeypatch.setenv(sanitizing.REPORTS, str(log))
    monkeypatch.setattr(sanitizer, "WAIT_SECONDS", 0.2)
    sanitizer._file_of_memcheck.cache_clear()
    log.write_text("========= COMPUTE-SANITIZER\n")
    yield log
    sanitizer._file_of_memcheck.cache_clear()


@pytest.mark.parametrize("explanation", [ended, lambda reason: explained(Outcome("CRASH", reason=reason))])
def test_a_report_of_memcheck_explains_a_crash(memcheck, explanation):
    assert explanation("SIGABRT") == Outcome("CRASH", reason="SIGABRT")
    memcheck.write_text(memcheck.read_text() + OUTSIDE)
    assert explained(Outcome("PASS")) == Outcome("PASS")
    crash = explanation("SIGABRT")
    assert (crash.status, crash.finding["check"], crash.reason) == ("CRASH", "memcheck", "SIGABRT")
    assert crash.finding["message"].startswith(FOUND)
    assert explanation("SIGSEGV") == Outcome("CRASH", reason="SIGSEGV")  # the report was of another


def test_a_child_that_memcheck_has_ended_has_its_report(memcheck):
    memcheck.write_text(OUTSIDE)
    with Pool(ChildOptions("conformance.engine.child.crashing", "cpu")) as pool:
        outcome = pool.run_alone(SMALL)
    assert (outcome.status, outcome.finding["check"]) == ("CRASH", "memcheck")
    assert outcome.reason.startswith("SIGSEGV")


def test_without_memcheck_a_crash_is_what_it_was():
    assert ended("SIGABRT") == Outcome("CRASH", reason="SIGABRT")


def test_a_report_of_consan_explains_why_the_device_was_lost(tmp_path):
    log, crash = tmp_path / "child.log", Outcome("CRASH", reason=LOST)
    tool = Sanitizer("consan", str(log))
    assert tool.judged(crash) == crash  # there is no report
    log.write_text("")
    assert tool.judged(Outcome("PASS")) == Outcome("PASS")
    log.write_text(ASSERTED)
    lost = tool.judged(Outcome("CRASH", reason=LOST))
    assert (lost.status, lost.finding["check"], lost.reason) == ("CRASH", "consan", LOST)
    assert lost.finding["message"] == "Buffer has outstanding writes."


@pytest.mark.parametrize("tool", ["consan", "fpsan"])
def test_without_a_gpu_it_is_refused(tool):
    with Pool(ChildOptions("moe_ref", "cpu", sanitize=tool)) as pool, pytest.raises(UsageError) as error:
        pool.start()
    assert str(error.value) == f"--sanitize {tool} needs a GPU: on cpu no kernel is compiled"


@pytest.mark.parametrize(
    ("triton", "refused"),
    [
        (None, pytest.raises(UsageError, match="is Triton's, and the implementation has not imported it")),
        ("3.6.0", pytest.raises(UsageError, match=r"needs Triton 3.8 or newer; here is 3.6.0")),
        *((version, nullcontext()) for version in ("3.8.0", "3.9.0+git1", "4.0.0")),
    ],
)
def test_it_is_refused_without_the_right_triton(triton, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", triton and SimpleNamespace(__version__=triton))
    with refused:
        Sanitizer("consan", "").check("cuda")


def test_memcheck_is_refused_where_the_process_does_not_run_under_it(monkeypatch):
    monkeypatch.delenv(sanitizing.REPORTS, raising=False)
    with pytest.raises(UsageError, match="this process does not run under compute-sanitizer"):
        Sanitizer("memcheck", "").prepare()


def test_memcheck_begins_the_command_again_under_compute_sanitizer(tmp_path, monkeypatch):
    program, begun = tmp_path / sanitizing.PROGRAM, []
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(sanitizing.REPORTS, "")
    monkeypatch.delenv(sanitizing.REPORTS)
    monkeypatch.setattr(os, "execv", lambda file, arguments: begun.append((file, arguments)))
    sanitizing.begin("memcheck")
    ((file, arguments),) = begun
    assert file == str(program)
    assert arguments[-len(sys.orig_argv) :] == [sys.executable, *sys.orig_argv[1:]]
    assert arguments[arguments.index("--log-file") + 1] == os.environ[sanitizing.REPORTS]
    monkeypatch.setattr("atexit.register", lambda remove, **settings: remove(**settings))
    sanitizing.begin("memcheck")  # this is the command under it
    assert len(begun) == 1 and not os.path.exists(os.environ[sanitizing.REPORTS])


@pytest.mark.parametrize("tool", ["", "consan", "fpsan"])
def test_the_tools_of_triton_need_no_other_command(tool, monkeypatch):
    monkeypatch.setattr(os, "execv", None)
    sanitizing.begin(tool)


def test_memcheck_sees_tensors_without_guards():
    fresh = {}
    try:
        for guards in (True, False):
            poison.install(guards=guards)
            with poison.Poison("max"):
                fresh[guards] = torch.empty(5)
    finally:
        poison.install()
    assert fresh[True].untyped_storage().nbytes() > fresh[False].untyped_storage().nbytes() == 20
    assert fresh[False].tolist() == fresh[True].tolist() == [torch.finfo(torch.float32).max] * 5


def test_memcheck_captures_no_graph():
    assert load("moe_fast").declares("permute")["graph_capturable"] is True
    assert Sanitizer("memcheck", "").watched(load("moe_fast")).declares("permute")["graph_capturable"] is False


def chosen(**options):
    described = {name: {"offered": True} for name in CONTRACTS}
    return Choice.of(Options("moe_fast", **options), {"functions": described}).functions


def test_fpsan_judges_functions_with_algebraic_laws():
    assert chosen(sanitize="consan") == list(CONTRACTS)
    assert chosen(sanitize="fpsan", function="unpermute") == ["unpermute"]
    assert "glu" not in chosen(sanitize="fpsan")
    with pytest.raises(UsageError, match="--function glu has no algebraic law, by which --sanitize fpsan judges"):
        chosen(sanitize="fpsan", function="glu")


def test_runs_under_different_tools_are_not_compared():
    must_compare({"sanitize": "consan"}, Options("moe_fast", sanitize="consan"))
    with pytest.raises(UsageError, match="judged with --sanitize '', this run with 'consan'"):
        must_compare({}, Options("moe_fast", sanitize="consan"))


def test_a_verdict_names_the_tool_and_so_does_a_replay(tmp_path):
    options = Options("my_kernels.moe", profile="smoke", sanitize="consan")
    conformant, failing = Book(tmp_path / "right"), Book(tmp_path / "wrong")
    conformant.all_pass()
    assert assemble(conformant.folder, options, 1.0).verdict == "CONFORMANT (under consan)"
    failing.judged("permute", "FAIL", passed=0).failure(finding=ROWS_WRONG)
    shown = "\n".join(lines(assemble(failing.folder, options, 1.0)))
    assert "--impl my_kernels.moe --sanitize consan\n" in shown
