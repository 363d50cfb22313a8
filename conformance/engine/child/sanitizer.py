"""The tool of --sanitize in a child: its environment, and what it reports of a case."""

import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance import sanitizing
from conformance.engine.child.runner import Outcome
from conformance.interface import Implementation
from conformance.judge import Finding
from conformance.usage import UsageError

LEAST = (3, 8)  # of Triton, for its sanitizers
WAIT_SECONDS = 3.0  # for the report of an error that has lost the device
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
        self.tool, self._log = tool, Path(log_path)
        self._read = 0  # bytes of the file that were read before

    def prepare(self) -> None:
        """Set the environment, before the implementation is imported.

        Raises:
            UsageError: memcheck, in a process that does not run under compute-sanitizer.
        """
        if self.tool in ("consan", "fpsan"):
            os.environ["TRITON_INSTRUMENTATION_MODE"] = self.tool
        elif self.tool == "memcheck":
            if sanitizing.REPORTS not in os.environ:
                told = "--sanitize memcheck: this process does not run under compute-sanitizer"
                raise UsageError(f"{told}; moe-conformance run, replay and minimize start it, pytest does not")
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is an allocation of its own

    def check(self, device: str) -> None:
        """Refuse what the tool cannot watch, once the implementation is imported.

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
        if tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2]) < LEAST:
            right = ".".join(map(str, LEAST))
            raise UsageError(f"--sanitize {self.tool} needs Triton {right} or newer; here is {triton.__version__}")

    def watched(self, implementation: Implementation) -> Implementation:
        """Without the declaration of graph capture where each tensor is an allocation of its own,
        which CUDA refuses in a capture.
        """
        return Uncaptured(implementation.namespace, implementation.name) if self.tool == "memcheck" else implementation

    def judged(self, outcome: Outcome) -> Outcome:
        """The outcome of a case; if it has lost the device, with what the tool says about it.

        Both tools end a kernel at its first fault, and with it the use of the device. The file of
        memcheck is of all processes, so that nothing in it belongs to a case that has ended well.
        """
        if self.tool not in ("consan", "memcheck"):
            return outcome
        text, until = self._new(), time.monotonic() + WAIT_SECONDS
        if outcome.status != "CRASH":
            return outcome
        while not text and time.monotonic() < until:
            time.sleep(0.05)
            text = self._new()
        if text:
            outcome.finding = asdict(Finding("kernel", self.tool, text))
        return outcome

    def _new(self) -> str:
        """The first report in what was written since the last call; "" if there is none."""
        if self.tool == "consan":
            found = ASSERTION.search(self._written(self._log))
            return found[1].strip() if found else ""
        return sentence_of(self._written(Path(os.environ[sanitizing.REPORTS])))

    def _written(self, path: Path) -> str:
        """What was written to the file since the last call; it may have been emptied meanwhile."""
        try:
            content = path.read_bytes()
        except OSError:
            return ""
        before, self._read = self._read, len(content)
        return content[before if before <= len(content) else 0 :].decode(errors="replace")


def sentence_of(log: str) -> str:
    """The first report of compute-sanitizer in its log: what, where in which kernel, and how far
    outside; "" if there is none.
    """
    lines = [line.lstrip("= ") for line in log.splitlines()]
    first = next((i for i, line in enumerate(lines) if INVALID.match(line)), None)
    if first is None:
        return ""
    parts = [lines[first]]
    for line in lines[first + 1 :]:
        if not line or INVALID.match(line):
            break
        if line.startswith(("at ", "and is ")):
            parts.append(line.removeprefix("and is "))
    return ", ".join(ADDRESS.sub("", part).strip() for part in parts)
