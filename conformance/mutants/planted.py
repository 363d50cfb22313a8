"""Real defects, planted in a working implementation.

Each is a namespace: the functions of a base implementation, some of them with a defect, most of
public code. `conformance.mutants.planted:P21.my_kernels.moe` is my_kernels.moe with the defect P21.
Examples are part of the package; the others are in the folder `defects` of a source checkout.

A defect beyond 2³¹ elements is planted as its cause, 32-bit offsets, which a strided view of a few
rows shows.
"""

import functools
import itertools
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.catalogue import FAMILIES
from conformance.interface import imported
from conformance.mutants.copies import in_a_copy
from conformance.mutants.defect import Defect
from conformance.mutants.kinds import of_kinds
from conformance.mutants.substitution import read

EXAMPLES = Path(__file__).with_name("examples.txt")
FOLDER = Path(__file__).parents[2] / "defects"
TABLE = FOLDER / "kinds.txt"
DEFECTS: dict[str, Defect]  # all of them, by name; loaded when they are first read


class Planted:
    """A base implementation with a defect."""

    def __init__(self, defect: Defect, base: ModuleType | None = None) -> None:
        self._defect, self._base = defect, base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base = self.__dict__["_base"]
        if base is None:
            return Planted(self._defect, imported(name))
        wrapper = self._defect.wrappers.get(name)
        if wrapper is None:
            value = getattr(base, name)
            return Planted(self._defect, value) if isinstance(value, ModuleType) else value
        original = getattr(base, name)
        return functools.wraps(original)(functools.partial(wrapper, original))


def by_name(defects: Iterable[Defect]) -> dict[str, Defect]:
    """The defects by name.

    Raises:
        ValueError: two have one name.
    """
    listed: dict[str, Defect] = {}
    for defect in defects:
        if defect.name in listed:
            raise ValueError(f"two defects are named {defect.name}")
        listed[defect.name] = defect
    return listed


@functools.cache
def _of_text() -> dict[str, Defect]:
    """The defects that are substitutions in the reference, or of a generic kind."""
    paths = [EXAMPLES, *sorted(FOLDER.glob("*/reference.txt"))]
    kinds = of_kinds(TABLE) if TABLE.exists() else ()
    return by_name([*(in_a_copy(one) for path in paths for one in read(path)), *kinds])


@functools.cache
def _all() -> dict[str, Defect]:
    """The same, and the wrappers in Python that a family from outside brings along."""
    of_modules = (import_module(family.defects).DEFECTS for family in FAMILIES if family.defects)
    return by_name([*_of_text().values(), *itertools.chain.from_iterable(of_modules)])


def __getattr__(name: str) -> Any:
    """All defects, or the one of that name, before its base implementation is named."""
    if name == "DEFECTS":
        return _all()
    if name.startswith("__"):
        raise AttributeError(name)
    defect = _of_text().get(name) or _all().get(name)
    if defect is None:
        raise AttributeError(f"there is no planted defect {name!r}; there are {', '.join(_all())}")
    return Planted(defect)
