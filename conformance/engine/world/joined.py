"""Ranks that somebody else has started: under torchrun, on one host or several, each of its processes lends the world one rank.

Rank 0 draws the cases and gives the verdict; the others attend. Each attendant keeps its rank in a process of its own, so that a crash of
the implementation does not end what torchrun watches. That process talks to rank 0 directly; the attendant hears when to start and end it.
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

from conformance.engine.child.child import Settings
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import Seat
from conformance.interface import UsageError

ANSWER_SECONDS = 20.0  # for an attendant to say how a process ended
ARRIVAL_SECONDS = 120  # for rank 0 to open the store; and for the others to call it, once it has said where
RUN_DAYS = 7  # before its first case for several ranks, a run may be at others for long
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Joined:
    """This process's part in a world that is there already."""

    rank: int
    ranks: int
    host: str
    port: int
    gpu: int  # on its own host
    hosts_store: bool  # nobody else does

    def seat(self, world: int, rank: int, ranks: int) -> Seat:
        return Seat(rank, ranks, self.host, self.port, f"moe-conformance world {world}", self.gpu)

    def store(self, first: bool = False) -> Any:
        """Where the ranks leave each other a word; hosted by rank 0, the first time that it asks, if by nobody else.

        Raises:
            UsageError: it cannot be hosted there, or nobody answers.
        """
        hosting = self.hosts_store and first
        try:
            store = dist.TCPStore(
                self.host,
                self.port,
                is_master=hosting,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=ARRIVAL_SECONDS),
            )
        except dist.DistError as error:
            what = (
                "rank 0 cannot listen there, the port may be taken"
                if hosting
                else f"rank {self.rank} found nobody there in {ARRIVAL_SECONDS} s"
            )
            raise UsageError(
                f"MASTER_ADDR={self.host} MASTER_PORT={self.port}: {what} ({str(error).splitlines()[0]})"
            ) from None
        return dist.PrefixStore("moe-conformance", store)


def joined() -> Joined | None:
    """What the environment says; None if it says nothing, or there is a single rank.

    Raises:
        UsageError: it says only a part.
    """
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if not given["RANK"] or given["WORLD_SIZE"] == "1":
        return None
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise UsageError(
            f"RANK is set, so this process is one of several; {', '.join(missing)} must be set too, as torchrun does"
        )
    rank, agent = int(given["RANK"]), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    gpu = int(os.environ.get("LOCAL_RANK", rank))
    return Joined(
        rank, int(given["WORLD_SIZE"]), given["MASTER_ADDR"], int(given["MASTER_PORT"]), gpu, rank == 0 and not agent
    )


class Attendants:
    """The attendants of all other ranks, as rank 0 tells and hears them."""

    def __init__(self, place: Joined) -> None:
        self.place = place
        self._store = place.store(first=True)
        self._listener: Listener | None = None
        self._controls: dict[int, Connection] = {}
        self._missing = ""

    def open(self, world: int, ranks: int) -> list["RemoteRank"]:
        """A new process of each other rank of a world, in the order of the ranks.

        Raises:
            UsageError: some have not called in time; from then on, at once.
        """
        if self._missing:
            raise UsageError(self._missing)
        if self._listener is None:
            key, host = secrets.token_bytes(16), self.place.host
            self._listener = Listener((host if host in LOOPBACK else "0.0.0.0", 0), authkey=key)
            self._store.set("address", pickle.dumps(((host, self._listener.address[1]), key)))
            self._controls = self._called(self.place.ranks)
        for rank in range(1, ranks):
            with contextlib.suppress(OSError):  # it is gone, and its process will be missing
                self._controls[rank].send(("open", world, ranks))
        pipes = self._called(ranks)
        return [RemoteRank(pipes[rank], self._controls[rank], world) for rank in sorted(pipes)]

    def dismiss(self) -> None:
        """All is over, also for those that have not called yet."""
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                control.send(("over", 0, 0))
        self._store.set("address", pickle.dumps(None))
        if self._listener:
            self._listener.close()

    def _called(self, ranks: int) -> dict[int, Connection]:
        """A connection from each other of so many ranks, which says its number first.

        Raises:
            UsageError: naming those that have not called in ARRIVAL_SECONDS; the others are hung up on.
        """
        assert self._listener is not None
        door = self._listener._listener._socket  # type: ignore[attr-defined]  # `accept` alone waits for ever
        deadline = time.monotonic() + ARRIVAL_SECONDS
        calls: dict[int, Connection] = {}
        while missing := [rank for rank in range(1, ranks) if rank not in calls]:
            if not connection.wait([door], max(deadline - time.monotonic(), 0)):
                break
            with contextlib.suppress(
                AuthenticationError, EOFError, OSError
            ):  # a stranger, or one that died while it called
                call = self._listener.accept()
                calls[call.recv()] = call
        if missing:
            for call in calls.values():
                call.close()
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.place.ranks}"
            where = f"{self.place.host}:{self._listener.address[1]}"
            self._missing = f"{names} did not call rank 0, at {where}, in {ARRIVAL_SECONDS} s: not started, dead, or kept from it by the network"
            raise UsageError(self._missing)
        return calls


class RemoteRank:
    """A rank's process on the other side of an attendant; see `LocalRank`."""

    def __init__(self, pipe: Connection, control: Connection, world: int) -> None:
        self.pipe, self._control, self._world, self._ended = pipe, control, world, ""

    def manner(self) -> str:
        if not self._ended:
            self._ended = self._asked("close")
        return self._ended

    def where(self) -> str:
        return self._asked("where")

    def end(self) -> None:
        self.pipe.close()
        self.manner()

    def _asked(self, verb: str) -> str:
        with contextlib.suppress(OSError, EOFError):
            self._control.send((verb, self._world, 0))
            if self._control.poll(ANSWER_SECONDS):
                return str(self._control.recv())
        return " (its attendant does not answer)"


def attend(place: Joined, settings: Settings) -> int:
    """Lend this rank to every world that rank 0 opens, until it says that all is over, or is gone; returns the exit code.

    Raises:
        UsageError: rank 0 is not to be met.
    """
    store = place.store()
    store.wait(["address"], datetime.timedelta(days=RUN_DAYS))
    call = pickle.loads(store.get("address"))
    if call is None:  # there was nothing to do for several ranks
        return 0
    address, key = call
    try:
        control = Client(address, authkey=key)
    except ConnectionRefusedError:
        raise UsageError(
            f"rank {place.rank} came when rank 0 had stopped listening at {address[0]}:{address[1]}"
        ) from None
    control.send(place.rank)
    own: dict[int, LocalRank] = {}  # by the number of its world
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-") as folder,
        contextlib.suppress(EOFError, ConnectionResetError),
    ):
        while (request := control.recv())[0] != "over":
            verb, world, ranks = request
            if verb == "open":
                log_path = os.path.join(folder, f"world{world}.log")
                own[world] = LocalRank(
                    get_context("forkserver"), settings, place.seat(world, place.rank, ranks), log_path, call
                )
            elif verb == "where":
                control.send(own[world].where())
            else:
                control.send(own[world].manner())
                own.pop(world).end()
    for rank in own.values():
        rank.end()
    return 0
