"""An append-only record of every call to an implementation.

One JSON object per line: `implementation` describes it, `plan` gives the number of cases in a
section, `outcome` the result of a case, `request` a case run to confirm or reduce, `failure` a
smallest case, `problem` an error of the suite. Every worker writes one file. The verdict reads all
of them; a scheduled case without an outcome is an error.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """One worker's file."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(folder / f"{worker}.jsonl", "a", buffering=1)  # noqa: SIM115

    def write(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of all workers; a line truncated by a worker's death is skipped: a lost result."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
