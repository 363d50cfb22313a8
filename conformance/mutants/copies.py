"""Substitutions in the reference: each is planted in a copy of its own.

A copy of the reference, under a name of its own, is imported with the changed lines. Its modules
import settings, types and rules from the reference's `moe_ref.config`; of `moe_ref/config/state.py`
the functions of the interface (`new_state`, `state_tensors`, `state_from`) can be changed. The
defect takes its functions from the copy, whatever base it is planted in.
"""

import difflib
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import moe_ref
from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.substitution import Hunk, Substitution, substituted

SOURCES = Path(moe_ref.__file__).parents[1]
PEERS = ("reference_world", "reference_layer")  # the collectives and the layer of one rank


class _Copies(MetaPathFinder):
    """Finds the modules of all copies."""

    def __init__(self) -> None:
        self.hunks: dict[str, tuple[Hunk, ...]] = {}  # by the name of the copy

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        copy, _, module = fullname.partition(".")
        if copy not in self.hunks:
            return None
        original = f"conformance.peers.{module}" if module in PEERS else f"moe_ref.{module}".removesuffix(".")
        spec = find_spec(original)
        assert spec is not None and spec.origin is not None
        loader = _Loader(Path(spec.origin), copy, self.hunks[copy])
        return spec_from_loader(fullname, loader, origin=spec.origin)


class _Loader(InspectLoader):
    def __init__(self, path: Path, copy: str, hunks: tuple[Hunk, ...]) -> None:
        self.path, self.copy, self.hunks = path, copy, hunks

    def is_package(self, fullname: str) -> bool:
        return self.path.name == "__init__.py"

    def get_source(self, fullname: str) -> str:
        source = self.path.read_text(encoding="utf-8")
        for hunk in self.hunks:
            if self.path.as_posix().endswith(f"/{hunk.file}"):
                source = substituted(source, hunk)
        return of_copy(source, self.copy, {peer: f"{self.copy}.{peer}" for peer in PEERS})


COPIES = _Copies()


def of_copy(source: str, reference: str, peers: Mapping[str, str]) -> str:
    """The source with other modules in the place of the reference and its peers."""
    for peer, module in peers.items():
        source = source.replace(f"conformance.peers.{peer}", module)
    source = source.replace("import moe_ref\n", f"import {reference} as moe_ref\n")
    source = source.replace('f"moe_ref.', f'f"{reference}.')
    return re.sub(r"\bfrom moe_ref\b(?!\.config)", f"from {reference}", source)


def in_a_copy(substitution: Substitution) -> Defect:
    """The defect whose functions are those of a copy of the reference with the changed lines.

    Raises:
        ValueError: the substitution names a file that is not there.
    """
    name, functions, title, origin = substitution.header
    for hunk in substitution.hunks:
        if not (SOURCES / hunk.file).is_file():
            files = [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "moe_ref").rglob("*.py")]
            nearest = difflib.get_close_matches(hunk.file, files, 1, cutoff=0.0)
            raise ValueError(f"{name}: there is no file {hunk.file}; the nearest is {nearest[0]}")
    copy = f"moe_ref_{name.lower()}"
    COPIES.hunks[copy] = substitution.hunks
    if COPIES not in sys.meta_path:
        sys.meta_path.append(COPIES)

    def planted(function: str) -> Wrapper:
        return lambda base, *inputs, **settings: getattr(import_module(f"{copy}.reference_world"), function)(
            *inputs, **settings
        )

    return Defect(name, title, origin, {function: planted(function) for function in functions})
