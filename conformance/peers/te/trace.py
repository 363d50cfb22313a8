"""The path that each call took through Transformer Engine."""

import threading


class Unavailable(Exception):
    """Transformer Engine cannot do this call, or would do it wrongly; the message says why."""


class Trace:
    """The steps of calls, in order; each thread has a call of its own."""

    def __init__(self) -> None:
        self.path: dict[str, str] = {}  # of each function's last call
        self._call = threading.local()

    def begin(self) -> None:
        """A call starts."""
        self._call.steps = []

    def step(self, name: str) -> None:
        """The call takes this step next."""
        self._call.steps.append(name)

    def end(self, function: str, gates: dict[str, str]) -> None:
        """The call is over: its path is its steps, and the variables that concern one of them."""
        steps: list[str] = self._call.steps
        symbols = {step.split()[0] for step in steps}
        concerned = [variable for variable, symbol in gates.items() if symbol in symbols]
        self.path[function] = ", then ".join(steps) + (f" [{', '.join(concerned)}]" if concerned else "")
