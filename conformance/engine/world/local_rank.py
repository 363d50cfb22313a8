"""Manages the process of one rank on this host."""

from multiprocessing.connection import Client, Connection
from typing import Any
from weakref import finalize

from conformance.engine.child import processes
from conformance.engine.options import ChildOptions
from conformance.engine.world.rank import RankAddress, serve_rank

Listening = tuple[tuple[str, int], bytes]  # host and port of a listener, and its key


class LocalRank:
    """The parent's handle of a rank's process, which ends with this object.

    Args:
        context: of multiprocessing.
        log_path: file for its output, and tracebacks of a crash.
        call: the listener that it talks to, if not to this process through `pipe`.
    """

    def __init__(
        self, context: Any, options: ChildOptions, address: RankAddress, log_path: str, call: Listening | None = None
    ) -> None:
        self.log_path = log_path
        self.process, self.pipe = processes.started(context, _serve, call, options, address, log_path)
        self._end = finalize(self, processes.end, self.process)

    def ending(self) -> str:
        """The process's end and innermost frame."""
        return processes.ending(self.process, self.log_path)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def alive(self) -> bool:
        return self.process.is_alive()

    def where(self) -> str:
        """The innermost frame, as " at …"."""
        return processes.where(self.process, self.log_path)

    def end(self) -> None:
        """Kill it and the processes that it has started, and free its resources."""
        self._end()
        self.pipe.close()
        self.process.close()


def _serve(
    pipe: Connection, call: Listening | None, options: ChildOptions, address: RankAddress, log_path: str
) -> None:
    if call is None:
        serve_rank(pipe, options, address, log_path)
        return
    pipe.close()
    with Client(call[0], authkey=call[1]) as connection:
        connection.send(address.rank)
        serve_rank(connection, options, address, log_path)  # type: ignore[arg-type]
