"""Defects that are one change of text in the reference's source.

A copy of the reference, under a name of its own, is imported with that change; its settings and
rules (`moe_ref.config`) stay the reference's. The defect takes its functions from the copy,
whatever base it is planted in.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from conformance.core.defect import Defect, Wrapper

PEERS = ("reference_world", "reference_layer")  # the collectives and the layer of one rank
TWO_CONDITIONS = "a mistake that two conditions together invite"
SHORTCUT = "a mistake that a fast path, a cache or a shortcut invites"


class Rewrite(NamedTuple):
    """A text that occurs once in a file of the reference, and what stands in its place."""

    file: str  # relative to moe_ref
    old: str
    new: str


class _Copies(MetaPathFinder):
    """Finds the modules of all copies."""

    def __init__(self) -> None:
        self.changes: dict[str, Rewrite] = {}  # by the name of the copy

    @staticmethod
    def reference() -> Path:
        """The folder of the reference."""
        found = find_spec("moe_ref")
        assert found is not None and found.origin is not None
        return Path(found.origin).parent

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        copy, _, rest = fullname.partition(".")
        if copy not in self.changes:
            return None
        original = f"conformance.peers.{rest}" if rest in PEERS else ".".join(["moe_ref", *([rest] if rest else [])])
        found = find_spec(original)
        assert found is not None and found.origin is not None
        loader = _Loader(Path(found.origin), copy, self.changes[copy])
        return spec_from_loader(fullname, loader, origin=found.origin)


class _Loader(InspectLoader):
    def __init__(self, path: Path, copy: str, change: Rewrite) -> None:
        self.path, self.copy, self.change = path, copy, change

    def is_package(self, fullname: str) -> bool:
        return self.path.name == "__init__.py"

    def get_source(self, fullname: str) -> str:
        source = self.path.read_text(encoding="utf-8")
        if self.path.as_posix().endswith(f"moe_ref/{self.change.file}"):
            source = changed(source, self.change)
        return of_copy(source, self.copy, {peer: f"{self.copy}.{peer}" for peer in PEERS})


COPIES = _Copies()


def changed(source: str, change: Rewrite) -> str:
    """The source with the change.

    Raises:
        ValueError: the text does not occur, or more than once.
    """
    if source.count(change.old) != 1:
        raise ValueError(f"{change.file} has {source.count(change.old)} times, not once: {change.old}")
    return source.replace(change.old, change.new)


def of_copy(source: str, reference: str, peers: Mapping[str, str]) -> str:
    """The source with other modules in the place of the reference and its peers."""
    for peer, module in peers.items():
        source = source.replace(f"conformance.peers.{peer}", module)
    source = source.replace("import moe_ref\n", f"import {reference} as moe_ref\n")
    source = source.replace('f"moe_ref.', f'f"{reference}.')
    return re.sub(r"\bfrom moe_ref\b(?!\.config)", f"from {reference}", source)


def rewritten(name: str, title: str, origin: str, functions: Sequence[str], change: Rewrite) -> Defect:
    """The defect in these functions: the first is wrong, the others read what it returns, or are
    wrong in the same way.
    """
    copy = f"moe_ref_{name.lower()}"
    COPIES.changes[copy] = change
    if COPIES not in sys.meta_path:
        sys.meta_path.append(COPIES)

    def planted(function: str) -> Wrapper:
        return lambda base, *inputs, **settings: getattr(import_module(f"{copy}.reference_world"), function)(
            *inputs, **settings
        )

    return Defect(name, title, origin, {function: planted(function) for function in functions})


def series(
    first: int, planted: Sequence[tuple[str, str, str, str, str]], prefix: str = "RC", origin: str = TWO_CONDITIONS
) -> tuple[Defect, ...]:
    """Defects from that number on, each (title, functions, file, old, new)."""
    return tuple(
        rewritten(f"{prefix}{number:03}", title, origin, functions.split(), Rewrite(file, old, new))
        for number, (title, functions, file, old, new) in enumerate(planted, start=first)
    )
