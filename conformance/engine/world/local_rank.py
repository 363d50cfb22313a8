"""Holds one rank's process on this host."""

import contextlib
import os
import signal
import time
from multiprocessing.connection import Client, Connection
from typing import Any
from weakref import finalize

from conformance.engine.child.child import Settings
from conformance.engine.child.processes import at, manner, plain_main
from conformance.engine.world.rank import Seat, serve_rank

Address = tuple[tuple[str, int], bytes]  # host and port of somebody who listens, and the key that he expects


class LocalRank:
    """A rank's process, from outside; it does not outlive this.

    Args:
        context: of multiprocessing.
        log_path: what it prints, and tracebacks of a crash.
        call: whom it talks to, if not to this process through `pipe`.
    """

    def __init__(
        self, context: Any, settings: Settings, seat: Seat, log_path: str, call: Address | None = None
    ) -> None:
        self.log_path = log_path
        self.pipe, there = context.Pipe()
        self.process = context.Process(
            target=_talk, args=(there if call is None else call, settings, seat, log_path), daemon=True
        )
        with plain_main():
            self.process.start()
        there.close()
        self._forgotten = finalize(self, _ended, self.process)

    def manner(self) -> str:
        """How it ended, and where it was; it is ended if it has not."""
        self.process.join(5)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return manner(self.process, self.log_path)

    def where(self) -> str:
        """Where it is, as " at …"."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return at(self.log_path)

    def end(self) -> None:
        """Nothing of it is left."""
        self._forgotten()
        self.pipe.close()
        self.process.close()


def _ended(process: Any) -> None:
    process.kill()
    process.join()


def _talk(other: Connection | Address, settings: Settings, seat: Seat, log_path: str) -> None:
    if isinstance(other, tuple):
        address, key = other
        with Client(address, authkey=key) as connection:
            connection.send(seat.rank)
            serve_rank(connection, settings, seat, log_path)  # type: ignore[arg-type]
    else:
        serve_rank(other, settings, seat, log_path)
