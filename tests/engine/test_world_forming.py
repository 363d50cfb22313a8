"""A world in which one rank is not like the others, or does not come: it is named in a sentence, in
time, and nothing is left running.
"""

from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from conformance.engine.child.patience import Patience
from conformance.engine.options import ChildOptions
from conformance.engine.world import world as world_module
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import RankAddress
from conformance.engine.world.world import Process, World
from tests.engine.waiting import all_gone
from tests.engine.world_fixtures import ShiftCase

pytestmark = pytest.mark.usefixtures("with_shift")
FIXTURES = "tests.engine.world_fixtures"
HERE = (str(Path(__file__).parents[2]),)
THREE = ShiftCase(function="shift", ranks=3, rows=2)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("OTHERWISE", "rank 1 differs from rank 0 in its functions: all ranks must run the same implementation"),
        ("NOBODY", f"rank 1 of 3 cannot join: --impl {FIXTURES}:NOBODY: {FIXTURES} has no 'NOBODY'"),
        ("DIES_AT_ONCE", "rank 1 of 3 died while the world was forming (SIGABRT at "),
        ("OF_ANOTHER_SUITE", "rank 1 made other inputs of the case than rank 0: all ranks must run the same suite"),
    ],
)
def test_a_rank_that_is_not_like_the_others_is_named_and_nothing_is_left_running(name, sentence, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[LocalRank] = []

    def start() -> list[Process]:
        for rank in range(3):
            options = ChildOptions(f"{FIXTURES}:{name if rank == 1 else 'RIGHT'}", "cpu", search=HERE)
            address, log = RankAddress(rank, 3, "127.0.0.1", store.port), str(tmp_path / f"{rank}.log")
            started.append(LocalRank(get_context("forkserver"), options, address, log))
        processes.extend(held.process.pid for held in started)
        return [*started]

    processes: list[int] = []
    world = World(start, Patience(20.0))
    outcome = world.run(THREE)
    world.close()
    assert (outcome.status, outcome.finding) == ("ERROR", None)
    assert outcome.reason.startswith(sentence)
    assert len(processes) == 3
    assert all_gone(processes)


class Told:
    """A rank that has said so much and says no more."""

    pid = None

    def __init__(self, *messages: tuple[str, object]) -> None:
        self.pipe, self._own = Pipe()
        self.ended = 0
        for message in messages:
            self._own.send(message)

    def end(self) -> None:
        self.ended += 1


READY = ("ready", {"functions": {}, "versions": {}})
OLDER = ("ready", {"functions": {}, "versions": {"torch": "1"}})


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ((), "rank 1 of 2 was not ready within 1 s (0.0 s of CPU time in "),
        ((READY,), "rank 1 of 2 was not formed within 1 s (0.0 s of CPU time in "),
        ((READY, ("unformed", "DistNetworkError: none")), "rank 1 of 2 cannot join: DistNetworkError: none"),
        ((OLDER,), "rank 1 differs from rank 0 in its versions: all ranks must run the same implementation"),
    ],
)
def test_a_rank_that_does_not_come_is_waited_for_so_long_and_named(messages, sentence, monkeypatch):
    monkeypatch.setattr(world_module, "MEETING_SECONDS", 0.5)
    ranks = [Told(READY, ("formed", None)), Told(*messages)]
    outcome = World(lambda: [*ranks], Patience(20.0)).run(THREE)
    assert outcome.status == "ERROR"
    assert outcome.reason.startswith(sentence)
    assert [rank.ended for rank in ranks] == [1, 1]
