"""The verdict as terminal output, and as files by extension: .json, .xml (junit), .md or .html."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from conformance.engine.run.verdict import Verdict
from conformance.report.delivery import deliver, show
from conformance.report.files import junit, markdown
from conformance.report.page import page
from conformance.report.terminal import annotations, lines

WRITERS = {
    ".json": lambda verdict: json.dumps(verdict.record(), indent=1) + "\n",
    ".xml": junit,
    ".md": markdown,
    ".html": page,
}


def report_text(verdict: Verdict, path: Path | str) -> str:
    """The report in the format of the path's extension."""
    return WRITERS[Path(path).suffix](verdict)


def conclude(verdict: Verdict, paths: Iterable[str]) -> int:
    """Print the verdict, then write its reports; returns the exit code."""
    show([*lines(verdict), *annotations(verdict)])
    return deliver(verdict.exit_code, paths, partial(report_text, verdict))
