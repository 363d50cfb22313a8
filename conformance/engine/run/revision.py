"""The footprints of an implementation, found in a process of its own, now and at a git revision."""

import os
import subprocess
import tarfile
import tempfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from conformance.engine.child import server
from conformance.engine.child.processes import end, ending, started
from conformance.engine.footprint.footprint import Footprints, serve_footprints, suite_digest, suite_folders
from conformance.engine.options import ChildOptions
from conformance.interface import UsageError

SECONDS = 180.0  # seconds to import the implementation and follow its code


class Inquiry:
    """A process that finds footprints while this one goes on."""

    def __init__(self, options: ChildOptions) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moe-conformance-")
        self._log = os.path.join(self._folder.name, "log")
        self._process, self._pipe = started(server.start(), serve_footprints, options, self._log)

    def answer(self) -> tuple[Footprints | None, dict[str, str], str]:
        """The footprints, the folders of the packages, and the reason if there are none."""
        try:
            kind, content = self._received()
            if kind == "ready":
                kind, content = self._received()
        except EOFError:
            return None, {}, f"the process died while importing it ({ending(self._process, self._log)})"
        finally:
            self.close()
        if kind != "footprints":
            return None, {}, str(content)
        return Footprints.of(content), content["roots"], ""

    def _received(self) -> tuple[str, Any]:
        if not self._pipe.poll(SECONDS):
            return "slow", f"it took longer than {SECONDS:.0f} s"
        kind, content = self._pipe.recv()
        return kind, content

    def close(self) -> None:
        """End the process."""
        end(self._process)
        self._pipe.close()
        self._folder.cleanup()


def footprints_at(revision: str, options: ChildOptions, roots: dict[str, str]) -> Footprints:
    """The footprints at a revision of the repository that holds the implementation.

    Args:
        roots: the folders of its packages now.

    Raises:
        UsageError: no repository, no such revision, or the implementation cannot be imported there.
    """
    name = options.implementation.partition(":")[0].partition(".")[0]
    flag = f"--since {revision}"
    if name not in roots:
        raise UsageError(f"{flag}: the source of {name!r} is not known; give an earlier JSON report instead")
    home = Path(roots[name]).resolve().parent
    top = Path(_git(home, "rev-parse", "--show-toplevel", error=f"{flag}: {home} is in no git repository").strip())
    message = f"{flag}: is neither a JSON report nor a revision of {top}, such as HEAD~1 or main"
    commit = _git(
        top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", error=message
    ).strip()
    with tempfile.TemporaryDirectory(prefix="moe-conformance-") as folder:
        copy = Path(folder).resolve()
        content = subprocess.run(["git", "archive", commit], cwd=top, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            archive.extractall(copy, filter="data")
        relative_paths = [_relative(Path(path), top) for path in roots.values()]
        search = dict.fromkeys(str(copy / path.parent) for path in relative_paths if path != Path())
        footprints, copied, reason = Inquiry(replace(options, search=tuple(search))).answer()
        if footprints is None:
            raise UsageError(f"{flag}: the implementation is not usable at this revision: {reason}")
        if not Path(copied.get(name, "/")).resolve().is_relative_to(copy):
            raise UsageError(f"{flag}: {name} is not imported from the repository {top}, but from {copied.get(name)}")
        suite = [copy / _relative(path, top) for path in suite_folders()]
        if any(path.is_dir() and path != copy for path in suite):  # the repository holds the suite too
            footprints.conditions["the suite"] = suite_digest(suite)
    return footprints


def _relative(path: Path, top: Path) -> Path:
    """The path inside the repository; empty if it is elsewhere."""
    path = path.resolve()
    return path.relative_to(top.resolve()) if path.is_relative_to(top.resolve()) else Path()


def _git(folder: Path, *arguments: str, error: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError as missing:
        raise UsageError(f"{error} ({missing})") from None
    if done.returncode:
        raise UsageError(error)
    return done.stdout
