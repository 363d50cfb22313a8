"""The verdict as terminal output, and as files by extension: .json, .xml (junit), .md or .html."""

import json
from pathlib import Path

from conformance.engine.run.verdict import Verdict
from conformance.report.files import junit, markdown
from conformance.report.page import page

WRITERS = {
    ".json": lambda verdict: json.dumps(verdict.record(), indent=1) + "\n",
    ".xml": junit,
    ".md": markdown,
    ".html": page,
}


def write(verdict: Verdict, path: Path | str) -> None:
    """Write the report in the format of the path's extension."""
    path = Path(path)
    path.write_text(WRITERS[path.suffix](verdict), encoding="utf-8", errors="backslashreplace")
