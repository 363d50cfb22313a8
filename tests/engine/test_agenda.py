"""The order of work: rounds, one function per process, heavy work, cases of several ranks."""

import pytest

from conformance.core.space import Space
from conformance.engine.choose.plan import Draw, Section
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.run.agenda import REQUESTS, Agenda
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.permutation.cases import HEAVY_ALIGN, RoutingCase


def structure(function: str, seed: int, **fields) -> list:
    return [RoutingCase(function=function, seed=seed, **fields)]


def agenda_of(**structures: int) -> Agenda:
    """An agenda with so many structures of each function."""
    agenda = Agenda()
    for function, count in structures.items():
        for seed in range(count):
            agenda.add(structure(function, seed))
    return agenda


def taken(agenda: Agenda, last: str = "", heavy: bool = True) -> list[tuple[str, int]]:
    out = []
    while work := agenda.take(heavy, last):
        last = work[0].function
        out.append((last, work[0].seed))
    return out


def test_rounds_come_in_order_and_a_process_stays_with_its_function():
    agenda = Agenda()
    for seed in range(2):
        agenda.add(structure("permute", seed), 1)
        agenda.add(structure("unpermute", seed), 1)
    agenda.add(structure("unpermute", 9), 0)
    order = taken(agenda)
    assert order == [("unpermute", 9), ("unpermute", 0), ("unpermute", 1), ("permute", 0), ("permute", 1)]
    assert not agenda


def test_the_function_with_the_most_work_left_comes_first():
    agenda = agenda_of(permute=1, unpermute=3)
    assert agenda.take(True)[0].function == "unpermute"
    agenda.took("permute", 100.0)
    agenda.took("unpermute", 0.1)
    assert agenda.take(True)[0].function == "permute"


def test_processes_spread_over_the_functions():
    agenda = agenda_of(permute=6, unpermute=4)
    assert agenda.take(True, "", ["permute"])[0].function == "unpermute"
    assert agenda.take(True, "", ["permute", "unpermute"])[0].function == "permute"


def test_a_process_leaves_its_function_where_far_more_is_left_for_each():
    agenda = agenda_of(permute=3, unpermute=5)
    assert agenda.take(True, "permute")[0].function == "permute"
    assert agenda.take(True, "permute", ["permute"] * 2)[0].function == "unpermute"


def test_what_a_dead_process_has_left_comes_first():
    agenda = agenda_of(permute=1)
    agenda.add(structure("permute", 1), first=True)
    assert taken(agenda) == [("permute", 1), ("permute", 0)]


@pytest.mark.parametrize("heavy", [{"layout": "wide_rows", "layout_of": "tokens", "tokens": 3}, {"align": HEAVY_ALIGN}])
def test_heavy_work_waits_for_room_and_comes_first(heavy):
    agenda = Agenda()
    agenda.add(structure("permute", 2))
    agenda.add(structure("permute", 0, **heavy))
    assert taken(agenda) == [("permute", 0), ("permute", 2)]
    agenda.add(structure("permute", 0, **heavy))
    agenda.add(structure("permute", 1))
    assert taken(agenda, heavy=False) == [("permute", 1)]
    assert agenda and taken(agenda) == [("permute", 0)]


def test_requests_come_before_cases_and_ranked_cases_one_by_one():
    agenda = Agenda()
    ranked = [DispatchCase(function="alltoall_dispatch", counts=(1, 2), seed=seed) for seed in range(2)]
    draw = Draw(Section("drawn", "permute"), PROFILES["smoke"], Space(), 0)
    agenda.add(structure("permute", 0, layout="wide_rows", layout_of="tokens", tokens=3))
    agenda.add(ranked, 0)
    agenda.add(draw, REQUESTS)
    assert agenda.take(True) is draw
    assert [agenda.take_ranked() for _ in range(3)] == [*ranked, None]
    assert taken(agenda) == [("permute", 0)]


def test_a_world_has_its_own_rounds():
    agenda = Agenda()
    late, earlier = (DispatchCase(function="alltoall_dispatch", counts=(1, 2), seed=seed) for seed in range(2))
    agenda.add(structure("permute", 0), 0)
    agenda.add([late], 2)
    agenda.add([earlier], 1)
    assert [agenda.take_ranked() for _ in range(3)] == [earlier, late, None]
    assert taken(agenda) == [("permute", 0)]


def test_lanes_share_out_the_numbers_of_ranks():
    agenda = Agenda()
    of_one, of_two, of_three = (DispatchCase(function="alltoall_dispatch", counts=(1,) * n) for n in (1, 2, 3))
    agenda.add([of_three, of_two, of_one], 0)
    assert agenda.take_ranked(0, 2) == of_two and agenda.take_ranked(0, 2) is None
    assert {agenda.take_ranked(1, 2), agenda.take_ranked(1, 2)} == {of_one, of_three}
    assert not agenda
