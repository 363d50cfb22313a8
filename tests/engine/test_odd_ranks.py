"""No odd rank ends a run, hangs it, or counts as an error of the suite."""

from pathlib import Path

import pytest

from conformance.engine.child import processes
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.engine.world import world, worlds
from tests.engine.odd_ranks import KINDS
from tests.engine.test_odd_implementations import sessions
from tests.engine.world_fixtures import ShiftCase, forget, register

STATUS = dict.fromkeys(KINDS, "CRASH") | {
    **dict.fromkeys(("starts_a_program", "gradients", "mute", "evasive"), "FAIL"),
    **dict.fromkeys(("transport_raises", "transport_mute", "transport_list", "transport_unprintable"), "FAIL"),
    **dict.fromkeys(("stops", "transport_sleeps"), "HANG"),
    "group_sigkill": "OOM",
}
RIGHT = ShiftCase(function="shift", ranks=2, rows=1)


@pytest.fixture(scope="module")
def judged() -> dict[str, tuple[Outcome, Outcome]]:
    """The outcome of each kind and of the right call after it; under "left" what still runs."""
    leaders, outcomes = [], {}
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "MESSAGE_SECONDS", 1)
        patch.setattr(processes, "ENDING_SECONDS", 1)
        patch.setattr(world, "GRACE_SECONDS", 0.5)
        start = worlds.LocalRank.__init__

        def recorded(rank, *arguments):
            start(rank, *arguments)
            leaders.append(rank.process.pid)

        patch.setattr(worlds.LocalRank, "__init__", recorded)
        options = ChildOptions("tests.engine.odd_ranks", "cpu", search=(str(Path(__file__).parents[2]),))
        with Pool(options, case_seconds=5.0) as pool:
            pool.start()
            pool.worlds.max_ranks = 2
            for number, kind in enumerate(KINDS):
                case = ShiftCase(function="shift", ranks=2, rows=number + 2)
                outcomes[kind] = pool.answer(case), pool.answer(RIGHT)
    forget()
    outcomes["left"] = sessions(leaders)
    assert len(leaders) > 2
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_rank_fails_and_the_next_call_is_judged(judged, kind):
    odd, outcome_after = judged[kind]
    assert odd.status == STATUS[kind], (odd.reason, odd.finding)
    assert "rank 1" in (odd.finding["message"] if odd.finding else odd.reason)
    assert outcome_after.status == "PASS", outcome_after


def test_no_process_of_a_world_is_left(judged):
    assert judged["left"] == []
