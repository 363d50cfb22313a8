"""One rank of a world: a process like any child, that calls together with others of its kind."""

import datetime
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import Place, ranks_of
from conformance.engine.child.child import Settings, answer_all, chosen_device, opened
from conformance.interface import Implementation

MEETING_SECONDS = 60.0  # for all ranks to meet at the store
COLLECTIVE_SECONDS = 600.0  # of a process group; the parent's patience ends long before


@dataclass(frozen=True)
class Seat:
    """A rank's number in its world, its GPU, and the store where the ranks meet."""

    rank: int
    ranks: int
    host: str
    port: int
    meeting: str = "world"  # the keys of this world in the store
    gpu: int = 0


class Announced(Implementation):
    """An implementation of whose functions the parent hears before they are called."""

    def __init__(self, silent: Implementation, connection: Connection) -> None:
        super().__init__(silent.namespace, silent.name)
        self._connection = connection

    def call(self, function: str, *args: Any, **settings: Any) -> Any:
        self._connection.send(("calls", function))
        return super().call(function, *args, **settings)


def serve_rank(connection: Connection, settings: Settings, seat: Seat, log_path: str) -> None:
    """Meet the other ranks, then judge this rank's part of every case until the parent hangs up.

    Sends what a child sends; after "ready" comes ("formed", None) or ("unformed", a sentence), and in the middle of a case
    ("calls", a function of the implementation) before it is called and ("agree", whether all is well here), which the parent answers when
    all ranks have said so.
    """
    if settings.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(seat.gpu)
    implementation = opened(connection, settings, log_path)
    if implementation is None:
        return
    faulthandler.register(signal.SIGUSR1)  # the parent asks where this rank is
    try:
        groups = _meet(seat, chosen_device(settings.device))
    except Exception as error:
        connection.send(("unformed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        return
    connection.send(("formed", None))

    def agree(fine: bool) -> bool:
        connection.send(("agree", fine))
        return bool(connection.recv())

    def place_of(case: Case) -> Place:
        ranks = ranks_of(CONTRACTS[case.function], case)
        return Place(seat.rank, ranks, groups[ranks], agree)

    answer_all(connection, settings, Announced(implementation, connection), place_of)


def _meet(seat: Seat, device: str) -> dict[int, Any]:
    """A process group of the first n ranks, for each n."""
    if sys.platform == "linux" and seat.host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = datetime.timedelta(seconds=MEETING_SECONDS)
    store = dist.PrefixStore(seat.meeting, dist.TCPStore(seat.host, seat.port, is_master=False, timeout=patience))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=patience)
    for peer in range(seat.ranks):  # a group is made without a word between its ranks; this waits for each
        store.set(f"here {seat.rank}", "")
        store.wait([f"here {peer}"], patience)
    lasting = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    return {n: dist.new_group(list(range(n)), timeout=lasting) for n in range(1, seat.ranks + 1)}
