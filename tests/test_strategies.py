"""Strategies reach what they promise, draw only legal cases, and depend on nothing but their seed."""

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from conformance.case import Case, case_from
from conformance.contracts.chunks import ChunksCase
from conformance.contracts.routing import SPREADS, RoutingCase, routed
from conformance.contracts.routing_map import IndicesCase, indices
from conformance.corpus import checked
from conformance.laws import LAWS
from conformance.plan import Section, cases_of, fixed_cases
from conformance.profiles import PROFILES
from conformance.registry import CONTRACTS
from conformance.strategies import covering
from conformance.strategies.covering import AXES, ROOM, covering_cases
from conformance.strategies.draw import drawn, run_seed, strategy
from conformance.strategies.far import far_cases
from conformance.strategies.space import DTYPES, LAYOUTS, MAP_DTYPES, MOVED_DTYPES, POISONS, Space

FUNCTIONS = tuple(CONTRACTS)
WIDE = ("wide_rows", "wide_columns")
DRAWS = {"permute": 700, "unpermute": 500, "sort_chunks": 500}
MOVES_ROWS = ("permute", "unpermute", "sort_chunks")


@functools.cache
def draws(function: str, seed: int = 1, count: int = 0) -> list[Case]:
    return drawn(strategy(function, Space()), seed, count or DRAWS.get(function, 300))


# ---- what the draws reach


def _counts(case):
    return routed(case).sum(0)


def _expected(case, output):
    contract = CONTRACTS[case.function]
    return contract.expected(case, contract.problem(case), "float32")[output].value


ROUTED = {
    "no tokens": lambda c: c.tokens == 0,
    "nothing routed": lambda c: c.tokens > 0 and not _counts(c).any(),
    "an empty expert beside others": lambda c: c.tokens > 0 and 0 < (_counts(c) == 0).sum() < c.experts,
    "one expert": lambda c: c.experts == 1,
    "all experts for every token": lambda c: c.tokens > 0 and c.experts > 1 and routed(c).all(),
    "a number of experts that is no power of two": lambda c: c.experts & (c.experts - 1) != 0,
    "more than 2000 tokens": lambda c: c.tokens > 2000,
    "more than 500 experts": lambda c: c.experts > 500,
    "tokens with different numbers of experts": lambda c: c.tokens > 1 and len(set(routed(c).sum(1).tolist())) > 1,
    "an explicit map": lambda c: c.routing is not None and c.tokens > 1,
} | {f"a map of {dtype}": lambda c, dtype=dtype: c.map_dtype == dtype for dtype in MAP_DTYPES}
SPREAD = {f"spread {spread}": lambda c, spread=spread: c.routing is None and c.spread == spread for spread in SPREADS}
WITH_ROOM = {
    "a hidden size above 4000": lambda c: c.hidden > 4000,
    "a hidden size of one": lambda c: c.hidden == 1,
    "a hidden size of zero": lambda c: c.hidden == 0,
    "an alignment": lambda c: c.align > 1,
    "a capacity above the number of tokens": lambda c: c.capacity > c.tokens,
    "a capacity that drops rows": lambda c: c.capacity and (_counts(c) > c.capacity).any(),
    "too few rows": lambda c: c.slack is not None and c.slack < 0 and _counts(c).any(),
    "more rows than needed": lambda c: c.slack is not None and c.slack > 0,
    "exactly the rows that are needed": lambda c: c.slack == 0,
    "an alignment and a number of rows": lambda c: c.align > 1 and c.slack is not None,
}
VALUES = {f"{values} values": lambda c, values=values: c.values == values for values in ("dyadic", "wide", "special")}
PROBS = {
    "probs of another dtype than the rows": lambda c: c.probs == "bfloat16" and c.dtype == "float32",
    "no probs": lambda c: not c.probs,
}
INDEXED = {
    "no tokens": lambda c: c.tokens == 0,
    "one expert": lambda c: c.experts == 1,
    "more slots than experts": lambda c: c.topk > c.experts,
    "empty slots": lambda c: c.tokens > 0 and (indices(c) == -1).any(),
    "nothing but empty slots": lambda c: c.tokens > 0 and (indices(c) == -1).all(),
    "an expert in several slots": lambda c: any(len({e for e in row if e >= 0}) < sum(e >= 0 for e in row) for row in indices(c).tolist()),
    "more than 2000 tokens": lambda c: c.tokens > 2000,
    "more than 500 experts": lambda c: c.experts > 500,
    "a number of experts that is no power of two": lambda c: c.experts & (c.experts - 1) != 0,
    "probabilities of zero": lambda c: c.zero_probs,
} | {f"indices of {dtype}": lambda c, dtype=dtype: c.index_dtype == dtype for dtype in ("int64", "int32", "int16")}
CHUNKED = {
    "no chunks": lambda c: not c.sizes,
    "no rows": lambda c: c.sizes and not sum(c.sizes),
    "an empty chunk beside others": lambda c: 0 in c.sizes and any(c.sizes),
    "an empty chunk in front": lambda c: c.sizes and c.sizes[0] == 0 and any(c.sizes),
    "more than 100 chunks": lambda c: len(c.sizes) > 100,
    "chunks that stay where they are": lambda c: len(c.sizes) > 1 and c.order == tuple(range(len(c.sizes))),
    "an order that is not its own inverse": lambda c: any(c.order[c.order[i]] != i for i in range(len(c.order))),
    "rows behind the last chunk": lambda c: c.tail > 0,
    "a hidden size above 1000": lambda c: c.hidden > 1000,
    "more than 100 rows": lambda c: sum(c.sizes) > 100,
} | {f"indices of {dtype}": lambda c, dtype=dtype: c.index_dtype == dtype for dtype in ("int64", "int32")}


