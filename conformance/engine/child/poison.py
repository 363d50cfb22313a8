"""Poisoned fresh memory with guards.

`install` replaces torch's allocating functions in this process once, before the implementation is
imported. While `Poison` is entered, every tensor they return lies between guard bytes and is filled
with NaN, the largest finite number or zero (integers: zero, a pattern or the largest). A row that
no kernel wrote then shows in the values, and a store past an edge shows in the guards. Memory that
an extension allocates by itself is not covered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.engine.child.results import is_freed

GUARD_BYTES = 256  # preserves every alignment of vector loads
GUARD_VALUE = 0xA5

_guards = True  # whether tensors lie between guards in this process
_originals: dict[tuple[Any, str], Callable[..., Tensor]] = {}
_active: "Poison | None" = None


def install(guards: bool = True) -> None:
    """Route torch's uninitialised allocations through this module; idempotent.

    Args:
        guards: without them each tensor is an allocation as it was asked for.
    """
    global _guards
    _guards = guards
    if _originals:
        return
    of_torch = ((torch, name) for name in ("empty", "empty_like", "empty_strided"))
    for owner, name in (*of_torch, (Tensor, "new_empty"), (Tensor, "new_empty_strided")):
        _originals[owner, name] = original = getattr(owner, name)
        setattr(owner, name, _poisoned(original))


def _poisoned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        fresh = original(*args, **kwargs)
        without_memory = fresh.is_meta or type(fresh) is not Tensor  # a compiler traces with tensors of its own
        if _active is None or without_memory or fresh.layout != torch.strided or kwargs.get("out") is not None:
            return fresh
        return _active.guarded(fresh)

    return allocate


class Poison:
    """A span of poisoned memory: `with Poison("nan") as poison: …; poison.overrun()`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._storages: list[Tensor] = []
        # by a storage's address: first byte and end between the guards
        self._bodies: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> "Poison":
        global _active
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None

    def guarded(self, fresh: Tensor) -> Tensor:
        """A tensor like `fresh`, poisoned and between guards."""
        global _active
        _active = None
        try:
            size = fresh.untyped_storage().nbytes()
            body, length = torch.empty(0, dtype=fresh.dtype, device=fresh.device), (size // fresh.element_size(),)
            if not _guards:
                _fill(body.set_(fresh.untyped_storage(), 0, length, (1,)), self.kind)
                return fresh
            storage = torch.empty(size + 2 * GUARD_BYTES + (-size) % 8, dtype=torch.uint8, device=fresh.device)
            storage.fill_(GUARD_VALUE)
            offset = GUARD_BYTES // fresh.element_size()
            body.set_(storage.untyped_storage(), offset, length, (1,))
            _fill(body, self.kind)
            out = body.set_(storage.untyped_storage(), offset, fresh.shape, fresh.stride())
        finally:
            _active = self
        start = storage.untyped_storage().data_ptr()
        self._bodies[start] = (start + GUARD_BYTES, start + GUARD_BYTES + size)
        self._storages.append(storage[:GUARD_BYTES])
        self._storages.append(storage[GUARD_BYTES + size :])
        return out.requires_grad_(fresh.requires_grad)

    def body(self, x: Tensor) -> tuple[int, int]:
        """The first byte and the end of a tensor's storage, without guards."""
        storage = x.untyped_storage()
        return self._bodies.get(storage.data_ptr(), (storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def overrun(self) -> bool:
        """Whether a guard was overwritten.

        A guard whose storage has been freed counts as intact.
        """
        live_guards = [guard for guard in self._storages if not is_freed(guard)]
        by_device: dict[torch.device, list[Tensor]] = {}
        for guard in live_guards:
            by_device.setdefault(guard.device, []).append(guard)
        return any(bool((torch.cat(guards) != GUARD_VALUE).any()) for guards in by_device.values())


def _fill(body: Tensor, kind: str) -> None:
    """The poison of a dtype.

    Poisons of integers differ, so that unwritten offsets show as unwritten rows.
    """
    if not (body.is_floating_point() or body.is_complex()):
        kind = {"nan": "zero", "zero": "max", "max": "nan"}[kind]
    if kind == "zero":
        body.zero_()
    elif body.element_size() == 1:
        body.view(torch.uint8).fill_(1 if body.dtype == torch.bool else 0x7F if kind == "nan" else 0x7E)
    elif body.is_floating_point() or body.is_complex():
        body.fill_(float("nan") if kind == "nan" else torch.finfo(body.dtype).max)
    else:
        body.fill_(torch.iinfo(body.dtype).max if kind == "max" else 0x5A5A)
