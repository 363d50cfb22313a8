"""No odd implementation ends a run, hangs it, or counts as an error of the suite."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.core.case import Case
from conformance.engine.child import processes
from conformance.engine.child.isolation import LOG_BYTES
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions
from conformance.engine.run.agenda import Agenda
from conformance.engine.run.pool import Pool
from conformance.families.permutation.cases import RoutingCase
from tests.engine.odd_implementations import KINDS
from tests.engine.waiting import until

KINDS_OF = {
    "CRASH": """os_exit_0 os_exit_3 sys_exit sys_exit_text sys_exit_unprintable keyboard_interrupt generator_exit
        own_end sigterm sigint sigalrm group_sigterm group_sigint segfault abort exec_true exit_with_a_thread_left
        close_all garbage zeros half_a_message another_message silence_all fork_outlives recurses_in_c supports_exits
        """,
    "HANG": "exec_sleep sleeps spins_and_ignores_signals waits_for_itself stops supports_sleeps",
    "OOM": "sigkill group_sigkill allocates mute_memory memory gpu_memory",
}
STATUS = dict.fromkeys(KINDS, "FAIL") | {kind: status for status, kinds in KINDS_OF.items() for kind in kinds.split()}
UNDECLARED = RoutingCase(function="unpermute", tokens=2, experts=2)


@dataclass
class Judged:
    """The outcome of each kind, and of the right call right after it, and what is left of them."""

    odd: dict[str, Outcome] = field(default_factory=dict)
    right: dict[str, Outcome] = field(default_factory=dict)
    undeclared: Outcome | None = None
    log_bytes: int = 0
    processes: list[str] = field(default_factory=list)


def pair(kind: str) -> list[Case]:
    number = KINDS.index(kind)
    odd = RoutingCase(function="permute", tokens=1, experts=number + 3, hidden=1)
    return [odd, RoutingCase(function="pad_routing_map", tokens=2, experts=2, align=2, seed=number)]


def judge(pool: Pool) -> Judged:
    """A child runs the odd call and then the right one; another child where the odd one ends it."""
    out, agenda = Judged(), Agenda()
    pairs = {kind: pair(kind) for kind in KINDS}
    kinds = {id(case): kind for kind, cases in pairs.items() for case in cases}
    for number, cases in enumerate(pairs.values()):
        agenda.add(cases, number)
    for case, outcome in pool.work(agenda):
        (out.odd if case.function == "permute" else out.right)[kinds[id(case)]] = outcome
    out.undeclared = pool.answer(UNDECLARED)
    out.log_bytes = max(path.stat().st_size for path in Path(pool._folder.name).glob("*.log"))
    return out


def sessions(leaders: list[int]) -> list[str]:
    """The processes of these sessions; the forkserver takes a moment to reap the dead."""
    names: list[str] = []

    def are_gone() -> bool:
        names.clear()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, fields = path.read_text().split(" (", 1)[1].rsplit(") ", 1)
            except OSError:  # it has ended
                continue
            if int(fields.split()[3]) in leaders:
                names.append(name)
        return not names

    until(are_gone, 60.0)
    return names


@pytest.fixture(scope="module")
def judged() -> Judged:
    leaders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "MESSAGE_SECONDS", 1)
        patch.setattr(processes, "ENDING_SECONDS", 1)
        options = ChildOptions("tests.engine.odd_implementations", device="cpu")
        with Pool(options, jobs=2, case_seconds=2.0) as pool:
            launch = pool._launch

            def recorded():
                child = launch()
                leaders.append(child.process.pid)
                return child

            patch.setattr(pool, "_launch", recorded)
            out = judge(pool)
    out.processes = sessions(leaders)
    assert len(leaders) > 2
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_implementation_fails_and_the_next_call_is_judged(judged, kind):
    odd = judged.odd[kind]
    assert odd.status == STATUS[kind], (odd.reason, odd.finding)
    text = odd.finding["message"] if odd.finding else odd.reason
    assert text.isprintable() and 0 < len(text) < 400, text
    assert judged.right[kind].status == "PASS", judged.right[kind]


def test_no_process_is_left(judged):
    assert judged.processes == []


def test_the_log_is_bounded(judged):
    assert judged.log_bytes <= LOG_BYTES


def test_a_function_about_which_declares_raises_fails(judged):
    assert judged.undeclared.status == "FAIL"
    assert judged.undeclared.finding["output"] == "declares"
    assert judged.undeclared.finding["message"] == "declares raised RuntimeError: nothing about unpermute"
