"""Ranks that call together are judged together; one that dies, hangs, raises or disagrees is named,
and nothing is left running.
"""

import math
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch.distributed as dist

from conformance.cli import main
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.engine.run.reduction import reduce
from conformance.engine.world import torchrun
from conformance.engine.world.torchrun import RemoteRanks, TorchrunRank, lend_rank
from conformance.engine.world.world import SILENCE_SECONDS, Member, end_of_silence
from conformance.families.dispatch.cases import DispatchCase
from conformance.interface import UsageError
from tests.engine.waiting import BACKSTOP_SECONDS, all_gone
from tests.engine.world_fixtures import ShiftCase

pytestmark = pytest.mark.usefixtures("with_shift")
HERE = (str(Path(__file__).parents[2]),)
THREE = ShiftCase(function="shift", ranks=3, rows=2)


@contextmanager
def pool_of(name: str, seconds: float = 20.0) -> Iterator[Pool]:
    with Pool(ChildOptions(f"tests.engine.world_fixtures:{name}", "cpu", search=HERE), case_seconds=seconds) as pool:
        yield pool


def outcome_of(name: str, case: ShiftCase = THREE, seconds: float = 20.0) -> Outcome:
    with pool_of(name, seconds) as pool:
        return next(outcome for _, outcome in pool.run([case]))


def test_a_right_function_passes_in_every_world_with_gradients_and_laws():
    cases = [
        ShiftCase(function="shift", ranks=ranks, rows=2, grads=grads, law=law)
        for ranks in (1, 2, 3, 4)
        for grads, law in (("x", ""), ("", "history"))
    ]
    with pool_of("RIGHT") as pool:
        outcomes = {case.text: outcome for case, outcome in pool.run(cases)}
    assert {text: outcome.status for text, outcome in outcomes.items()} == {case.text: "PASS" for case in cases}
    assert all(outcome.evaluations == (2 if '"law"' in text else 1) for text, outcome in outcomes.items())


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("RAISES", "FAIL", "rank 1 of 3: raised RuntimeError on a legal call: no buffer; 2 others waited for it"),
        ("WRONG", "FAIL", "rank 1 of 3: "),
        ("DIES", "CRASH", "rank 1 of 3: SIGABRT at "),
        ("ALONE", "FAIL", "rank 1 of 3: "),
        ("DISAGREES", "FAIL", "no, says rank 1 of 3; rank 0 disagrees"),
    ],
)
def test_the_rank_that_goes_wrong_is_named(name, status, sentence):
    outcome = outcome_of(name)
    assert outcome.status == status
    assert sentence in (outcome.finding["message"] if outcome.finding else outcome.reason)


def test_ranks_that_hang_are_named_with_where_they_are():
    outcome = outcome_of("HANGS", seconds=2.0)
    assert outcome.status == "HANG"
    assert "rank 1 at" in outcome.reason
    assert "world_fixtures.py" in outcome.reason


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("DISPATCH_DIES", "CRASH", "rank 1 of 2 in hybridep_dispatch: SIGABRT at "),
        ("DISPATCH_HANGS", "HANG", "rank 1 in hybridep_dispatch at "),
    ],
)
def test_a_dispatch_that_ends_a_case_of_a_combine_is_named(name, status, sentence):
    with pool_of(name, seconds=3.0) as pool:
        pool.start()
        outcome = pool.worlds.run(DispatchCase(function="hybridep_combine", counts=(1, 1)))
    assert outcome.status == status
    assert sentence in outcome.reason


IN_A_CALL = Member(0, None, calling="shift", heard=5.0)
RAISED = Member(
    1, None, Outcome("FAIL", {"output": "call", "check": "raises RuntimeError"}), calling="shift", heard=4.0
)
DEAD = replace(RAISED, outcome=Outcome("CRASH"))
WRONG_ALONE = replace(RAISED, outcome=Outcome("FAIL", {"output": "out", "check": "exact"}))


@pytest.mark.parametrize("gone", [RAISED, DEAD])
def test_a_rank_that_left_its_call_gives_the_others_a_moment_since_the_last_message(gone):
    assert end_of_silence([IN_A_CALL, gone]) == 5.0 + SILENCE_SECONDS


@pytest.mark.parametrize(
    "members",
    [
        [IN_A_CALL, replace(IN_A_CALL, rank=1)],
        [IN_A_CALL, replace(IN_A_CALL, rank=1, asking=False)],
        [IN_A_CALL, WRONG_ALONE],
        [replace(IN_A_CALL, calling=""), RAISED],  # still computes what is right
    ],
)
def test_ranks_that_may_still_answer_are_not_ended(members):
    assert end_of_silence(members) == math.inf


def test_nothing_is_left_running_and_the_next_case_finds_a_new_world():
    with pool_of("DIES", seconds=20.0) as pool:
        list(pool.run([THREE]))
        of_one_rank = ShiftCase(function="shift", ranks=1, rows=2)
        assert [outcome.status for _, outcome in pool.run([of_one_rank])] == ["PASS"]
        processes = [member.process.process.pid for world in pool.worlds._worlds.values() for member in world._members]
        assert len(processes) == 4
    assert all_gone(processes)


