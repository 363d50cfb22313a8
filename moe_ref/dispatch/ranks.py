"""Several ranks in one process, so that an exchange can be followed in a debugger.

Each rank is a thread that runs the same function. A sum over ranks waits until all ranks of the
group have given their part; the parts are added in the order of the ranks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar

from torch import Tensor

X = TypeVar("X")
Sum = Callable[[Tensor], Tensor]
PATIENCE = 60.0  # seconds that a rank waits for the others; they may have gone another way


class _Groups:
    """Where the ranks of each group meet."""

    def __init__(self) -> None:
        self.lock, self.failed = Lock(), False
        self.meetings: dict[tuple[int, ...], tuple[Barrier, dict[int, Tensor]]] = {}

    def sum(self, x: Tensor, rank: int, group: tuple[int, ...]) -> Tensor:
        with self.lock:
            if self.failed:
                raise BrokenBarrierError
            meeting, contributions = self.meetings.setdefault(group, (Barrier(len(group), timeout=PATIENCE), {}))
        contributions[rank] = x
        meeting.wait()
        total = contributions[group[0]]
        for peer in group[1:]:
            total = total + contributions[peer]
        meeting.wait()  # no rank gives again before all have read
        return total

    def leave(self) -> None:
        """Release the ranks that wait for a rank that has failed."""
        with self.lock:
            self.failed = True
            for meeting, _ in self.meetings.values():
                meeting.abort()


def play(ranks: int, run: Callable[[int, Callable[[Sequence[int]], Sum]], X]) -> list[X]:
    """run(rank, over) of each rank; `over(group)` is the sum over the ranks in `group`, this one
    among them.

    Autograd records in every rank, whatever its mode in the caller.

    Raises:
        the first rank's error that is not a broken wait.
    """
    groups = _Groups()

    def one(rank: int) -> X:
        try:
            return run(rank, lambda group: lambda x: groups.sum(x, rank, tuple(group)))
        except BaseException:
            groups.leave()
            raise

    with ThreadPoolExecutor(max_workers=ranks) as pool:
        played = [pool.submit(one, rank) for rank in range(ranks)]
    errors = [error for future in played if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in played]
