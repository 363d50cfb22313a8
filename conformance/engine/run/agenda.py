"""What is left to run, in rounds: requests for cases first, then each kind of section."""

from collections import defaultdict, deque
from collections.abc import Sequence

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.core.signature import FAR
from conformance.engine.choose.plan import Draw, Structure

Work = Draw | Structure


def function_of(work: Work) -> str:
    return work.section.function if isinstance(work, Draw) else work[0].function


class Agenda:
    """Queues by round and function.

    A process that asks for work gets more of its last function, whose kernels it has; else the
    function of which the most is left, so that all end at about the same time.
    """

    def __init__(self) -> None:
        self._single: defaultdict[int, dict[str, deque[Work]]] = defaultdict(dict)
        self._heavy: deque[Structure] = deque()  # far addresses, which take gigabytes on a GPU
        self._ranked: defaultdict[int, deque[Case]] = defaultdict(deque)
        self._seconds: dict[str, float] = {}  # of a function's last structure

    def __bool__(self) -> bool:
        queues = (queue for functions in self._single.values() for queue in functions.values())
        return bool(self._heavy) or any(queues) or any(self._ranked.values())

    def add(self, work: Work, turn: int = 0, first: bool = False) -> None:
        """Add a request, or a structure, to a round; `first`: in front of the function's others.

        Cases of several ranks are taken one by one, in a queue of their own.
        """
        if isinstance(work, Draw):
            self._queue(turn, work).append(work)
            return
        self._ranked[turn].extend(case for case in work if ranks_of(CONTRACTS[case.function], case))
        alone = [case for case in work if not ranks_of(CONTRACTS[case.function], case)]
        if alone and is_heavy(alone):
            self._heavy.append(alone)
        elif alone:
            queue = self._queue(turn, alone)
            queue.appendleft(alone) if first else queue.append(alone)

    def take(self, heavy: bool, last: str = "") -> Work | None:
        """The next work of a process whose last function was `last`; None: there is none."""
        if heavy and self._heavy and not self._left(-1):
            return self._heavy.popleft()
        turn = min((turn for turn in self._single if self._left(turn)), default=None)
        if turn is None:
            return None
        functions = self._left(turn)
        if last not in functions:
            last = max(functions, key=lambda name: len(functions[name]) * self._seconds.get(name, 1.0))
        return functions[last].popleft()

    def take_ranked(self) -> Case | None:
        """The next case of several ranks."""
        return next((queue.popleft() for _, queue in sorted(self._ranked.items()) if queue), None)

    def took(self, function: str, seconds: float) -> None:
        """A process has finished a structure of the function."""
        self._seconds[function] = seconds

    def _queue(self, turn: int, work: Work) -> deque[Work]:
        return self._single[turn].setdefault(function_of(work), deque())

    def _left(self, turn: int) -> dict[str, deque[Work]]:
        return {name: queue for name, queue in self._single.get(turn, {}).items() if queue}


def is_heavy(cases: Sequence[Case]) -> bool:
    return any(case.layout in FAR for case in cases)