def test_the_world_shrinks():
    with pool_of("WRONG") as pool:
        attempt = lambda case: next(iter(pool.run([case])))[1]  # noqa: E731
        case = ShiftCase(function="shift", ranks=4, rows=3)
        reduced = reduce(case, attempt(case), attempt, seconds=3600)
    assert (reduced.case.ranks, reduced.case.rows, reduced.finished) == (2, 1, True)


def test_a_world_that_has_no_room_is_refused_with_a_sentence():
    outcome = outcome_of("RIGHT", ShiftCase(function="shift", ranks=9))
    assert (outcome.status, outcome.reason) == ("NOT_RUN", "a world of 9 ranks: there is room for 4")


UNDER_TORCHRUN = """
import sys
from conformance.engine.options import ChildOptions
from conformance.engine.world.torchrun import lend_rank, torchrun_rank
from conformance.engine.run.pool import Pool
from tests.engine.world_fixtures import ShiftCase, register

if __name__ == "__main__":
    register()
    options = ChildOptions("tests.engine.world_fixtures:DIES_WITH_THREE_ROWS", "cpu", search=tuple(sys.path[:1]))
    if torchrun_rank().rank:
        sys.exit(lend_rank(torchrun_rank(), options))
    with Pool(options, case_seconds=20.0) as pool:
        for rows in (2, 3, 2):
            for _, outcome in pool.run([ShiftCase(function="shift", ranks=3, rows=rows, grads="x")]):
                print(outcome.status, outcome.reason, outcome.finding)
"""


def test_under_torchrun_its_processes_are_the_ranks_and_one_that_dies_is_named_and_replaced(tmp_path):
    script = tmp_path / "judge.py"
    script.write_text(f"import sys\nsys.path.insert(0, {HERE[0]!r})\n{UNDER_TORCHRUN}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BACKSTOP_SECONDS)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == third == "PASS  None"
    assert second.startswith("CRASH rank 1 of 3: SIGABRT at ")


def rank_0_of(ranks: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first rank of torchrun."""
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_a_port_that_is_taken_is_said_in_a_sentence(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank_0_of(2, port, monkeypatch)
        assert main(["run", "--impl", "moe_ref", "--profile", "smoke", "--device", "cpu"]) == 2
    assert f"MASTER_PORT={port}: rank 0 cannot listen there, the port may be taken" in capfd.readouterr().err


# ---- ranks that do not come


@pytest.fixture
def place(monkeypatch) -> Iterator[TorchrunRank]:
    """Rank 0 of three, with a short patience, where a store is there already."""
    monkeypatch.setattr(torchrun, "ARRIVAL_SECONDS", 4.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rank_0_of(3, store.port, monkeypatch)
    rank = torchrun.torchrun_rank()
    assert rank
    yield rank
    del store


def lending(rank: int, place: TorchrunRank) -> Future[int]:
    """A thread that lends a rank; its exit code."""
    options = ChildOptions("tests.engine.world_fixtures:RIGHT", "cpu", search=HERE)
    return ThreadPoolExecutor(1).submit(lend_rank, replace(place, rank=rank), options)


def calling(rank: int, place: TorchrunRank) -> None:
    """A lender that calls, and starts no process when asked to."""
    store = replace(place, rank=rank).store()
    store.wait(["address"])
    address, key = pickle.loads(store.get("address"))
    with Client(address, authkey=key) as control, suppress(EOFError, ConnectionResetError):
        control.send(rank)
        while control.recv()[0] != "over":
            pass


def test_ranks_that_do_not_call_in_time_are_named_and_nothing_is_left_running(place, monkeypatch):
    children = set(active_children())
    with Pool(ChildOptions("tests.engine.world_fixtures:RIGHT", "cpu", search=HERE)) as pool:
        pool.start()
        sentence = r"ranks 1, 2 of 3 did not call rank 0, at 127\.0\.0\.1:\d+, in 4\.0 s"
        with pytest.raises(UsageError, match=sentence):
            next(iter(pool.run([THREE])))
        monkeypatch.setattr(RemoteRanks, "_accept", None)  # nobody waits again
        with pytest.raises(UsageError, match=sentence):
            next(iter(pool.run([THREE])))
    assert [child for child in active_children() if child not in children and child.is_alive()] == []
    assert lending(2, place).result(BACKSTOP_SECONDS) == 0  # it comes when all is over


def test_of_two_ranks_the_one_that_does_not_call_is_named_and_the_other_goes(place):
    there = lending(1, place)
    remote = RemoteRanks(place)
    with pytest.raises(UsageError, match=r"^rank 2 of 3 did not call rank 0"):
        remote.open(1, 3)
    assert there.result(BACKSTOP_SECONDS) == 0
    remote.dismiss()


def test_a_rank_whose_process_does_not_call_is_named(place):
    there = [ThreadPoolExecutor(1).submit(calling, rank, place) for rank in (1, 2)]
    remote = RemoteRanks(place)
    with pytest.raises(UsageError, match=r"^rank 1 of 3 did not call rank 0"):
        remote.open(1, 2)
    remote.dismiss()
    assert [exit_code.result(BACKSTOP_SECONDS) for exit_code in there] == [None, None]
