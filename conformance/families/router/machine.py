"""The machine of route: forwards with replays queued, evaluations, batches that end in between."""

from hypothesis.stateful import precondition, rule

from conformance.core.machine import Machine


class RouteMachine(Machine):
    """Steps of one router in one process; a replay only where there is something to replay."""

    fixed = {"counts": ()}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.recorded = False
        self.queued = 0  # replays that wait for their backward

    @rule()
    def train(self) -> None:
        self.step("train")

    @rule()
    def evaluate(self) -> None:
        self.step("eval")

    @rule()
    def first_pass_of_a_recomputed_layer(self) -> None:
        self.step("nograd")

    @rule()
    def record(self) -> None:
        self.recorded = True
        self.step("record")

    @precondition(lambda self: self.recorded)
    @rule()
    def replay_forward(self) -> None:
        self.queued += 1
        self.step("forward")

    @precondition(lambda self: self.queued)
    @rule()
    def replay_backward(self) -> None:
        self.queued -= 1
        self.step("backward")

    @precondition(lambda self: self.words)
    @rule()
    def finish(self) -> None:
        self.step("finish")

    @precondition(lambda self: self.words)
    @rule()
    def finish_frozen(self) -> None:
        self.step("frozen")

    @precondition(lambda self: self.words)
    @rule()
    def reload(self) -> None:
        self.step("reload")


ROUTE = RouteMachine
