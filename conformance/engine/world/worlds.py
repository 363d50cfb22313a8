"""All worlds of a run: the choice of a case's world, and the start of its ranks.

On CPUs a case with few ranks runs on a subgroup of the largest world, which catches calls that
address all ranks instead of the group's. On GPUs every size has a separate world: torch's symmetric
memory counts rendezvous per process, and hangs in a group with unequal counts. On fewer GPUs than
ranks, the ranks share them.
"""

import os
import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.catalogue import ranks_with_calls_before
from conformance.core.case import Case
from conformance.engine.child.outcome import LAST, Outcome
from conformance.engine.child.patience import Patience
from conformance.engine.options import ChildOptions
from conformance.engine.world import turn
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import RankAddress
from conformance.engine.world.torchrun import RemoteRanks, torchrun_rank
from conformance.engine.world.world import Process, World

SHARED_TIMES = 2  # the time limit of a case whose ranks share a GPU: they wait for each other's time slices


class Worlds:
    """The worlds of one implementation, each formed when a case first needs it."""

    def __init__(self, options: ChildOptions, context: Any, folder: str) -> None:
        self._options, self._context, self._folder = options, context, folder
        self._worlds: dict[int, World] = {}  # by their number of ranks
        self._before: dict[int, list[Case]] = {}  # cases of its world, by the identity of a failing case
        self._store: Any = None
        self._has_turn = False
        self._started = 0
        self._starting = threading.Lock()
        self._remote: RemoteRanks | None = None
        # set by `prepare`: the largest number of ranks, and whether they share GPUs
        self.max_ranks, self.shared_ranks, self._on_gpus = 0, 0, False
        self._patience = self._patience_sharing = Patience(0.0)

    def prepare(self, description: dict[str, Any], case_seconds: float) -> None:
        """Set the number of ranks from torchrun's world, else from the child's description.

        Raises:
            UsageError: torchrun has started other ranks, and they cannot be reached.
        """
        here = torchrun_rank()
        self._remote = RemoteRanks(here) if here else None
        self._on_gpus = description["device"] == "cuda"
        self.max_ranks, self.shared_ranks = description["ranks"], description["shared_ranks"]
        if here and self._on_gpus and here.local_ranks > torch.cuda.device_count():
            self.max_ranks, self.shared_ranks = min(torch.cuda.device_count(), here.ranks), here.ranks
        elif here:
            self.max_ranks, self.shared_ranks = here.ranks, 0
        self._patience, self._patience_sharing = Patience(case_seconds), Patience(SHARED_TIMES * case_seconds)

    @property
    def lanes(self) -> int:
        """The number of cases that may run at the same time, each on another number of ranks."""
        return max(self.max_ranks, self.shared_ranks) if self._on_gpus and not self._remote else 1

    def run(self, case: Case, alone: bool = False) -> Outcome:
        """The case on all its ranks.

        Args:
            alone: no other case runs meanwhile; the case has a longer limit.
        """
        ranks = ranks_with_calls_before(case)
        if ranks > max(self.max_ranks, self.shared_ranks):
            room = f"there is room for {max(self.max_ranks, self.shared_ranks)}"
            return Outcome("NOT_RUN", reason=f"a world of {ranks} ranks: {room}")
        size = ranks if self._on_gpus else self.max_ranks
        if size not in self._worlds:
            patience = self._patience_sharing if ranks > self.max_ranks else self._patience
            self._worlds[size] = World(partial(self._start, size), patience)
        world = self._worlds[size]
        outcome = world.run(case, alone)
        if outcome.finding or outcome.status in LAST:
            self._before[id(case)] = world.ran
        return outcome

    def before(self, case: Case) -> list[Case]:
        """The cases that ran before this one in its world."""
        return self._before.get(id(case), [])[:-1]

    def has_hung(self, function: str) -> bool:
        """Whether a case of the function hung while no other case ran."""
        return function in self._patience.hung or function in self._patience_sharing.hung

    def close(self) -> None:
        """End every rank; nothing is left running."""
        for world in list(self._worlds.values()):
            world.close()
        self._store = None
        if self._has_turn:
            turn.give_back()
            self._has_turn = False

    def dismiss(self) -> None:
        """End every rank, and the lenders of torchrun's other ranks."""
        self.close()
        if self._remote:
            self._remote.dismiss()
            self._remote = None

    def _start(self, ranks: int) -> list[Process]:
        """The processes of a new world."""
        with self._starting:
            return self._processes(ranks)

    def _processes(self, ranks: int) -> list[Process]:
        self._started += 1
        number, name = self._started, f"world {self._started}"
        logs = [os.path.join(self._folder, f"world{number}rank{rank}.log") for rank in range(ranks)]
        if self._remote:
            address = self._remote.here.address(number, 0, ranks)
            return [LocalRank(self._context, self._options, address, logs[0]), *self._remote.open(number, ranks)]
        if self._on_gpus and not self._has_turn:
            turn.take()
            self._has_turn = True
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        addresses = [RankAddress(rank, ranks, "127.0.0.1", port, name, gpu=rank) for rank in range(ranks)]
        return [LocalRank(self._context, self._options, *pair) for pair in zip(addresses, logs, strict=True)]
