"""The declaration `zero_prob_rows`: what permute writes for a routed token of probability 0."""

from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.engine.child.evaluate import evaluate
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation
from conformance.peers.te.padding import zero_rows

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "uint8")


def zeroing(is_zero, gradient_too=False):
    """permute that writes zeros where `is_zero(probs)`."""

    def permute(tokens, routing_map, *, probs=None, align=None, capacity=None, num_rows=None):
        out = moe_ref.permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
        if probs is None:
            return out
        zero = is_zero(out.probs.detach())
        rows = torch.where(zero[:, None], 0, out.rows) if gradient_too else zero_rows(out.rows, (~zero).float())
        return out._replace(rows=rows)

    return permute


EXACT = zeroing(lambda probs: probs == 0)
CALLS = {
    "copied": moe_ref.permute,
    "zero": EXACT,
    "tiny": zeroing(lambda probs: probs.abs() < 1e-30),
    "nan": zeroing(lambda probs: ~(probs.abs() > 0)),
    "positive": zeroing(lambda probs: (probs == 0) & ~probs.signbit()),
    "gradient": zeroing(lambda probs: probs == 0, gradient_too=True),
}


def status(call, declared, **fields):
    namespace = SimpleNamespace(
        permute=CALLS[call], unpermute=moe_ref.unpermute, declares=lambda _: {"zero_prob_rows": declared}
    )
    case = RoutingCase(function="permute", tokens=6, experts=3, hidden=4, probs="float32", **fields)
    return evaluate(case, Implementation(namespace, call), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("law", ["", *CONTRACTS["permute"].laws])
def test_each_policy_passes_every_law_where_it_is_declared(dtype, law):
    if law in ("late_producer", "host_sync", "graph_capture"):
        law = "zero_prob_rows"  # the others are for a GPU
    for call in ("copied", "zero"):
        assert status(call, call, dtype=dtype, law=law, zero_probs=True, seed=3).status == "PASS"


@pytest.mark.parametrize(("call", "declared"), [("copied", "zero"), ("zero", "copied")])
def test_the_other_policy_fails_on_values_and_on_the_law_alone(call, declared):
    assert status(call, declared, zero_probs=True, seed=3).finding["output"] == "rows"
    finding = status(call, declared, law="zero_prob_rows").finding
    assert (finding["output"], finding["check"]) == ("rows", "zero_prob_rows")


@pytest.mark.parametrize("call", ["tiny", "nan", "positive"])
def test_rows_of_other_probabilities_are_copies(call):
    assert status(call, "zero").status == "PASS"
    assert status(call, "zero", law="zero_prob_rows").finding["check"] == "zero_prob_rows"


def test_the_gradient_of_a_row_of_zeros_is_a_copys():
    fields = {"zero_probs": True, "seed": 3, "grads": "tokens+probs"}
    assert status("zero", "zero", **fields).status == "PASS"
    assert status("zero", "zero", law="adjointness", **fields).status == "PASS"
    assert status("gradient", "zero", **fields).finding["output"] == "d_tokens"


def test_a_copy_where_zeros_are_declared_is_not_explained_as_a_wrong_token():
    finding = status("copied", "zero", zero_probs=True, seed=3).finding["message"]
    assert "should" not in finding and "puts token" not in finding
