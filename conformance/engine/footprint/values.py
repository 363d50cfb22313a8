"""Values as text that is equal in every process, and the code that they hold."""

import copyreg
import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import PurePath
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, Protocol

import torch

from conformance.engine.footprint.names import attribute, is_readable

ATOMS = (type(None), bool, int, float, complex, bytes, type(...), type(NotImplemented), range)
SEQUENCES = (tuple, list, deque)
SETS = (set, frozenset)
MAPPINGS = (dict, MappingProxyType)
STATELESS = ("lock", "RLock", "_local", "ContextVar", "Logger", "Condition", "module")
OPAQUE = "opaque"
MOST = 50_000  # values inside one value


class Follower(Protocol):
    """Follows references: `conformance.engine.footprint.closure.Closure`."""

    def reference(self, value: Any, entry: Any, arguments: list[Any]) -> str | None: ...
    def whole(self, entry: Any) -> None: ...
    def unrooted(self, content: str) -> str: ...
    def is_followed(self, cls: type) -> bool: ...


class Values:
    """Writes values as text."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def form(self, value: Any, entry: Any) -> str:
        """The value as text; `entry` uses all code in it."""
        self.left = MOST
        return self._form(value, entry, ())

    def _form(self, value: Any, entry: Any, outer: tuple[int, ...]) -> str:
        kind = type(value)
        if kind in ATOMS:
            return repr(value)
        if kind is str:
            if value.isidentifier():
                entry.texts.add(value)
            return repr(self.follower.unrooted(value))
        if id(value) in outer:
            return f"outer {len(outer) - outer.index(id(value))}"
        self.left -= 1
        if self.left < 0 or not is_readable(value):
            return self._opaque(value, entry)
        inner = (*outer, id(value))
        write: Callable[[Any], str] = lambda x: self._form(x, entry, inner)  # noqa: E731
        if kind in SEQUENCES:
            return f"{kind.__name__}({','.join(map(write, value))})"
        if kind in SETS:
            return f"{kind.__name__}({','.join(sorted(map(write, value)))})"
        if kind in MAPPINGS:
            return f"{kind.__name__}({','.join(f'{write(k)}:{write(v)}' for k, v in list(value.items()))})"
        reference = self.follower.reference(value, entry, [])
        if reference is not None:
            return reference
        if isinstance(value, PurePath):
            return f"path {self.follower.unrooted(str(value))!r}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value, entry)
        return self._instance(value, entry, write)

    def _tensor(self, x: torch.Tensor, entry: Any) -> str:
        """Its dtype, shape and bits; those on a GPU are not read."""
        if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized:
            return self._opaque(x, entry)
        content = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        return f"tensor({x.dtype},{tuple(x.shape)},{hashlib.sha256(content).hexdigest()})"

    def _instance(self, value: Any, entry: Any, write: Callable[[Any], str]) -> str:
        """An object by its class and its state, as pickle sees them."""
        cls = type(value)
        name = self.follower.reference(cls, entry, [])
        if cls.__name__ in STATELESS:
            return f"{name}()"
        try:
            reduced = copyreg.dispatch_table[cls](value) if cls in copyreg.dispatch_table else value.__reduce_ex__(2)
        except Exception:
            attributes = attribute(value, "__dict__")
            return (
                f"{name}({write(dict(attributes))})"
                if attributes and not str(name).startswith("external")
                else self._opaque(value, entry)
            )
        if isinstance(reduced, str):
            return f"{name} {reduced}"
        maker, arguments, state, items, pairs = (
            (*reduced[:5], None, None, None)[:5] if len(reduced) > 2 else (*reduced, *(None,) * 3)
        )
        state_parts = [maker, arguments, state, list(items) if items else None, list(pairs) if pairs else None]
        return f"{name}({','.join(map(write, state_parts))})"

    def _opaque(self, value: Any, entry: Any) -> str:
        self.follower.whole(entry)
        return f"{OPAQUE} {type(value).__qualname__}"

    def callables(self, value: Any, entry: Any, depth: int = 4) -> None:
        """Make `entry` use the code that an external function holds."""
        if isinstance(value, (*SEQUENCES, *SETS)) and depth:
            for x in list(value):
                self.callables(x, entry, depth - 1)
        elif isinstance(value, (dict, MappingProxyType)) and depth:
            for pair in list(value.items()):
                self.callables(pair, entry, depth - 1)
        elif isinstance(value, (FunctionType, MethodType, type)) or callable(attribute(value, "fn")):
            self.follower.reference(value, entry, [])
        elif type(value).__name__ == "partial" and depth:
            self.callables((value.func, value.args, value.keywords), entry, depth - 1)
        elif self.follower.is_followed(type(value)):
            self.form(value, entry)
