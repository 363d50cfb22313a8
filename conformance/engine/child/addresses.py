"""Checks every address that a kernel accesses in Triton's interpreter.

A kernel may access only the tensors among its launch's arguments. On a GPU an access elsewhere is
undefined: mostly harmless, sometimes an illegal address. The interpreter returns the memory's
contents, or crashes. Here such lanes are masked out, and the first one is reported.

A tensor counts as its whole storage, without the guards of `poison`: a kernel may read past a view.
After a kernel makes a pointer from an integer, which belongs to no argument, the rest of the launch
is not checked.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from conformance.engine.child.poison import Poison
from conformance.private_parts import available

_watch: "Addresses | None" = None


@dataclass
class Addresses:
    """A span of checked launches: `with Addresses(memory) as addresses: …; addresses.outside`."""

    memory: Poison
    outside: str = ""  # a sentence on the first access outside every tensor
    _launch: Any = None  # the kernel's Python function
    # first byte, end and name of each tensor
    _spans: list[tuple[int, int, str]] = field(default_factory=list)
    is_indirect: bool = False  # whether the launch has made a pointer from an integer

    def __enter__(self) -> "Addresses":
        global _watch
        _install()
        _watch = self
        return self

    def __exit__(self, *_: object) -> None:
        global _watch
        _watch = None

    def begin_launch(self, kernel: Any, names: list[str], values: list[Any]) -> None:
        """A kernel starts, with these arguments."""
        self._launch, self.is_indirect = kernel, False
        self._spans = [
            (*self.memory.body(x), name) for name, value in zip(names, values, strict=False) for x in _tensors(value)
        ]

    def inside(self, verb: str, pointers: Any, mask: Any, size: int) -> Any:
        """The mask without lanes whose `size` bytes are not inside one tensor of the launch."""
        if self.is_indirect or not mask.any():
            return mask
        live = pointers[mask]
        low, high = int(live.min()), int(live.max())
        if any(begin <= low and high + size <= end for begin, end, _ in self._spans):
            return mask
        good = ~mask
        for begin, end, _ in self._spans:
            if end - begin >= size:
                good = good | ((pointers >= begin) & (pointers <= end - size))
        bad = ~good
        if bad.any() and not self.outside:
            self.outside = self._sentence(verb, int(pointers[bad].flat[0]), int(bad.sum()), size)
        return mask & good

    def _sentence(self, verb: str, address: int, count: int, size: int) -> str:
        lanes = "an address" if count == 1 else f"{count} addresses"
        kernel = f"kernel {self._launch.__name__}{_line(self._launch)}"
        text = f"{kernel} {verb} {lanes} outside of every tensor that it was given"
        if not self._spans:
            return text
        distance, begins, name = min(
            (max(begin - address, address + size - end), address < begin, name) for begin, end, name in self._spans
        )
        side = f"begins {distance} bytes in front" if begins else f"ends {distance} bytes past the end"
        return f"{text}: the first {side} of {name}"


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in a launch argument: itself, entries of a tuple, or a descriptor's base."""
    if isinstance(value, tuple):
        for x in value:
            yield from _tensors(x)
    elif hasattr(value, "untyped_storage"):
        yield value
    elif hasattr(value, "base"):
        yield from _tensors(value.base)


def _line(kernel: Any) -> str:
    """The kernel's current line, as " (file:line)"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == kernel.__name__:
            return f" ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def _install() -> None:
    """Route the interpreter's memory accesses through this module; idempotent."""
    memory = available("triton.runtime.interpreter._interpreter")
    init_args = available("triton.runtime.interpreter.GridExecutor._init_args_hst")
    make_pointer = available("triton.runtime.interpreter.InterpreterBuilder.create_int_to_ptr")
    if isinstance(memory, _Memory) or None in (memory, init_args, make_pointer):
        return
    interpreter: Any = sys.modules["triton.runtime.interpreter"]

    def checked_init_args(self: Any, arguments: Any, settings: Any) -> Any:
        on_host = init_args(self, arguments, settings)
        if _watch is not None:
            names = [*self.arg_names[: len(on_host[0])], *on_host[1]]
            _watch.begin_launch(self.fn, names, [*on_host[0], *on_host[1].values()])
        return on_host

    def checked_make_pointer(self: Any, *arguments: Any) -> Any:
        if _watch is not None:
            _watch.is_indirect = True
        return make_pointer(self, *arguments)

    interpreter.GridExecutor._init_args_hst = checked_init_args
    interpreter.InterpreterBuilder.create_int_to_ptr = checked_make_pointer
    interpreter._interpreter = _Memory(memory)


class _Memory:
    """The interpreter's compiled half, with out-of-bounds lanes masked."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if _watch is not None:
            mask = _watch.inside("reads", pointers, mask, dtype.itemsize)
        return self._original.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        if _watch is not None:
            mask = _watch.inside("writes", pointers, mask, value.itemsize)
        return self._original.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        if _watch is not None:
            mask = _watch.inside("writes", pointers, mask, value.itemsize)
        return self._original.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, order: Any) -> Any:
        everywhere = pointers == pointers
        if _watch is not None and not _watch.inside("writes", pointers, everywhere, value.itemsize).all():
            return compared
        return self._original.atomic_cas(pointers, compared, value, order)
