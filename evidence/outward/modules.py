"""Modules under another package's name, and what they lack."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

NOT_OFFERED = "not offered: "
moe_fast: Any = importlib.import_module("moe_fast")  # its names are joined at run time, which mypy cannot see


def not_offered(what: str) -> NoReturn:
    """End the running test: `moe_fast` has no such function or option."""
    pytest.skip(NOT_OFFERED + what)


class Missing:
    """A name that a test file imports and `moe_fast` does not offer. Calling it ends the test."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **settings: Any) -> NoReturn:
        not_offered(self._name)

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class Stub(ModuleType):
    """A module whose unknown names are `Missing`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = f"{self.__name__}.{name}"
        if PathFinder.find_spec(module, self.__path__):
            return importlib.import_module(module)
        return Missing(module)


class StubFinder:
    """Finds a stub for each module below a package, after all other finders found no file."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        below = name.startswith(self.package + ".")
        return ModuleSpec(name, self, is_package=True) if below else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has nothing to run."""


def stub(name: str, folder: Path | None = None, **members: Any) -> ModuleType:
    """Make the module importable; modules below it that have no stub are read from `folder`."""
    module = Stub(name)
    module.__path__ = [] if folder is None else [str(folder)]
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if not parent:
        sys.meta_path.append(StubFinder(name))  # type: ignore[arg-type]
    else:
        setattr(sys.modules[parent], last, module)
    return module


def replace(module: str, **members: Any) -> None:
    """Put other functions under names of a module of the fetched package.

    Raises:
        AttributeError: the module has no such name, so that the test would not reach ours.
    """
    target = importlib.import_module(module)
    for name, member in members.items():
        getattr(target, name)
        setattr(target, name, member)
