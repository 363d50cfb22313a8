"""An output that is declared to be omitted may be absent from the result."""

from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import pytest

import moe_ref
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.interface import Implementation

FIELDS = ("rows", "probs", "row_map")
OMITTED = ("tokens_per_expert", "pad_offsets", "overflow")
CASE = Case.family["permute"](function="permute", tokens=4, experts=2, hidden=3, routing=(1, 2, 3, 0))
Few = make_dataclass("Few", FIELDS)
FORMS = {
    "dict": dict,
    "dataclass": lambda fields: Few(**fields),
    "tuple": lambda fields: (*fields.values(), None, None, None),
}


def outcome_of(case: Case, form: str, omitted: tuple[str, ...]):
    def permute(tokens, routing_map, *, probs=None, align=None):
        out = moe_ref.permute(tokens, routing_map, probs=probs, align=align)
        return FORMS[form]({name: getattr(out, name) for name in FIELDS})

    namespace = SimpleNamespace(
        permute=permute,
        unpermute=moe_ref.unpermute,
        declares=lambda function: {"omits": omitted} if function == "permute" else {},
    )
    implementation = Implementation(namespace, "few")
    implementation.declares("permute")
    return evaluate(case, implementation)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("law", ["", "split", "determinism", "history", "token_permutation"])
def test_an_omitted_output_is_not_demanded(form, law):
    outcome = outcome_of(replace(CASE, law=law), form, OMITTED)
    assert (outcome.status, outcome.finding) == ("PASS", None)


@pytest.mark.parametrize("form", FORMS)
def test_a_consumer_takes_a_result_without_omitted_outputs(form):
    assert outcome_of(replace(CASE, function="unpermute"), form, OMITTED).status == "PASS"


@pytest.mark.parametrize("form", FORMS)
def test_an_output_that_is_not_declared_is_demanded(form):
    outcome = outcome_of(CASE, form, OMITTED[1:])
    assert outcome.status == "FAIL"
    assert "tokens_per_expert" in f"{outcome.finding['output']} {outcome.finding['message']}"
