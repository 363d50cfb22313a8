"""One rank of a world: a child process that makes collective calls."""

import contextlib
import datetime
import os
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import RankContext, ranks_of
from conformance.engine.child.child import answer_all, chosen_device, import_implementation
from conformance.engine.options import ChildOptions
from conformance.interface import Implementation
from conformance.private_parts import available

MEETING_SECONDS = 60.0  # for all ranks to meet at the store
COLLECTIVE_SECONDS = 600.0  # timeout of a process group, far above the parent's time limit


@dataclass(frozen=True)
class RankAddress:
    """A rank's number in its world, its GPU, and the store where the ranks meet.

    GPUs are counted round: a rank whose number is too large shares another rank's.
    """

    rank: int
    ranks: int
    host: str
    port: int
    meeting: str = "world"  # the keys of this world in the store
    gpu: int = 0


class Announced(Implementation):
    """An implementation that announces each call of its functions to the parent."""

    def __init__(self, silent: Implementation, connection: Connection) -> None:
        super().__init__(silent.namespace, silent.name)
        self._connection = connection

    def call(self, function: str, *args: Any, **settings: Any) -> Any:
        self._connection.send(("calls", function))
        return super().call(function, *args, **settings)


def serve_rank(connection: Connection, options: ChildOptions, address: RankAddress, log_path: str) -> None:
    """Meet the other ranks, then judge this rank's part of every case until the parent hangs up.

    Sends a child's messages, and after "ready" ("formed", None) or ("unformed", a sentence); during
    a case ("calls", a function) before a call of the implementation, and ("agree", a bool). The
    parent answers "agree" with the AND over all ranks, once all have sent it.
    """
    if options.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(address.gpu % torch.cuda.device_count())
    implementation = import_implementation(connection, options, log_path)
    if implementation is None:
        return
    try:
        groups, gpus = _meet(address, chosen_device(options.device))
    except Exception as error:
        connection.send(("unformed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        return
    connection.send(("formed", None))

    def agree(fine: bool) -> bool:
        connection.send(("agree", fine))
        return bool(connection.recv())

    def context_of(case: Case) -> RankContext:
        ranks = ranks_of(CONTRACTS[case.function], case)
        return RankContext(address.rank, ranks, groups[ranks], agree, gpus=len(set(gpus[:ranks])))

    answer_all(connection, options, Announced(implementation, connection), log_path, context_of)


def _meet(address: RankAddress, device: str) -> tuple[dict[int, Any], list[str]]:
    """A process group of the first n ranks, for each n, and each rank's GPU, if any."""
    if sys.platform == "linux" and address.host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = datetime.timedelta(seconds=MEETING_SECONDS)
    tcp = dist.TCPStore(address.host, address.port, is_master=False, timeout=patience)
    store = dist.PrefixStore(address.meeting, tcp)
    gpus = [] if device == "cpu" else _gpus_of_all(store, address)
    backend = backend_of(device, shared=len(set(gpus)) < len(gpus))
    first = _join_default_group(store, address, backend, patience)
    # creating a group exchanges no messages; this waits for all ranks
    for peer in range(address.ranks):
        store.set(f"here {address.rank}", "")
        store.wait([f"here {peer}"], patience)
    lasting = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    numbers = [first + rank for rank in range(address.ranks)]
    groups = {n: dist.new_group(numbers[:n], backend=backend, timeout=lasting) for n in range(1, address.ranks + 1)}
    return groups, gpus


def _join_default_group(store: Any, address: RankAddress, backend: str, patience: datetime.timedelta) -> int:
    """Join the default process group; returns the number there of the first rank of a case's group.

    On CPUs a case's ranks are 1, 2, … of the default group, whose collectives do nothing. So a
    function is wrong that uses the default group, or a number in it, in the place of its own group.
    """
    with contextlib.suppress(ImportError):
        import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    first = int(
        backend == "gloo" and available("torch.testing._internal.distributed.fake_pg.FakeProcessGroup") is not None
    )
    if first:
        backend = "fake"
    rank, ranks = first + address.rank, first + address.ranks
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
    return first


def backend_of(device: str, shared: bool) -> str:
    """The backend for the ranks. NCCL refuses ranks that share a GPU, so they use another one."""
    if device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def _gpus_of_all(store: Any, address: RankAddress) -> list[str]:
    """Each rank's host and GPU, exchanged through the store."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    store.set(f"gpu {address.rank}", f"{socket.gethostname()} {properties.uuid}")
    return [store.get(f"gpu {rank}").decode() for rank in range(address.ranks)]
