"""The verdict as terminal output, and as files by extension: .json, .xml (junit), .md or .html."""

import json
from pathlib import Path

from conformance.engine.run.verdict import Verdict
from conformance.interface import UsageError
from conformance.report.files import junit, markdown
from conformance.report.page import page

WRITERS = {
    ".json": lambda verdict: json.dumps(verdict.record(), indent=1) + "\n",
    ".xml": junit,
    ".md": markdown,
    ".html": page,
}


def check_path(path: str) -> Path:
    """The path, if a report can be written there.

    Raises:
        UsageError: an unknown extension, or no such folder.
    """
    target = Path(path)
    if target.suffix not in WRITERS:
        raise UsageError(f"--report {path}: the ending must be one of {', '.join(WRITERS)}")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"--report {path}: there is no folder {target.absolute().parent}")
    if target.is_dir():
        raise UsageError(f"--report {path}: is a folder")
    return target


def write(verdict: Verdict, path: Path) -> None:
    """Write the report in the format of the path's extension."""
    path.write_text(WRITERS[path.suffix](verdict), encoding="utf-8", errors="backslashreplace")
