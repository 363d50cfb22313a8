"""Worlds over torchrun's processes, on one or several hosts: each process provides one rank.

Rank 0 draws the cases and gives the verdict; the others run `lend_rank`. Each lender runs its rank
in a child process, so that a crash of the implementation does not end torchrun's process. The child
communicates with rank 0 directly; rank 0 tells the lender when to start and end it.
"""

import contextlib
import datetime
import os
import pickle
import secrets
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import AuthenticationError, connection, get_context
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from conformance.engine.child.processes import expect_messages
from conformance.engine.options import ChildOptions
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import RankAddress
from conformance.interface import UsageError
from conformance.private_parts import available

ANSWER_SECONDS = 20.0  # seconds for a lender to report how its child ended
ARRIVAL_SECONDS = 120  # seconds for rank 0 to open the store, and for the others to call it
RUN_DAYS = 7  # a run may take long before its first case of several ranks
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class TorchrunRank:
    """This process's rank in the world that torchrun has started."""

    rank: int
    ranks: int
    host: str
    port: int
    gpu: int  # on its own host
    hosts_store: bool  # whether this process hosts the store
    local_ranks: int  # on this host

    def address(self, world: int, rank: int, ranks: int) -> RankAddress:
        return RankAddress(rank, ranks, self.host, self.port, f"moe-conformance world {world}", self.gpu)

    def store(self, first: bool = False) -> Any:
        """The key-value store of all ranks, hosted by torchrun's agent or, from here on, rank 0.

        Raises:
            UsageError: it cannot be hosted there, or does not answer.
        """
        hosting = self.hosts_store and first
        patience = datetime.timedelta(seconds=ARRIVAL_SECONDS)
        try:
            store = dist.TCPStore(self.host, self.port, is_master=hosting, wait_for_workers=False, timeout=patience)
        except dist.DistError as error:
            reason = f"rank {self.rank} found nobody there in {ARRIVAL_SECONDS} s"
            if hosting:
                reason = "rank 0 cannot listen there, the port may be taken"
            where = f"MASTER_ADDR={self.host} MASTER_PORT={self.port}"
            raise UsageError(f"{where}: {reason} ({str(error).splitlines()[0]})") from None
        return dist.PrefixStore("moe-conformance", store)


def torchrun_rank() -> TorchrunRank | None:
    """The rank of this process in torchrun's environment; None without one, or alone.

    Raises:
        UsageError: a part of the variables is missing.
    """
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if not variables["RANK"] or variables["WORLD_SIZE"] == "1":
        return None
    missing = ", ".join(name for name, value in variables.items() if not value)
    if missing:
        raise UsageError(f"RANK is set, so this process is one of several; {missing} must be set too, as torchrun does")
    rank, agent = int(variables["RANK"]), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    gpu = int(os.environ.get("LOCAL_RANK", rank))
    ranks, port = int(variables["WORLD_SIZE"]), int(variables["MASTER_PORT"])
    hosts_store, local_ranks = rank == 0 and not agent, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return TorchrunRank(rank, ranks, variables["MASTER_ADDR"], port, gpu, hosts_store, local_ranks)


