"""Runs cases of several ranks in a thread, while the main thread serves single processes."""

import threading
from multiprocessing import Pipe
from queue import SimpleQueue

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.engine.world.worlds import Worlds
from conformance.interface import UsageError

CLOSING_SECONDS = 5.0  # seconds for the thread to notice that its ranks have been ended


class Background:
    """One case at a time: `start(case)`; `pipe` is readable when `outcome()` has the result."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._cases: SimpleQueue[Case | None] = SimpleQueue()
        self.pipe, self._results = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.case: Case | None = None  # the case that runs

    def start(self, case: Case) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self.case = case
        self._cases.put(case)

    def outcome(self) -> Outcome | None:
        """The outcome of the case; None while it runs.

        Raises:
            UsageError: other ranks of torchrun cannot be reached.
        """
        if not self.pipe.poll():
            return None
        self.case = None
        result = self.pipe.recv()
        if isinstance(result, UsageError):
            raise result
        assert isinstance(result, Outcome)
        return result

    def close(self) -> None:
        """End the ranks, and the thread, even while a world forms."""
        self._cases.put(None)
        self._worlds.close()
        waits = int(CLOSING_SECONDS / 0.1) if self._thread.is_alive() else 0
        for _ in range(waits):
            self._thread.join(0.1)
            self._worlds.close()
            if not self._thread.is_alive():
                break

    def _serve(self) -> None:
        while (case := self._cases.get()) is not None:
            result: Outcome | UsageError
            try:
                result = self._worlds.run(case)
            except UsageError as error:
                result = error
            except Exception as error:  # also when the ranks are ended during the case
                result = Outcome("ERROR", reason=f"{type(error).__name__}: {error}")
            self._results.send(result)
