"""An append-only record of every call asked of an implementation.

One JSON object per line: `implementation` describes it, `plan` gives the number of cases of a
section, `outcome` the result of one, `request` a case run to confirm or reduce, `failure` a
smallest case, `problem` an error of the suite. Every worker writes its own file; the verdict reads
them all, and is an error if a scheduled case has no outcome.
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
    """The lines of all workers. A line cut off by a worker's death is left out: a lost result."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
