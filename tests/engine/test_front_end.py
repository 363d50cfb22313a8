"""Triton's front end keeps what it would find again, and nothing that may change."""

import gc
import inspect
import warnings
import weakref
from types import ModuleType

import pytest

from conformance.engine.child.front_end import leave_filters, look_up_once, parse_once


def test_a_source_is_parsed_once_and_another_one_again() -> None:
    class Function:
        """A function of Triton, of a type that counts how often it parses."""

        parsed = 0

        def __init__(self, source: str) -> None:
            self.src = source

        def parse(self) -> list[str]:
            type(self).parsed += 1
            return self.src.split()

    parse_once(Function)
    parse_once(Function)  # as in a process that is asked again
    first, second = Function("a b"), Function("a b")
    assert first.parse() is first.parse() and second.parse() == ["a", "b"]
    assert Function.parsed == 2
    first.src = "c"  # as for an automatic mutant
    assert first.parse() == ["c"]


def test_a_type_without_trees_is_left_alone() -> None:
    parse_once(object)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's module, and `inspect.signature` counted in `looked_up`."""
    module = ModuleType("code_generator")
    module.inspect = inspect  # type: ignore[attr-defined]
    module.looked_up = []  # type: ignore[attr-defined]
    signature = inspect.signature

    def counted(function: object) -> inspect.Signature:
        module.looked_up.append(function)  # type: ignore[attr-defined]
        return signature(function)  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "signature", counted)
    look_up_once(module)
    return module


def operation(x: int, _semantic: object = None) -> int:
    return x


def test_a_function_is_looked_up_once(generator: ModuleType) -> None:
    look_up_once(generator)
    for _ in range(3):
        assert "_semantic" in generator.inspect.signature(operation).parameters
    assert generator.looked_up == [operation]
    assert generator.inspect.getsource is inspect.getsource


def test_a_method_keeps_nothing_alive(generator: ModuleType) -> None:
    class Value:
        def method(self) -> None:
            pass

    value = Value()
    alive = weakref.ref(value)
    generator.inspect.signature(value.method)
    generator.looked_up.clear()
    del value
    gc.collect()
    assert alive() is None


def test_filters_of_warnings_stay_and_warnings_are_given() -> None:
    module = ModuleType("code_generator")
    module.warnings = warnings  # type: ignore[attr-defined]
    leave_filters(module)
    leave_filters(module)
    filters = [*warnings.filters]
    with module.warnings.catch_warnings():
        module.warnings.simplefilter("ignore", DeprecationWarning)
        assert warnings.filters == filters
    with pytest.warns(UserWarning, match="of a kernel"):
        module.warnings.warn("of a kernel", stacklevel=1)
