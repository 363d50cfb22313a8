"""An append-only account of everything that was asked of an implementation.

One JSON object a line. `plan` lines say what was scheduled, `outcome` lines what became of it, `request` lines what was run
besides to confirm and reduce, `failure` lines the smallest cases. Every worker writes its own file; the verdict reads them
all, and is an error if something scheduled has no outcome.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """One worker's file."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(folder / f"{worker}.jsonl", "a", buffering=1)  # noqa: SIM115  (closed with the session)

    def write(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Everything that all workers wrote; a line that a dying worker cut off is left out, and so shows as a lost result."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
