"""Plants a fault in one configuration of a kernel, which loses half of what it writes.

After each launch of the configuration, the second half of the elements that the launch has changed
get their earlier contents back, as if a store had come before its register was written. Integers of
four bytes and more become 0 instead, because a lost index must not lead another kernel out of its
memory.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.engine.child import configurations
from conformance.engine.child.outcome import Outcome

KILLED, SURVIVED, WITHOUT_EFFECT = "killed", "survived", "without effect"
TRIES = 20  # the number of cases of one process in which a configuration's fault may survive
INDEX_BYTES = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_planted: "Fault | None" = None


class Fault:
    """A configuration whose stores are lost. `effect` says whether any store was lost."""

    def __init__(self, name: str) -> None:
        self.name, self.effect = name, False
        self._before: list[tuple[Tensor, Tensor]] = []

    def enter(self, name: str, arguments: dict[str, Any]) -> None:
        """A launch begins."""
        if name == self.name:
            tensors = {id(x): x for x in _tensors(arguments.values())}
            self._before = [(x, x.clone()) for x in tensors.values() if x.numel() and x.element_size() in _BITS]

    def exit(self) -> None:
        """The launch has been made: undo half of its writes."""
        for x, contents_before in self._before:
            now, earlier = x.view(_BITS[x.element_size()]), contents_before.view(_BITS[x.element_size()])
            changed = (now != earlier).reshape(-1)
            lost = changed & (changed.cumsum(0) > changed.sum() // 2)
            self.effect = self.effect or bool(lost.any())
            is_index = not x.is_floating_point() and x.element_size() >= INDEX_BYTES
            now.copy_(torch.where(lost.reshape(now.shape), 0 if is_index else earlier, now))
        self._before = []


@contextlib.contextmanager
def planted(name: str) -> Iterator[Fault]:
    """A fault in the configuration of this name."""
    global _planted
    chains = sys.modules["triton"].knobs.runtime
    chains.launch_enter_hook.add(_entered)
    chains.launch_exit_hook.add(_left)
    _planted = Fault(name)
    try:
        yield _planted
    finally:
        _planted = None


def _entered(lazy: Any) -> None:
    launch = lazy.get().get(configurations.KEY)
    if launch is not None and _planted:
        kernel, identity, arguments = launch
        _planted.enter(configurations.name_of(kernel, identity), arguments)


def _left(_: Any) -> None:
    if _planted:
        _planted.exit()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, their parts and the memory of descriptors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(base := getattr(value, "base", None), Tensor):
            yield base


class Planting:
    """Plants a fault in each configuration that a case judges, until the process has killed it."""

    def __init__(self) -> None:
        self._killed: set[str] = set()
        self._tries: Counter[str] = Counter()

    def tried(self, case: Case, names: Iterable[str], judged: Callable[[Case], Outcome]) -> dict[str, str]:
        """By configuration, the outcome of the passing case with a fault in it."""
        results = {}
        for name in names:
            if name in self._killed or self._tries[name] >= TRIES:
                continue
            with planted(name) as fault:
                outcome = judged(case.changed(law=""))
            if outcome.status in ("PASS", "UNINFORMATIVE"):
                results[name] = SURVIVED if fault.effect else WITHOUT_EFFECT
                self._tries[name] += 1
            else:
                results[name] = KILLED
                self._killed.add(name)
        configurations.take()
        return results
