"""`--sanitize`: tools that watch an implementation's kernels on a GPU while the cases run.

    consan    Triton's: barriers and shared memory; a kernel that misuses them ends with a sentence
    fpsan     Triton's: floats become a ring, so that identities hold bit by bit (see `relations`)
    memcheck  compute-sanitizer's: loads and stores outside of every allocation

Triton reads its own from the environment when it is imported, which is in a child. Under memcheck
the whole command runs under compute-sanitizer, which follows it into its children and writes one
file.
"""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

from conformance.usage import UsageError

TOOLS = ("consan", "fpsan", "memcheck")
PROGRAM = "compute-sanitizer"
ELSEWHERE = "/usr/local/cuda/bin"  # the folder in which the toolkit installs it
REPORTS = "MOE_CONFORMANCE_MEMCHECK"  # its file, set for the command that it runs
OPTIONS = (
    *("--tool", "memcheck", "--target-processes", "all", "--print-limit", "10000"),
    *("--show-backtrace", "no", "--report-api-errors", "no"),
)


def replayed(implementation: str, tool: str) -> str:
    """The value of --impl and the flags after it, with which a failing case is replayed."""
    return f"{implementation} --sanitize {tool}" if tool else implementation


def begin(tool: str) -> None:
    """Replace this process by the same command under compute-sanitizer, if the tool needs that.

    Raises:
        UsageError: it is not installed.
    """
    if tool != "memcheck":
        return
    if REPORTS in os.environ:  # this process is that command already
        atexit.register(Path(os.environ[REPORTS]).unlink, missing_ok=True)
        return
    program = shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), ELSEWHERE]))
    if program is None:
        problem = f"--sanitize memcheck: there is no {PROGRAM} on PATH or in {ELSEWHERE}"
        raise UsageError(f"{problem}; it comes with the CUDA toolkit")
    handle, os.environ[REPORTS] = tempfile.mkstemp(prefix="moe-conformance-memcheck-", suffix=".log")
    os.close(handle)
    tool_options = [*OPTIONS, "--log-file", os.environ[REPORTS]]
    os.execv(program, [program, *tool_options, sys.executable, *sys.orig_argv[1:]])
