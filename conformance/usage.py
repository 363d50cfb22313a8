"""Errors of the user, found before torch is imported."""

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from conformance.storage import unwritable

REPORTS = (".json", ".xml", ".md", ".html")


class UsageError(Exception):
    """Unusable user input; the message is one clear sentence."""


def check_module(name: str, flag: str = "--impl") -> None:
    """Check what is known about a namespace's name without importing anything.

    Raises:
        UsageError: a file's name, or a package or module that does not exist.
    """
    module_name = name.partition(":")[0]
    if module_name.endswith(".py") or "/" in module_name:
        module_name_without_suffix = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{flag} {name}: give the module's name, not its file: {module_name_without_suffix}")
    top = module_name.partition(".")[0]
    if top and not _exists(top):
        raise UsageError(missing_module(name, top, flag))


def check_known(argument: str, names: Iterable[str], known_names: Iterable[str]) -> None:
    """Check that a thing which the user names exists.

    Args:
        argument: the option or parameter, as its user writes it.

    Raises:
        UsageError: the first name that is not known.
    """
    known_names = list(known_names)
    if unknown := [name for name in names if name not in known_names]:
        nearest = "".join(f"; the nearest is {name}" for name in get_close_matches(str(unknown[0]), known_names, n=1))
        raise UsageError(f"{argument} is {unknown[0]!r}{nearest}; known are {', '.join(known_names)}")


def check_report(path: str) -> None:
    """Check that a report can be written to this file, before the run whose verdict it will hold.

    Raises:
        UsageError: an unknown ending, no such folder, or a file that cannot be written.
    """
    if Path(path).suffix not in REPORTS:
        raise UsageError(f"--report {path}: the ending must be one of {', '.join(REPORTS)}")
    check_writable(path)


def check_writable(path: str) -> None:
    """Check that a report of any ending can be written to this file.

    Raises:
        UsageError: no such folder, or a file that cannot be written.
    """
    if reason := unwritable(path):
        raise UsageError(f"--report {path}: {reason}")


def missing_module(name: str, missing: str, flag: str = "--impl") -> str:
    return f"{flag} {name}: there is no module {missing!r}, installed, on PYTHONPATH or in {os.getcwd()}"


def _exists(top: str) -> bool:
    """Whether a child process could find the package or module. True if this is not known."""
    try:
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
        return (importlib.util.find_spec(top) or here) is not None
    except Exception:
        return True