class RemoteRanks:
    """Rank 0's connections to the lenders of all other ranks."""

    def __init__(self, here: TorchrunRank) -> None:
        self.here = here
        self._store = here.store(first=True)
        self._listener: Listener | None = None
        self._controls: dict[int, Connection] = {}
        self._missing = ""

    def open(self, world: int, ranks: int) -> list["RemoteRank"]:
        """A new process for each other rank of a world, by rank.

        Raises:
            UsageError: some have not called in time; every later call raises at once.
        """
        if self._missing:
            raise UsageError(self._missing)
        if self._listener is None:
            key, host = secrets.token_bytes(16), self.here.host
            self._listener = Listener((host if host in LOOPBACK else "0.0.0.0", 0), authkey=key)
            self._store.set("address", pickle.dumps(((host, self._listener.address[1]), key)))
            self._controls = self._accept(self.here.ranks)
        for rank in range(1, ranks):
            # the lender is gone, and its process will be missing
            with contextlib.suppress(OSError):
                self._controls[rank].send(("open", world, ranks))
        pipes = self._accept(ranks)
        return [RemoteRank(pipes[rank], self._controls[rank], world) for rank in sorted(pipes)]

    def dismiss(self) -> None:
        """End every lender, including those not connected yet."""
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                control.send(("over", 0, 0))
        self._store.set("address", pickle.dumps(None))
        if self._listener:
            self._listener.close()

    def _accept(self, ranks: int) -> dict[int, Connection]:
        """A connection from each of the ranks 1 … ranks - 1, which first sends its rank.

        Raises:
            UsageError: ranks not connected within ARRIVAL_SECONDS; closes all connections.
        """
        assert self._listener is not None
        # `accept` has no timeout: without the socket, rank 0 waits forever for a missing rank
        is_available = available("multiprocessing.connection.SocketListener") is not None
        socket = getattr(getattr(self._listener, "_listener", None), "_socket", None) if is_available else None
        deadline = time.monotonic() + ARRIVAL_SECONDS
        calls: dict[int, Connection] = {}
        while missing := [rank for rank in range(1, ranks) if rank not in calls]:
            if socket is not None and not connection.wait([socket], max(deadline - time.monotonic(), 0)):
                break
            # a stranger, or a rank that died
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                call = self._listener.accept()
                calls[call.recv()] = call
                expect_messages(call)
        if missing:
            for call in calls.values():
                call.close()
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.here.ranks}"
            where = f"{self.here.host}:{self._listener.address[1]}"
            self._missing = f"{names} did not call rank 0, at {where}, in {ARRIVAL_SECONDS} s"
            self._missing += ": not started, dead, or kept from it by the network"
            raise UsageError(self._missing)
        return calls


class RemoteRank:
    """A rank's process, reached through its lender; see `LocalRank`."""

    pid = None  # the process runs on another host, or belongs to the lender

    def __init__(self, pipe: Connection, control: Connection, world: int) -> None:
        self.pipe, self._control, self._world, self._ending = pipe, control, world, ""

    def alive(self) -> bool:
        """Whether the process is alive is unknown: its host says so only when it is asked."""
        return True

    def ending(self) -> str:
        if not self._ending:
            self._ending = self._ask("close")
        return self._ending

    def where(self) -> str:
        return self._ask("where")

    def end(self) -> None:
        self.pipe.close()
        self.ending()

    def _ask(self, verb: str) -> str:
        with contextlib.suppress(OSError, EOFError):
            self._control.send((verb, self._world, 0))
            if self._control.poll(ANSWER_SECONDS):
                return str(self._control.recv())
        return " (its host does not answer)"


def lend_rank(here: TorchrunRank, options: ChildOptions) -> int:
    """Provide this rank to rank 0's worlds until rank 0 dismisses it or dies; the exit code.

    Raises:
        UsageError: rank 0 cannot be reached.
    """
    store = here.store()
    store.wait(["address"], datetime.timedelta(days=RUN_DAYS))
    call = pickle.loads(store.get("address"))
    if call is None:  # the run had no case of several ranks
        return 0
    (host, port), key = call
    try:
        control = Client((host, port), authkey=key)
    except ConnectionRefusedError:
        raise UsageError(f"rank {here.rank} came when rank 0 had stopped listening at {host}:{port}") from None
    control.send(here.rank)
    ranks: dict[int, LocalRank] = {}  # by the number of the world
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-") as folder,
        contextlib.suppress(EOFError, ConnectionResetError),
    ):
        while (request := control.recv())[0] != "over":
            verb, number, size = request
            if verb == "open":
                address, log_path = here.address(number, here.rank, size), os.path.join(folder, f"world{number}.log")
                ranks[number] = LocalRank(get_context("forkserver"), options, address, log_path, call)
            elif verb == "where":
                control.send(ranks[number].where())
            else:
                control.send(ranks[number].ending())
                ranks.pop(number).end()
    for rank in ranks.values():
        rank.end()
    return 0
