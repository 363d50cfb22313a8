"""Tokens shared out over real ranks: losses, counts and gradients of replicated weights are parts
of sums, and who sums wrongly is found.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.options import ChildOptions
from conformance.engine.run.corpus import checked
from conformance.engine.run.pool import Pool
from conformance.engine.run.reduction import reduce
from conformance.families.experts.cases_mlp import SharedCase
from conformance.families.router.cases import GateCase
from conformance.families.router.cases_route import RouteCase, logits_of_step
from conformance.judge import judge

HERE = (str(Path(__file__).parents[2]),)
ALL = "aux+seq+global+z"


def route(counts: tuple[int, ...], **fields) -> RouteCase:
    defaults = {"experts": 6, "topk": 2, "losses": ALL, "grads": "logits", "seed": 3}
    return RouteCase(function="route", counts=counts, tokens=sum(counts), **defaults | fields)


UNEVEN = route((3, 0, 2, 4), padding=2, ranks=4)
SPLIT = replace(UNEVEN, ranks=2)
UPDATED = route((2, 0), ranks=1, bias=True, steps="train+finish+train", losses="")
GATE = GateCase(function="gate", counts=(2, 0, 3), tokens=5, hidden=3, experts=4, bias=True, grads="x+weight+bias")
SHARED = SharedCase(
    function="shared_experts",
    counts=(3, 0, 2),
    tokens=5,
    hidden=3,
    width=4,
    gate=True,
    grads="x+fc1_weight+fc2_weight+gate_weight",
    seed=1,
)
CASES = [
    *(route((2, 2)), route((2, 2), ranks=2, per_token=True), route((4, 2, 0), sequences=2, ranks=3), route((3,)),
     UNEVEN, replace(UNEVEN, per_token=True)),
    *(SPLIT, replace(SPLIT, per_token=True, bias=True, steps="train+train+finish+train"), route((0, 0)), UPDATED, GATE,
     SHARED),
    *(replace(GATE, dtype="bfloat16", router_dtype="fp32"), replace(SHARED, dtype="bfloat16")),
]  # fmt: skip


@pytest.fixture(scope="module", params=["moe_ref", "moe_fast"])
def world(request) -> Iterator[Pool]:
    with Pool(ChildOptions(request.param, "cpu")) as pool:
        pool.start()
        yield pool


def outcomes(pool: Pool, cases: list) -> dict[str, tuple]:
    return {case.text: (outcome.status, outcome.finding, outcome.reason) for case, outcome in pool.run(cases)}


def test_who_sums_over_ranks_as_the_reference_does_passes(world):
    assert {
        text: verdict for text, verdict in outcomes(world, CASES).items() if verdict[0] not in ("PASS", "UNINFORMATIVE")
    } == {}


@pytest.mark.parametrize(
    "case",
    [route((2, 2), ranks=2), replace(UNEVEN, losses="aux+seq+global", per_token=True), GATE, SHARED],
    ids=lambda c: c.function,
)
def test_laws_hold_over_ranks(case, world):
    laws = [law.name for law in CONTRACTS[case.function].laws.values() if not law.device and law.applies(case)]
    assert laws == ["history", "determinism", "one_process"]
    assert {verdict[0] for verdict in outcomes(world, [replace(case, law=law) for law in laws]).values()} == {"PASS"}


# ---- defects: (name, a case that shows it, the output that is wrong)

DEFECTS = [
    ("S01", route((3, 3), ranks=2, losses="aux"), "0.aux_loss"),
    ("S02", route((3, 1), ranks=2, losses="aux", per_token=True), "d_logits.0"),
    ("S03", route((3, 3), ranks=2, losses="aux"), "0.aux_loss"),
    ("S04", route((2, 2, 2, 2), ranks=2, losses="global"), "0.global_aux_loss"),
    ("S05", replace(UPDATED, steps="train+train"), "state.tokens_per_expert"),
    ("S06", UPDATED, "state.expert_bias"),
    ("S07", UPDATED, "state.expert_bias"),
    ("S08", route((2, 2), ranks=1, bias=True, steps="train+finish", losses=""), "state.expert_bias"),
    ("S09", GATE, "d_weight"),
    ("S10", SHARED, "d_fc2_weight"),
    ("A05", route((2, 2), ranks=2, losses="z"), "0.z_loss"),
]
ALREADY_ALONE = ("S03", "S05", "A05")  # with sums that multiply


@pytest.mark.parametrize(("name", "case", "output"), DEFECTS, ids=[f"{name} {output}" for name, _, output in DEFECTS])
def test_a_planted_defect_shows_where_it_should_and_mostly_only_among_ranks(name, case, output):
    with Pool(ChildOptions(f"conformance.mutants.planted:{name}.moe_ref", "cpu")) as pool:
        pool.start()
        outcomes = dict(pool.run([case, replace(case, counts=())]))
    among, one_process = outcomes[case], outcomes[replace(case, counts=())]
    assert (among.status, among.finding and among.finding["output"]) == ("FAIL", output)
    assert name in ALREADY_ALONE or one_process.status == "PASS"
    if name == "S07":
        assert among.finding["message"].startswith("rank 1 of 2: ")  # whose bias differs


def test_a_bias_that_is_off_by_one_bit_is_wrong():
    expected = CONTRACTS["route"].expected(UPDATED, CONTRACTS["route"].problem(UPDATED), {})["state.expert_bias"]
    assert expected.value.any()
    assert judge("state.expert_bias", expected, expected.value) is None
    assert judge("state.expert_bias", expected, torch.nextafter(expected.value, torch.ones(()))) is not None


# ---- the law: what is right among ranks and wrong alone


def _more_losses_alone(logits, config, **settings):
    twice = {f"{name}_coeff": 2 * coeff for name, coeff in config.balancing_coeffs.items()}
    return moe_ref.route(logits, config if "ranks" in settings else replace(config, **twice), **settings)


def _many_tokens_twice(x, weight, **settings):
    return moe_ref.gate(x, weight if len(x) < 4 else 2 * weight, **settings)


def _many_shared_tokens_twice(x, fc1_weight, fc2_weight, **settings):
    return moe_ref.shared_experts(x, fc1_weight, fc2_weight if len(x) < 4 else 2 * fc2_weight, **settings)


STATE = {name: getattr(moe_ref, name) for name in ("new_state", "finish_batch", "state_tensors", "state_from")}
OTHER_ALONE = SimpleNamespace(
    route=_more_losses_alone, gate=_many_tokens_twice, shared_experts=_many_shared_tokens_twice, **STATE
)


@pytest.mark.parametrize("case", [route((2, 2), ranks=2, losses="aux+seq"), GATE, SHARED], ids=lambda c: c.function)
def test_the_law_of_one_process_finds_what_only_it_can(case):
    with Pool(ChildOptions("tests.dispatch.test_ranks_suite:OTHER_ALONE", "cpu", search=HERE)) as pool:
        judged = list(pool.run([case, replace(case, law="one_process")]))
    assert [outcome.status for _, outcome in judged] == ["PASS", "FAIL"]
    assert judged[1][1].finding["check"] == "one_process"


# ---- what is right, worked out token by token


def softmax(x: list[float]) -> list[float]:
    return [math.exp(v) / sum(math.exp(w) for w in x) for v in x]


@pytest.mark.parametrize(
    ("case", "groups"),
    [(UNEVEN, [range(4)] * 4), (SPLIT, [range(2), range(2), range(2, 4), range(2, 4)])],
    ids=["one sequence", "two"],
)
def test_the_losses_of_each_rank_are_those_of_loops_over_all_tokens(case, groups):
    case = replace(case, score="softmax", dtype="float32", grads="")
    calls = CONTRACTS["route"].calls(case)
    logits = [call.required["logits.0"].double().tolist() for call in calls]
    assert [x for local in logits for x in local] == logits_of_step(case, 0).double().tolist()
    padding = [call.settings["padding_mask"].tolist() for call in calls]
    valid = [[x for x, padded in zip(*both, strict=True) if not padded] for both in zip(logits, padding, strict=True)]
    coeff, experts, topk = case.coeff / 8, case.experts, case.topk

    def share(rank: int, ranks) -> float:
        """coeff · E / (K · N²) · Σ_e count[e] · Σ_t score[t, e]"""
        tokens = [x for r in ranks for x in valid[r]]
        count = [sum(e in sorted(range(experts), key=lambda i: -x[i])[:topk] for x in tokens) for e in range(experts)]
        return (
            coeff
            * experts
            / topk
            / max(len(tokens), 1) ** 2
            * sum(count[e] * softmax(x)[e] for x in valid[rank] for e in range(experts))
        )

    for rank, local in enumerate(valid):
        values = CONTRACTS["route"].right_at(rank, case, calls, {})
        square = [math.log(sum(map(math.exp, x))) ** 2 for x in local]
        expected = {
            "aux_loss": share(rank, groups[rank]),
            "seq_aux_loss": share(rank, groups[rank]),
            "global_aux_loss": share(rank, range(4)),
            "z_loss": coeff / len(groups[rank]) * sum(square) / max(len(local), 1),
        }
        assert {name: values[f"0.{name}"].value.item() for name in expected} == pytest.approx(expected, rel=1e-12)


# ---- cases


def test_a_case_over_ranks_is_reduced_to_the_known_minimum():
    def attempt(case) -> Outcome:
        is_wrong = len(case.counts) > 1 and case.counts[1] < case.counts[0] and "seq" in case.losses
        return Outcome("FAIL", {"output": "", "check": "", "message": "", "index": ()}) if is_wrong else Outcome("PASS")

    many = route(
        (6, 2, 4, 8),
        sequences=2,
        ranks=2,
        padding=3,
        per_token=True,
        bias=True,
        steps="train+finish+train",
        law="history",
    )
    reduced = reduce(many, attempt(many), attempt, 20)
    assert reduced.finished
    assert reduced.case == RouteCase(function="route", counts=(1, 0), tokens=1, losses="seq")


def test_what_fails_in_one_process_too_is_reduced_to_one():
    reduced = reduce(UNEVEN, Outcome("HANG"), lambda case: Outcome("HANG"), 20)
    assert (reduced.case.counts, reduced.finished) == ((), True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"counts": (2, 1), "tokens": 4}, "the sum tokens, 4"),
        ({"counts": (3, -1), "tokens": 2}, "numbers ≥ 0"),
        ({"counts": (3, 1), "tokens": 4, "sequences": 2}, "sequences must divide each"),
        ({"counts": (1, 1, 1), "tokens": 3, "ranks": 2}, "ranks their number"),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_a_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        checked(RouteCase(function="route", **fields))


def test_a_mask_says_which_tokens_count_wherever_ranks_have_unequally_many():
    masks = [
        call.settings.get("padding_mask")
        for counts in ((2, 2), (3, 1))
        for call in CONTRACTS["route"].calls(route(counts))
    ]
    assert masks[:2] == [None, None]
    assert [mask.tolist() for mask in masks[2:]] == [[False] * 3, [False]]


def over_ranks(function: str, space: Space) -> list:
    return [
        case for case in [*drawn(strategy(function, space), 1, 200), *scope_of(function, space).always()] if case.counts
    ]


@pytest.mark.parametrize("function", ["gate", "shared_experts", "route"])
def test_worlds_of_every_size_are_drawn_and_none_where_there_is_no_room(function):
    cases = over_ranks(function, Space())
    assert {len(case.counts) for case in cases} == {1, 2, 3, 4}
    assert any(0 in case.counts and case.tokens for case in cases)
    assert {case.law for case in cases} == {"history", "determinism", "one_process"}
    assert {len(case.counts) for case in over_ranks(function, Space(ranks=2))} == {1, 2}
    assert over_ranks(function, Space(ranks=1)) == []


def test_routers_over_ranks_share_sequences_in_every_way_and_only_where_sums_are_accepted():
    cases = over_ranks("route", Space())
    assert {(len(case.counts), case.ranks) for case in cases} >= {(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    assert any(len(set(case.counts)) > 1 and case.per_token for case in cases)
    assert any(len(set(case.counts)) == 1 < len(case.counts) and not case.padding for case in cases)
    assert over_ranks("route", Space(without={"route": frozenset({"ranks"})})) == []
    unmasked = over_ranks("route", Space(without={"route": frozenset({"padding_mask"})}))
    assert unmasked and all(len(set(case.counts)) == 1 for case in unmasked)
