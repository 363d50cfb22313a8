"""The tool of --sanitize inside a child process: its environment, and its report about a case."""

import functools
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance import sanitizing
from conformance.engine.child.outcome import Outcome
from conformance.interface import Implementation
from conformance.judge import Finding
from conformance.usage import UsageError

LEAST = (3, 8)  # the oldest Triton that has these sanitizers
WAIT_SECONDS = 3.0  # seconds for the report about a process that has ended
ADDRESS = re.compile(r"(\+| at | to )0x[0-9a-f]+")
ASSERTION = re.compile(r"Assertion `(.*?)` failed")
INVALID = re.compile(r"Invalid|Misaligned|Hardware|Warp|Device|Stack")


class Uncaptured(Implementation):
    """An implementation that declares no graph capture."""

    def declares(self, function: str) -> dict[str, Any]:
        return super().declares(function) | {"graph_capturable": False}


class Sanitizer:
    """One tool; without a name, none."""

    def __init__(self, tool: str, log_path: str) -> None:
        self.tool, self._log = tool, Growing(log_path)

    def prepare(self) -> None:
        """Set the environment, before the implementation is imported.

        Raises:
            UsageError: memcheck, in a process that does not run under compute-sanitizer.
        """
        if self.tool in ("consan", "fpsan"):
            os.environ["TRITON_INSTRUMENTATION_MODE"] = self.tool
        elif self.tool == "memcheck":
            if sanitizing.REPORTS not in os.environ:
                problem = "--sanitize memcheck: this process does not run under compute-sanitizer"
                raise UsageError(f"{problem}; moe-conformance run, replay and minimize start it, pytest does not")
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is an allocation of its own

    def check(self, device: str) -> None:
        """Refuse a device or an implementation that the tool cannot watch, after the implementation
        is imported.

        Raises:
            UsageError: no GPU, or no Triton that has the tool.
        """
        if not self.tool:
            return
        if device != "cuda":
            raise UsageError(f"--sanitize {self.tool} needs a GPU: on {device} no kernel is compiled")
        if self.tool == "memcheck":
            return
        triton = sys.modules.get("triton")
        if triton is None:
            raise UsageError(f"--sanitize {self.tool} is Triton's, and the implementation has not imported it")
        if tuple(int(digits) for digits in re.findall(r"\d+", triton.__version__)[:2]) < LEAST:
            least_version = ".".join(map(str, LEAST))
            raise UsageError(
                f"--sanitize {self.tool} needs Triton {least_version} or newer; here is {triton.__version__}"
            )

    def watched(self, implementation: Implementation) -> Implementation:
        """The implementation without its declaration of graph capture, where each tensor is an
        allocation of its own, because CUDA refuses such allocations in a capture.
        """
        return Uncaptured(implementation.namespace, implementation.name) if self.tool == "memcheck" else implementation

    def judged(self, outcome: Outcome) -> Outcome:
        """The outcome of a case.

        If the case has lost the device, the outcome has consan's sentence about it. consan ends a
        kernel at its first fault, and with it the use of the device, and writes a sentence into
        this process's log.
        """
        if self.tool != "consan":
            return outcome
        text = self._log.new()
        assertion = ASSERTION.search(text) if outcome.status == "CRASH" else None
        if assertion:
            outcome.finding = asdict(Finding("kernel", self.tool, assertion[1].strip()))
        return outcome


class Growing:
    """A file to which another program appends."""

    def __init__(self, path: str) -> None:
        self._path, self._read = Path(path), 0

    def new(self) -> str:
        """The text that was written since the last call.

        The file may have been emptied in between.
        """
        try:
            content = self._path.read_bytes()
        except OSError:
            return ""
        bytes_read, self._read = self._read, len(content)
        return content[bytes_read if bytes_read <= len(content) else 0 :].decode(errors="replace")


@functools.cache
def _file_of_memcheck() -> Growing:
    return Growing(os.environ[sanitizing.REPORTS])


def explained(outcome: Outcome) -> Outcome:
    """The outcome of a case as the parent has it; a CRASH with what memcheck says about it.

    memcheck ends a kernel at its first fault, and with it mostly the process: memory that is freed
    then raises in a destructor. Its one file is of all processes, so that two that crash at once
    may have each other's report; a failure is confirmed alone.
    """
    if sanitizing.REPORTS not in os.environ or outcome.status != "CRASH":
        return outcome
    text, until = "", time.monotonic() + WAIT_SECONDS
    while not text and time.monotonic() < until:
        text = sentence_of(_file_of_memcheck().new())
        if not text:
            time.sleep(0.05)
    if text:
        outcome.finding = asdict(Finding("kernel", "memcheck", text))
    return outcome


def sentence_of(log: str) -> str:
    """The first report of compute-sanitizer in its log: what, where in which kernel, and how far
    outside; "" if there is none.
    """
    lines = [line.lstrip("= ") for line in log.splitlines()]
    first = next((i for i, line in enumerate(lines) if INVALID.match(line)), None)
    if first is None:
        return ""
    phrases = [lines[first]]
    for line in lines[first + 1 :]:
        if not line or INVALID.match(line):
            break
        if line.startswith(("at ", "and is ")):
            phrases.append(line.removeprefix("and is "))
    return ", ".join(ADDRESS.sub("", phrase).strip() for phrase in phrases)
