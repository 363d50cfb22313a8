"""Real defects, planted in a working implementation.

Each is a namespace: the functions of a base implementation, some of them wrapped with a defect of
public code. `conformance.mutants.planted:P12.my_kernels.moe` is my_kernels.moe with the defect P12.

A defect beyond 2³¹ elements is planted as its cause, 32-bit offsets, which a strided view of a few
rows shows.
"""

import functools
from types import ModuleType
from typing import Any

from conformance.catalogue import FAMILIES
from conformance.core.defect import Defect
from conformance.interface import imported


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


DEFECTS: dict[str, Defect] = {defect.name: defect for family in FAMILIES for defect in family.defects}


def __getattr__(name: str) -> Planted:
    """The defect of that name, before its base implementation is named."""
    if name not in DEFECTS:
        raise AttributeError(f"there is no planted defect {name!r}; there are {', '.join(DEFECTS)}")
    return Planted(DEFECTS[name])
