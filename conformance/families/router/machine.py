"""The machine of `route`: forwards with queued replays, evaluations, and batches that end in
between.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from conformance.core.machine import Machine


class RouteMachine(Machine):
    """Steps of one router in one process; a replay only where there is something to replay.

    Few rules, because hypothesis leaves out some of them in each sequence.
    """

    fixed = {"counts": ()}  # noqa: RUF012

    @classmethod
    def suits(cls, case: Any) -> bool:
        """A choice by a plan has nothing to replay, so such cases do not suit."""
        return not case.sinkhorn

    def __init__(self) -> None:
        super().__init__()
        self.queued = 0  # the number of replays that wait for their backward

    @rule()
    def recompute(self) -> None:
        """The forward of a layer that will be recomputed: its choice is recorded and queued."""
        self.step("record")
        self.step("forward")
        self.queued += 1

    @precondition(lambda self: self.queued)
    @rule()
    def replay(self) -> None:
        self.queued -= 1
        self.step("backward")

    @precondition(lambda self: self.queued)
    @rule()
    def save_the_queue(self) -> None:
        """The state is saved and loaded while replays wait."""
        self.step("reload")

    @rule(kind=st.sampled_from(["train", "eval", "nograd"]))
    def forward(self, kind: str) -> None:
        self.step(kind)

    @precondition(lambda self: self.words)
    @rule(kind=st.sampled_from(["finish", "frozen", "reload"]))
    def end_of_a_batch(self, kind: str) -> None:
        self.step(kind)


ROUTE = RouteMachine
