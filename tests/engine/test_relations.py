"""In a ring, algebraic laws hold bit by bit, and find what every tolerance accepts."""

from dataclasses import replace

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.where import parsed
from conformance.engine.child import relations
from conformance.engine.child.evaluate import evaluate
from conformance.families.experts.cases import GroupedCase
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation
from tests.common.suite import outcome_of
from tests.engine import rings

LINEAR = GroupedCase(function="grouped_linear", tokens=9, experts=3, counts=(4, 0, 5), hidden=6, width=4, seed=1)
PRODUCTS = [replace(LINEAR, function=name) for name in ("grouped_linear", "grouped_dgrad", "grouped_wgrad")]
SUM = RoutingCase(function="unpermute", tokens=5, experts=4, hidden=3, topk=3, seed=1)


def judged(case, namespace):
    outcome = evaluate(case, Implementation(namespace, "ring"), ring=True)
    finding = outcome.finding or {}
    return outcome.status, finding.get("check", ""), finding.get("message", outcome.reason)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.function)
@pytest.mark.parametrize("tail", [0, 2])
def test_exact_products_keep_every_law_in_a_ring(case, tail):
    assert judged(replace(case, tail=tail), rings.products())[0] == "PASS"


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.function)
def test_a_ring_has_other_values_than_the_reference(case):
    assert outcome_of(case, rings.products()).status == "FAIL"


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.function)
@pytest.mark.parametrize("mistaken", [{"terms": slice(1, None)}, {"halves": True}], ids=["a term dropped", "rounded"])
def test_a_term_dropped_or_rounded_in_between_breaks_the_order_of_a_sum(case, mistaken):
    status, check, message = judged(case, rings.products(**mistaken))
    law = "row_reversal" if case.function == "grouped_wgrad" else "contraction_reversal"
    assert (status, check) == ("FAIL", law)
    assert "in a ring; the other run has 0x" in message


def test_sums_keep_every_law_in_a_ring_and_a_rounding_breaks_their_order():
    assert judged(SUM, rings.sums())[0] == "PASS"
    assert judged(SUM, rings.sums(rounds=True))[:2] == ("FAIL", "expert_relabelling")


@pytest.mark.parametrize(
    "case",
    [replace(LINEAR, scaling="block", tokens=4, experts=1, counts=()), replace(LINEAR, golden="one_expert")],
    ids=["quantised", "golden"],
)
def test_what_is_no_algebra_is_not_judged_in_a_ring(case):
    assert judged(case, rings.products()) == ("UNINFORMATIVE", "", "it has no algebraic law")


def test_the_functions_that_a_ring_can_judge():
    where = {name: relations.judged_where(contract) for name, contract in CONTRACTS.items()}
    drawn, products = relations.DRAWN, ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
    assert {name: x for name, x in where.items() if x} == {
        "unpermute": drawn,
        **dict.fromkeys(("permute", "sort_chunks"), drawn & parsed("dtype!=uint8", "dtype")),
        **dict.fromkeys(products, drawn & parsed("scaling=''", "scaling")),
    }


def test_what_the_reference_leaves_open_is_not_compared():
    case = replace(LINEAR, tail=2)
    expected = CONTRACTS["grouped_linear"].expected(case, CONTRACTS["grouped_linear"].problem(case), {})
    ring = relations.another_run(expected, {"out": torch.zeros(11, 4)})["out"]
    changed = torch.ones(11, 4)
    assert (ring.wrong(changed) is not None) and ring.wrong(torch.zeros(11, 4)) is None
