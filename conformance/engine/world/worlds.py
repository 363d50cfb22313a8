"""All worlds of a run: which of them a case goes to, and how their ranks are started.

On CPUs a case of few ranks is run by a group within the largest world, so that who speaks to all ranks instead of the group's is caught. On GPUs
it has a world of its own: torch's symmetric memory numbers meetings by process, and hangs in a group whose ranks have met unequally often.
"""

import fcntl
import os
import tempfile
from functools import partial
from typing import Any

import torch.distributed as dist

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.engine.child.child import Settings
from conformance.engine.child.processes import Patience
from conformance.engine.child.runner import Outcome
from conformance.engine.world.joined import Attendants, joined
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import Seat
from conformance.engine.world.world import Held, World

TURN = os.path.join(tempfile.gettempdir(), "moe-conformance-gpus.lock")  # worlds of several runs take turns on the GPUs


class Worlds:
    """The worlds of one implementation, each formed when a case first needs it."""

    def __init__(self, settings: Settings, context: Any, folder: str) -> None:
        self._settings, self._context, self._folder = settings, context, folder
        self._worlds: dict[int, World] = {}  # by their number of ranks
        self._store: Any = None
        self._turn: Any = None
        self._started = 0
        self._attendants: Attendants | None = None
        self.most, self._patience, self._on_gpus = 0, Patience(0.0), False  # until it is settled

    def settle(self, description: dict[str, Any], case_seconds: float) -> None:
        """Take over what is known once the implementation is imported: how many ranks there is room for, and how long a case may take.

        Raises:
            UsageError: there are to be other ranks, and they cannot be met.
        """
        place = joined()
        self._attendants = Attendants(place) if place else None
        self.most = self._attendants.place.ranks if self._attendants else description["ranks"]
        self._patience, self._on_gpus = Patience(case_seconds), description["device"] == "cuda"

    def run(self, case: Case) -> Outcome:
        """The case on all its ranks."""
        ranks = ranks_of(CONTRACTS[case.function], case)
        if ranks > self.most:
            return Outcome(
                "ERROR",
                reason=f"a world of {ranks} ranks: there is room for {self.most}, each with its own GPU if there are any",
            )
        size = ranks if self._on_gpus else self.most
        if size not in self._worlds:
            self._worlds[size] = World(partial(self._start, size), self._patience)
        return self._worlds[size].run(case, ranks)

    def close(self) -> None:
        """End every rank; nothing is left running."""
        for world in self._worlds.values():
            world.close()
        self._store = None
        if self._turn:
            self._turn.close()
            self._turn = None

    def finish(self) -> None:
        """There will be no other case."""
        self.close()
        if self._attendants:
            self._attendants.dismiss()
            self._attendants = None

    def _start(self, ranks: int) -> list[Held]:
        """The processes of a new world."""
        self._started += 1
        logs = [os.path.join(self._folder, f"world{self._started}rank{rank}.log") for rank in range(ranks)]
        if self._attendants:
            own = LocalRank(
                self._context, self._settings, self._attendants.place.seat(self._started, 0, ranks), logs[0]
            )
            return [own, *self._attendants.open(self._started, ranks)]
        if self._on_gpus and not self._turn:
            self._turn = open(TURN, "w")  # noqa: SIM115  (held until the worlds end)
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seats = [
            Seat(rank, ranks, "127.0.0.1", self._store.port, f"world {self._started}", gpu=rank)
            for rank in range(ranks)
        ]
        return [LocalRank(self._context, self._settings, seat, log) for seat, log in zip(seats, logs, strict=True)]
