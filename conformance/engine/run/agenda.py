"""What is left to run, in order: structures for single processes, heavy ones, cases of several ranks."""

import heapq
from collections.abc import Sequence

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.core.signature import FAR
from conformance.engine.choose.plan import Draw, Structure

Work = Draw | Structure
Priority = tuple[float, ...]  # the lowest first
Entry = tuple[Priority, int, Work]


class Agenda:
    """A priority queue. Work of equal priority keeps its order."""

    def __init__(self) -> None:
        self._count = 0
        self._light: list[Entry] = []
        self._heavy: list[Entry] = []  # far addresses, which take gigabytes on a GPU
        self._ranked: list[Entry] = []  # one case each

    def __bool__(self) -> bool:
        return bool(self._light or self._heavy or self._ranked)

    def add(self, work: Work, priority: Priority = ()) -> None:
        """Add a request, or a structure; the cases of several ranks are taken one by one."""
        if isinstance(work, Draw):
            self._push(self._light, work, priority)
            return
        alone = [case for case in work if not ranks_of(CONTRACTS[case.function], case)]
        for case in work:
            if ranks_of(CONTRACTS[case.function], case):
                self._push(self._ranked, [case], priority)
        if alone:
            self._push(self._heavy if is_heavy(alone) else self._light, alone, priority)

    def take(self, heavy: bool) -> Work | None:
        """The next work of a single process; None if there is none, or only heavy work if not `heavy`."""
        queues = [queue for queue in (self._light, self._heavy if heavy else []) if queue]
        return heapq.heappop(min(queues))[2] if queues else None

    def take_ranked(self) -> Case | None:
        """The next case of several ranks."""
        if not self._ranked:
            return None
        work = heapq.heappop(self._ranked)[2]
        assert isinstance(work, list)
        return work[0]

    def _push(self, queue: list[Entry], work: Work, priority: Priority) -> None:
        self._count += 1
        heapq.heappush(queue, (priority, self._count, work))


def is_heavy(cases: Sequence[Case]) -> bool:
    return any(case.layout in FAR for case in cases)
