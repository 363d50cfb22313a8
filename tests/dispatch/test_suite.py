"""Dispatchers among real ranks: the reference passes, planted defects do not, and the judge's own
bounds hold and bite.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, drawn, scope_of, strategy
from conformance.engine.choose.plan import Section, cases_of, fixed_cases
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.dispatch.cases import (
    DISPATCHERS,
    FUNCTIONS,
    DispatchCase,
    indices_of,
    is_exact,
    maps_of,
    slots_of,
)
from conformance.families.dispatch.dispatcher import together
from conformance.families.dispatch.low_latency import COUNT, judged, order_of
from conformance.families.dispatch.space import SEQUENCES
from conformance.families.dispatch.trees import Tree, flat, tree_bound
from conformance.judge import judge

DRAWS = 4


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    with Pool(ChildOptions("moe_ref", "cpu")) as pool:
        pool.start()
        yield pool


def main_of(function: str) -> str:
    return "tokens" if function.endswith("dispatch") else "rows"


def plain(function: str, **fields) -> DispatchCase:
    probs = "" if function == "deepep_low_latency_dispatch" else "float32"
    return DispatchCase(
        function=function,
        **{"counts": (3, 0, 2), "local_experts": 2, "hidden": 3, "topk": 2, "probs": probs, "seed": 1} | fields,
    )


# ---- the reference


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_passes(function, world):
    cases = [*fixed_cases(function, Space()), *drawn(strategy(function, Space()), 5, DRAWS)]
    outcomes = {case.text: world.worlds.run(case) for case in cases}
    assert {
        text: (o.status, o.finding, o.reason)
        for text, o in outcomes.items()
        if o.status not in ("PASS", "UNINFORMATIVE")
    } == {}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_keeps_every_law(function, world):
    some = [
        plain(function, values="integers"),
        plain(function, values="integers", counts=(2, 2), grads=main_of(function)),
        plain(function, values="integers", journey=SEQUENCES.get(function, "")),
    ]
    laws = [law for law in CONTRACTS[function].laws.values() if not law.device]
    law_cases = [
        (law.name, replace(case, law=law.name)) for law in laws for case in dict.fromkeys(some) if law.applies(case)
    ]
    assert {name for name, _ in law_cases} == {law.name for law in laws}
    outcomes = [(name, world.worlds.run(case)) for name, case in law_cases]
    assert [(name, o.status, o.finding, o.reason) for name, o in outcomes if o.status != "PASS"] == []


ONE_GPU = Space("cuda", ranks=1, shared_ranks=4)


@pytest.mark.parametrize("space", [Space("cpu"), Space("cuda"), ONE_GPU], ids=["cpu", "gpus", "one gpu"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gate_asks_for_every_law_of_a_dispatcher_of_several_ranks_with_rows(function, space):
    cases = [
        case for kind in ("fixed", "covering") for case in cases_of(Section(kind, function), PROFILES["gate"], space, 0)
    ]
    single_rank = "host_sync" if space.shared_ranks > space.ranks else ""  # ranks on one GPU wait for their transport
    laws = {
        case.law
        for case in cases
        if case.law in scope_of(function, space).laws(case)
        and case.ranks > (0 if case.law == single_rank else 1)
        and sum(int(routing_map.sum()) for routing_map in maps_of(case))
    }
    assert laws == {law.name for law in CONTRACTS[function].laws.values() if law.device in ("", space.device)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ranks_that_share_a_gpu_get_few_small_cases_of_every_number_of_ranks(function):
    sections = [Section("fixed", function), Section("covering", function), Section("drawn", function)]
    cases = [case for section in sections for case in cases_of(section, PROFILES["gate"], ONE_GPU, 0)]
    shared = [case for case in cases if case.ranks > 1]
    assert {case.ranks for case in shared} == {2, 3, 4}
    assert 8 <= len(shared) <= 25 < len(cases)
    assert max(max(case.counts) for case in shared if case.counts) <= 6


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_that_ranks_add_are_of_all_ranks_even_on_one_gpu(function):
    for space, most in ((ONE_GPU, 4), (replace(ONE_GPU, shared_ranks=0), 1)):
        added = [case for case in scope_of(function, space).always() if case.dtype == "bfloat16" and case.hidden == 65]
        assert max(case.topk for case in added if case.local_experts == 1) == most
        assert {len(case.counts) for case in added if case.topk == most and case.local_experts == 1} == {most}


@pytest.mark.parametrize(("gpus", "sharing"), [(2, {3, 4}), (3, {4})])
def test_with_some_gpus_only_cases_of_more_ranks_share_them(gpus, sharing):
    scope = scope_of("deepep_combine", Space("cuda", ranks=gpus, shared_ranks=4))
    covering = scope.covering().cases
    assert {case.ranks for case in covering} == set(range(1, gpus + 1))
    assert {case.ranks for case in scope.more(covering)} == {2} | sharing  # cases of laws have two


def test_without_cases_for_them_some_laws_are_asked_by_nobody():
    """The twin: the cases that are there for something else."""
    space = Space("cuda")
    cases = [
        *fixed_cases("hybridep_combine", space),
        *covering_cases("hybridep_combine", space).cases,
        *scope_of("hybridep_combine", space).always(),
    ]
    assert {"host_sync", "graph_capture"}.isdisjoint(case.law for case in cases)
    assert {"host_sync", "graph_capture"} <= {case.law for case in scope_of("hybridep_combine", space).more(cases)}


# ---- defects: (name, a case that shows it, what is wrong, how it was seen)

DEFECTS = [
    ("E07", plain("allgather_dispatch", grads="tokens"), "d_tokens", "bound"),
    ("F02", plain("alltoall_dispatch", values="integers", law="in_flight"), "rows", "in_flight"),
    ("L03", plain("deepep_dispatch", counts=(4, 4)), "indices", "exact"),
    ("L05", plain("deepep_low_latency_combine"), "tokens", "bound"),
    ("L06", plain("hybridep_dispatch", counts=(3,), topk=1, slots=(0, 0, 0), slack=-1), "overflow", "exact"),
    ("L08", plain("hybridep_dispatch", align=4), "rows", "exact"),
    ("L15", plain("deepep_low_latency_dispatch"), "layout_range", "exact"),
    ("L16", plain("deepep_cached_dispatch", law="determinism"), "", ""),
]


@pytest.mark.parametrize(("name", "case", "output", "check"), DEFECTS, ids=[name for name, *_ in DEFECTS])
def test_a_planted_defect_shows_where_it_should(name, case, output, check):
    with Pool(ChildOptions(f"conformance.mutants.planted:{name}.moe_ref", "cpu")) as pool:
        pool.start()
        outcome = pool.worlds.run(case)
    if not check:  # it takes another case before
        assert outcome.status == "PASS"
        return
    assert (
        outcome.status,
        outcome.finding and outcome.finding["output"],
        outcome.finding and outcome.finding["check"],
    ) == ("FAIL", output, check)


def test_a_dispatcher_without_readers_of_codes_is_judged_without_recipes():
    with Pool(ChildOptions("tests.honest.sums:OverRanks", "cpu")) as pool:
        pool.start()
        coded, bare = (pool.worlds.run(plain("hybridep_dispatch", **form)) for form in ({"fp8": "fp8"}, {}))
    assert (coded.status, coded.reason, bare.status) == ("NOT_OFFERED", "codes is not offered", "PASS")


# ---- routings


@pytest.mark.parametrize("spread", ["uniform", "skewed", "one_rank", "local", "ragged", "empty", "same"])
def test_slots_and_maps_say_the_same(spread):
    case = plain("deepep_dispatch", counts=(5, 0, 4), topk=3, spread=spread)
    chosen = torch.zeros(9, 6, dtype=torch.bool)
    for token, row in enumerate(slots_of(case)):
        for expert in row[row >= 0]:
            chosen[token, expert] = True
    assert torch.equal(torch.cat(maps_of(case)), chosen)
    assert torch.equal(torch.cat(indices_of(case)), torch.from_numpy(slots_of(case)))
    owners = {int(e) // 2 for e in slots_of(case).flatten() if e >= 0}
    assert len(owners) == {"one_rank": 1, "empty": 0, "local": 2}.get(spread, len(owners))


def test_tokens_name_experts_twice_only_where_a_policy_says_what_that_means():
    twice = lambda case: any(len(set(row.tolist())) < len(row) for row in torch.cat(indices_of(case)))  # noqa: E731
    assert not twice(plain("deepep_dispatch", counts=(9, 9), topk=3))
    assert twice(plain("deepep_dispatch", counts=(9, 9), topk=3, repeats="count each"))


# ---- slabs


def _slab() -> tuple[DispatchCase, object]:
    case = plain("deepep_low_latency_dispatch", counts=(4, 3), local_experts=1, topk=2)
    return case, together(CONTRACTS[case.function].calls(case))[0]


def test_a_slab_in_another_order_is_right_and_one_with_a_strange_row_is_not():
    _, expected = _slab()
    count = int(expected.tokens_per_expert[0])
    order = torch.arange(expected.rows.shape[1])
    order[:count] = torch.cat(
        [torch.arange(4, count), torch.arange(4).flip(0)]
    )  # the second source first, the first source backwards
    shuffled = {"rows": expected.rows[:, order], "source_tokens": expected.source_tokens[:, order]}
    shuffled["layout_range"] = torch.tensor([[(count - 4) * COUNT + 4, count - 4]])
    shuffled["tokens_per_expert"] = expected.tokens_per_expert

    def verdicts(outputs):
        return {name: judge(name, x.resolve(outputs), outputs[name]) for name, x in judged(expected).items()}

    assert set(verdicts(shuffled).values()) == {None}
    assert verdicts(shuffled | {"rows": shuffled["rows"].roll(1, 1)})["rows"]
    assert verdicts(shuffled | {"source_tokens": shuffled["source_tokens"].roll(1, 1)})["source_tokens"]
    assert verdicts(shuffled | {"layout_range": shuffled["layout_range"] + COUNT})["layout_range"]
    assert order_of(shuffled["layout_range"] + COUNT, shuffled["source_tokens"], expected) is None


# ---- bounds of sums


def _sums(tree: Tree, values: str = "dyadic", dtype: torch.dtype = torch.bfloat16):
    rows = torch.tensor([[1.0], [0.5], [0.25], [-3.0]], dtype=torch.float64)
    case = plain("hybridep_combine", values=values)
    return tree_bound(case, rows, torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 1]), 3, dtype, tree)


def test_a_sum_of_two_levels_has_the_bound_of_its_roundings():
    u = 2.0**-8
    bounded = _sums(Tree(torch.float32, torch.bfloat16, torch.float32))
    assert bounded.value.flatten().tolist() == [1.75, -3.0, 0.0]
    between = u * 1.5  # of the part of two rows; the other is its row
    assert bounded.bound[0].item() == pytest.approx(between + u * (1.75 + between), rel=1e-3)
    assert bounded.bound[2].item() == 0  # nothing was added


def test_parts_of_one_row_leave_no_room_for_a_rounded_sum_of_some_of_them():
    """Three ranks: bfloat16 holds each part, and neither the first two's sum nor all's."""
    rows, case = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.float64), plain("hybridep_combine")
    places, kind = torch.arange(3), torch.bfloat16
    expected = tree_bound(
        case, rows, places, torch.zeros_like(places), 1, kind, Tree(torch.float32, kind, torch.float32)
    )
    once = rows.sum(0, keepdim=True).to(kind)
    twice = (rows[:2].sum(0, keepdim=True).to(kind) + rows[2:].to(kind)).to(kind)
    assert once.item() == 1 + 2.0**-7 and twice.item() == 1
    assert judge("tokens", expected, once) is None
    assert judge("tokens", expected, twice)


def test_ranks_that_add_in_a_narrow_dtype_have_a_wider_bound_even_for_one_part():
    float32_sums, narrow = (
        _sums(Tree(torch.float32, torch.float32, second), dtype=torch.float32)
        for second in (torch.float32, torch.bfloat16)
    )
    assert narrow.bound[1] > 2.0**-9 * 3 > float32_sums.bound[1]
    assert _sums(flat(torch.float32)).bound[0] < _sums(Tree(torch.float32, torch.bfloat16, torch.bfloat16)).bound[0]


def test_a_part_may_be_subnormal_in_the_narrow_dtype_in_which_ranks_add():
    """bfloat16's subnormals are 2⁻¹³³ apart: half of that is more than its relative rounding."""
    rows, index = torch.tensor([[7.375 * 2.0**-133]], dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    tree = Tree(torch.float32, torch.float32, torch.bfloat16)
    expected = tree_bound(plain("hybridep_combine"), rows, index, index, 1, torch.float32, tree)
    assert judge("tokens", expected, rows.to(torch.bfloat16).float()) is None
    assert judge("tokens", expected, torch.tensor([[6 * 2.0**-133]]))


def test_small_integers_are_asked_for_exactly_as_long_as_they_fit():
    assert not _sums(flat(torch.float32), "integers").bound.any()
    case = plain("hybridep_combine", values="integers")
    assert is_exact(case, torch.bfloat16, torch.tensor([128.0, 129.0])).tolist() == [True, False]


def test_every_dispatcher_of_the_reference_is_judged():
    offered = {name for name in moe_ref.__all__ if name.split("_")[0] in DISPATCHERS}
    assert {*FUNCTIONS, "deepep_layout"} == offered <= set(CONTRACTS)  # deepep_layout: on one rank
