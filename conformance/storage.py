"""Files that are written whole or not at all."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path


def write_whole(path: Path | str, text: str) -> None:
    """Write the file; if that fails, an earlier file of this name stays as it was.

    The text goes to a temporary file in the same folder, which then takes the name. A link still
    leads to its file. A device or a pipe is written directly.

    Raises:
        OSError: the file cannot be written.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    temporary = _temporary(target)
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        _remove(temporary)


def unwritable(path: Path | str) -> str:
    """The reason why the file cannot be written; empty if it can.

    A small temporary file in the same folder is written and removed, which also finds a full disk.
    """
    target = _target(path)
    if target.is_dir():
        return "is a folder; give the name of a file"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}; make it first, or give a file in another folder"
    if target.exists() and not os.access(target, os.W_OK):
        return "the file is read-only; make it writable, or give another file"
    if target.exists() and not target.is_file():
        return ""
    temporary = _temporary(target)
    try:
        temporary.write_text("a report follows\n")
    except OSError as error:
        return f"{target.parent} cannot be written ({reason_of(error)}); give a file in a folder that can"
    finally:
        _remove(temporary)
    return ""


def reason_of(error: OSError) -> str:
    """The error's reason without the name of the file, such as "No space left on device"."""
    return error.strerror or str(error)


def _target(path: Path | str) -> Path:
    """The absolute path of the file that a link leads to, or of the file itself."""
    return Path(os.path.realpath(path))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{uuid.uuid4().hex}.tmp")


def _remove(temporary: Path) -> None:
    """Remove the temporary file, if it is there."""
    with contextlib.suppress(OSError):
        temporary.unlink()
