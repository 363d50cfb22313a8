"""The progress of a run, on stderr: one live line on a terminal, else a line every 10 seconds."""

import contextlib
import sys
import time
from typing import Any

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.texts import failure_text

LINE_SECONDS = 10.0
FIRST = 0.05  # the share of the cases after which the remaining time is estimated


class Progress:
    """Counts outcomes, and shows them. Cases that are not drawn yet are not part of the total."""

    def __init__(self) -> None:
        self.total = self.done = self.failures = 0
        self.kernels: set[str] = set()
        self.started = self.shown = time.monotonic()
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), get_renderable=self.line, refresh_per_second=4)
            self._live.start()

    def scheduled(self, cases: int) -> None:
        self.total += cases

    def case(self, outcome: Outcome, failing: bool) -> None:
        self.done += 1
        self.failures += failing
        self.kernels.update(outcome.kernels)
        if not self._live and time.monotonic() - self.shown > LINE_SECONDS:
            self.shown = time.monotonic()
            self._print(self.line())

    def failure(self, case: Case, outcome: Outcome) -> None:
        """Show the first failure at once; its smallest case comes later."""
        text = failure_text(outcome.finding, outcome.reason)
        self._print(f"{outcome.status} {case.function}: {text} (case {case.text}); its smallest case will follow")

    def end(self) -> None:
        if self._live:
            self._live.stop()

    def line(self) -> str:
        seconds = time.monotonic() - self.started
        rate = self.done / max(seconds, 1e-9)
        seconds_left = (self.total - self.done) / rate if rate else 0.0
        phrases = [
            f"{self.done / max(self.total, 1):.0%} of {self.total} cases",
            *([f"{seconds_left:.0f} s left"] if self.done >= FIRST * self.total else []),
            f"{rate:.0f} cases per second",
            *([f"{len(self.kernels)} kernels compiled"] if self.kernels else []),
            f"{self.failures} failing",
        ]
        return " · ".join(phrases)

    def _print(self, text: str) -> None:
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            with contextlib.suppress(OSError):  # a full disk or a closed reader does not end the run
                print(text, file=sys.stderr, flush=True)
