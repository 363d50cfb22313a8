"""The remaining work of a run, in rounds: requests for cases first, then each kind of section."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from conformance.catalogue import ranks_with_calls_before
from conformance.core.case import Case
from conformance.engine.choose.plan import Draw, Structure

Work = Draw | Structure
REQUESTS = -1  # the round of requests, which precedes all others
STAY = 4  # a process leaves its function for another one that has this many times as much work left


def function_of(work: Work) -> str:
    return work.section.function if isinstance(work, Draw) else work[0].function


class Agenda:
    """Queues by round and function.

    A process that asks for work gets the function of which the most is left for each process at
    work on it, so that all end at about the same time, and few wait for a kernel that another one
    compiles. It prefers its last function, whose kernels it has.
    """

    def __init__(self) -> None:
        self._single: defaultdict[int, dict[str, deque[Work]]] = defaultdict(dict)
        self._heavy: deque[Structure] = deque()  # works that take gigabytes of a GPU, and seconds
        # by number of ranks: round, place in the order of arrival, case
        self._ranked: defaultdict[int, list[tuple[int, int, Case]]] = defaultdict(list)
        self._arrived = count()
        self._seconds: dict[str, float] = {}  # seconds of a function's last structure

    def __bool__(self) -> bool:
        return bool(self._single or self._heavy or any(self._ranked.values()))

    def add(self, work: Work, turn: int = 0, first: bool = False) -> None:
        """Add a request, or a structure, to a round; `first`: in front of the function's others.

        Cases of worlds are taken one by one, in queues of their own.
        """
        if isinstance(work, Draw):
            self._queue(turn, work).append(work)
            return
        single_process_cases = []
        for case in work:
            ranks = ranks_with_calls_before(case)
            if ranks:
                heappush(self._ranked[ranks], (turn, next(self._arrived), case))
            else:
                single_process_cases.append(case)
        if single_process_cases and is_heavy(single_process_cases):
            self._heavy.append(single_process_cases)
        elif single_process_cases:
            queue = self._queue(turn, single_process_cases)
            queue.appendleft(single_process_cases) if first else queue.append(single_process_cases)

    def take(self, heavy: bool, last: str = "", functions_of_others: Sequence[str] = ()) -> Work | None:
        """The next work of a process whose last function was `last`; None if there is none.

        Args:
            heavy: whether it may be heavy.
            functions_of_others: the functions of the other processes that work.
        """
        if heavy and self._heavy and REQUESTS not in self._single:
            return self._heavy.popleft()
        if not self._single:
            return None
        turn = min(self._single)
        functions = self._single[turn]
        working = Counter(functions_of_others)

        def left_for_each(name: str) -> float:
            seconds_left = len(functions[name]) * self._seconds.get(name, 1.0)
            return seconds_left / (1 + working[name]) * (STAY if name == last else 1)

        function = max(functions, key=left_for_each)
        work = functions[function].popleft()
        if not functions[function]:
            del functions[function]
        if not functions:
            del self._single[turn]
        return work

    def take_ranked(self, lane: int = 0, lanes: int = 1) -> Case | None:
        """The next case of a world for one of the lanes, which share out the numbers of ranks.

        A world is slow to form, so its cases do not wait for the rounds of single processes.
        """
        ours = [queue for ranks, queue in self._ranked.items() if queue and ranks % lanes == lane]
        return heappop(min(ours, key=lambda queue: queue[0][:2]))[2] if ours else None

    def took(self, function: str, seconds: float) -> None:
        """Note how long a process took for a structure of the function."""
        self._seconds[function] = seconds

    def _queue(self, turn: int, work: Work) -> deque[Work]:
        return self._single[turn].setdefault(function_of(work), deque())


def is_heavy(cases: Sequence[Case]) -> bool:
    return any(case.is_heavy for case in cases)