def _everywhere(function: str) -> dict:
    """What every function's draws must reach: laws, poisons, layouts, dtypes, gradients."""
    laws = [law.name for law in LAWS[function].values() if not law.device]
    expanded = ("expanded",) if function in MOVES_ROWS else ()
    found = {f"law {law}": lambda c, law=law: c.law == law for law in laws}
    found |= {f"poison {poison}": lambda c, poison=poison: c.poison == poison for poison in POISONS}
    found |= {f"layout {layout}": lambda c, layout=layout: c.layout == layout for layout in (*LAYOUTS, *WIDE, *expanded)}
    if function != "pad_routing_map":
        dtypes = MOVED_DTYPES if function in ("permute", "sort_chunks") else DTYPES
        found |= {f"dtype {dtype}": lambda c, dtype=dtype: c.dtype == dtype for dtype in dtypes}
        main = {"permute": "tokens", "unpermute": "rows", "sort_chunks": "rows"}.get(function)
        wanted = ("", main, "probs", f"{main}+probs") if main else ("", "probs")
        found |= {f"gradients of {grads or 'nothing'}": lambda c, grads=grads: c.grads == grads for grads in wanted}
    if function in ("permute", "sort_chunks"):
        found |= {f"unused {unused}": lambda c, unused=unused: c.unused == unused for unused in ("rows", "probs")}
    return found


PROMISES = {
    "permute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS | {"an overflow": lambda c: _expected(c, "overflow").any()},
    "unpermute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS,
    "sort_chunks": CHUNKED | VALUES | PROBS,
    "pad_routing_map": ROUTED | SPREAD | {"a multiple out of reach": lambda c: _expected(c, "unreached").any(), "an alignment of one": lambda c: c.align == 1},
    "indices_to_multihot": INDEXED,
    "multihot_to_indices": ROUTED
    | SPREAD
    | {
        "more experts than slots": lambda c: routed(c).sum(1).max(initial=0) > c.topk,
        "more slots than experts": lambda c: c.topk > c.experts,
        "probabilities of zero": lambda c: c.zero_probs,
    },
}


