"""Scores of right and wrong results, and the document that compares them."""

from types import SimpleNamespace

import pytest

import moe_ref
from benchmarks.margins import figures, of_variants
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.interface import Implementation

CASE = scope_of("z_loss", Space()).case({"tokens": 5, "experts": 4, "grads": "logits"})


def outcome_of(factor, case=CASE):
    def z_loss(logits, *arguments, **settings):
        return moe_ref.z_loss(logits, *arguments, **settings) * factor

    return evaluate(case, Implementation(SimpleNamespace(z_loss=z_loss), "scaled"), scores=True)


def test_the_score_of_a_wrong_result_tells_how_wrong_it_is():
    near, far = outcome_of(1 + 2.0**-15), outcome_of(1.5)
    assert outcome_of(1).scores["error"] < 1 < near.scores["error"] < far.scores["error"]
    assert (near.finding["check"], far.finding["check"]) == ("bound", "bound")


def test_a_result_of_the_wrong_dtype_has_no_score():
    absent = evaluate(CASE, Implementation(SimpleNamespace(z_loss=lambda *_, **__: None), "nothing"), scores=True)
    assert (absent.status, absent.scores) == ("FAIL", {})


def test_a_variant_has_the_largest_score_of_each_function():
    (variant,) = of_variants(["moe_ref.router.losses"], seconds=0.5)
    assert {"z_loss", "load_balancing_loss"} <= variant["largest"].keys()
    assert all(0 <= scores["error"] < 1 for scores in variant["largest"].values())


@pytest.mark.parametrize("mistaken", [{"P1": 7.0, "P2": 3.0}, {}])
def test_a_row_has_the_largest_honest_score_and_the_nearest_wrong_one(mistaken):
    def found(scores):
        variants = [{"name": name, "cases": 1, "largest": {"glu": {"error": score}}} for name, score in scores.items()]
        return {"date": "2026-01-01", "seconds": 1.0, "found": variants}

    (table,) = figures(found({"mine": 0.25, "yours": 0.5}), found(mistaken))["tables"]
    nearest = ["3", "P2", "2"] if mistaken else ["–", "–", "0"]
    assert table["rows"] == [["`glu`", "bound", "0.500", "yours", "2", *nearest]]
