"""The progress of a run, on stderr."""

import sys
import time


class Progress:
    """One line on stderr: rewritten in place on a terminal, else printed every 15 s."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.cases, self.failures = total, 0, 0, 0
        self.started = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def case(self, failing: bool) -> None:
        self.cases += 1
        self.failures += failing
        if time.monotonic() - self.shown > (0.2 if self.live else 15):
            self._show()

    def section(self) -> None:
        self.done += 1
        if self.live:
            self._show()

    def end(self) -> None:
        if self.live:
            print(file=sys.stderr)

    def _show(self) -> None:
        self.shown = time.monotonic()
        rate = self.cases / max(self.shown - self.started, 1e-9)
        text = f"{self.cases} cases · {rate:.0f} per second · {self.done} of {self.total} sections"
        text += f" · {self.failures} failing"
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)