def unreached(function: str, cases) -> list[str]:
    return [name for name, promise in (PROMISES[function] | _everywhere(function)).items() if not any(promise(case) for case in cases)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_draws_reach_all_that_is_promised(function):
    assert unreached(function, [*draws(function), *far_cases(function, Space())]) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_draws_that_are_held_back_are_missed(function):
    plain = replace(draws(function)[0], law="", poison="nan", layout="contiguous", layout_of="")
    assert "poison max" in unreached(function, [plain])
    assert {f"law {law.name}" for law in LAWS[function].values() if not law.device} <= set(unreached(function, [plain]))


# ---- what they depend on


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_seed_draws_the_same_cases_and_another_seed_others(function):
    first, again, other = (drawn(strategy(function, Space()), seed, 40) for seed in (7, 7, 8))
    assert first == again
    assert len({case.id for case in first}) == 40
    assert len({case.id for case in first} & {case.id for case in other}) < 20


DRAW_ELSEWHERE = """
from conformance.plan import Section, cases_of
from conformance.profiles import PROFILES
from conformance.registry import CONTRACTS
from conformance.strategies.space import Space
for function in CONTRACTS:
    for kind in ("fixed", "drawn"):
        print(*(case.id for case in cases_of(Section(kind, function), PROFILES["gate"], Space(), 0, [])))
"""


def test_the_cases_depend_on_neither_folder_nor_process(tmp_path):
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", DRAW_ELSEWHERE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    here = [cases_of(Section(kind, function), PROFILES["gate"], Space(), 0, []) for function in FUNCTIONS for kind in ("fixed", "drawn")]
    assert told.splitlines() == [" ".join(case.id for case in cases) for cases in here]


def test_seeds_of_sections_differ():
    seeds = [run_seed(function, shard, seed) for function in FUNCTIONS for shard in range(3) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


# ---- that they are legal


def all_cases(function: str, space: Space, count: int = 25) -> list[Case]:
    random = drawn(strategy(function, space), 3, count)
    assert len(random) == count
    return [*fixed_cases(function, space), *covering_cases(function, space).cases, *far_cases(function, space), *random]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_case_is_legal_and_survives_json(function):
    contract = CONTRACTS[function]
    for case in all_cases(function, Space()):
        assert checked(case_from(json.loads(case.text))) == case
        problem = contract.problem(case)
        if not case.illegal and not case.golden:
            contract.expected(case, problem, "float32")
        assert case.law in ("", *Space().laws(case))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_neighbour_is_a_legal_other_case(function):
    contract = CONTRACTS[function]
    for case in draws(function, 3, 25):
        other = contract.neighbour(case)
        assert other.text != case.text
        contract.expected(other, contract.problem(other), "float32")


def asked_for(case: Case) -> set[tuple[str, str]]:
    """(function, setting) of every call that the case makes."""
    problem = CONTRACTS[case.function].problem(case)
    return {(call.function, name) for call in (problem, problem.producer) if call for name in call.settings}


SETTINGS = [(function, name) for function, contract in CONTRACTS.items() for name in contract.optional]


@pytest.mark.parametrize(("owner", "setting"), SETTINGS)
def test_a_setting_that_is_not_accepted_is_never_asked_for(owner, setting):
    lacking = Space(without={owner: frozenset({setting})})
    functions = ("permute", "unpermute") if owner == "permute" else (owner,)
    for function in functions:
        assert all((owner, setting) not in asked_for(case) for case in all_cases(function, lacking, 10))
    assert any((owner, setting) in asked_for(case) for case in all_cases(owner, Space(), 10))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_not_asked_of_what_is_not_differentiable(function):
    undifferentiable = Space(not_differentiable=frozenset({function}))
    assert not any(getattr(case, "grads", "") for case in all_cases(function, undifferentiable))
    assert function == "pad_routing_map" or any(case.grads for case in all_cases(function, Space()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts_are_not_asked_of_what_needs_contiguous_inputs(function):
    contiguous = Space(contiguous_only=frozenset({function}))
    assert all(case.layout == "contiguous" for case in all_cases(function, contiguous))
    assert any(case.layout != "contiguous" for case in all_cases(function, Space()))


def test_laws_that_need_a_gpu_are_only_drawn_there():
    case = RoutingCase(function="permute", tokens=2, experts=2, slack=0)
    assert "graph_capture" in Space(device="cuda").laws(case)
    assert "graph_capture" not in Space().laws(case)


# ---- covering arrays


def row_of(case: Case) -> dict:
    """The values of the axes that a case of a covering array stands for."""
    fields = {axis: getattr(case, axis) for axis in AXES[case.function] if axis not in ("layout", "room")} | {"layout": (case.layout, case.layout_of)}
    if "room" in AXES[case.function]:
        shown = {"align": case.align, "capacity": case.capacity, "slack": case.slack}
        plain = {"align": 0, "capacity": 0, "slack": None}
        fields["room"] = next(name for name, room in ROOM.items() if plain | room == shown)
    return fields


def pairs(rows) -> set:
    return {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


@functools.cache
def legal_pairs(function: str) -> set:
    """Every pair of values that some legal combination of all axes has, by trying all of them."""
    axes = AXES[function]
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return pairs(row for row in every if covering._legal(function, row, Space()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_have_every_legal_pair(function):
    covered = covering_cases(function, Space())
    reached = pairs(map(row_of, covered.cases))
    assert reached == legal_pairs(function)
    assert covered.pairs == len(reached)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_covering_array_without_its_last_case_does_not(function):
    assert pairs(map(row_of, covering_cases(function, Space()).cases[:-1])) < legal_pairs(function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_are_much_smaller_than_all_combinations(function):
    assert len(covering_cases(function, Space()).cases) < len(legal_pairs(function))


# ---- far cases

FULLEST = {
    "permute": RoutingCase(function="permute", tokens=3, experts=3, hidden=3, probs="float32", grads="tokens+probs"),
    "unpermute": RoutingCase(function="unpermute", tokens=3, experts=3, hidden=3, probs="float32", grads="rows+probs"),
    "sort_chunks": ChunksCase(function="sort_chunks", sizes=(1, 2), order=(1, 0), hidden=3, probs="float32", grads="rows+probs"),
    "pad_routing_map": RoutingCase(function="pad_routing_map", tokens=3, experts=3, align=2),
    "indices_to_multihot": IndicesCase(function="indices_to_multihot", tokens=3, topk=2, experts=3, grads="probs"),
    "multihot_to_indices": RoutingCase(function="multihot_to_indices", tokens=3, topk=2, experts=3, grads="probs"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_input_and_cotangent_lies_far_in_each_of_its_dimensions(function):
    problem = CONTRACTS[function].problem(FULLEST[function])
    tensors = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
    wanted = {(name, layout) for name, x in tensors.items() for layout in WIDE[: x.dim()]}
    assert {(case.layout_of, case.layout) for case in far_cases(function, Space())} == wanted


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_lies_far_is_there(function):
    for case in far_cases(function, Space()):
        problem = CONTRACTS[function].problem(case)
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        dim = WIDE.index(case.layout) if masters[case.layout_of].dim() == 2 else 0
        assert masters[case.layout_of].shape[dim] > 1
