"""`conformance.testing` and `conformance.strategies`: right passes, wrong is found and shrunk."""

import re
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_ref
from conformance import strategies
from conformance.core.case import CaseError
from conformance.testing import assert_conforms, conforms
from conformance.usage import UsageError

QUIET = settings(database=None, max_examples=60, deadline=None)
DOCUMENT = Path(__file__).parents[2] / "docs" / "your-own-tests.md"


def turned(tokens: torch.Tensor, routing_map: torch.Tensor, **settings: Any) -> Any:
    """Rows of more than two copies in the wrong order."""
    out = moe_ref.permute(tokens, routing_map, **settings)
    return out._replace(rows=out.rows.flip(0)) if len(out.rows) > 2 else out


WRONG = SimpleNamespace(permute=turned)


def test_the_reference_conforms():
    assert_conforms("moe_ref", "permute")
    assert_conforms(moe_ref, "gate", {"tokens": 5, "experts": 3, "hidden": 4, "grads": "x"})
    assert_conforms(moe_ref, "permute", '{"function":"permute","tokens":4,"experts":3,"law":"determinism"}')


def test_a_wrong_call_is_reported_with_its_case():
    with pytest.raises(AssertionError, match=r"(?s)permute: FAIL: rows .*T=4 H=2 E=3.*moe-conformance replay '{"):
        assert_conforms(WRONG, "permute", {"tokens": 4, "experts": 3, "hidden": 2})
    assert_conforms(WRONG, "permute", {"tokens": 1, "experts": 1})


def test_hypothesis_shrinks_a_failure():
    @settings(QUIET, derandomize=True)
    @conforms("permute", WRONG)
    def test(case: Any) -> None:
        pass

    with pytest.raises(AssertionError) as failure:
        test()
    assert int(re.search(r"H=(\d+)", str(failure.value))[1]) <= 2  # fewer tokens would need another kind of map


def test_the_body_of_the_test_gets_the_case():
    cases = []

    @QUIET
    @conforms("sort_chunks", moe_ref, where="dtype=bfloat16")
    def test(case: Any) -> None:
        cases.append(case)
        assert case.seed < 3

    with pytest.raises(AssertionError):
        test()
    assert {case.dtype for case in cases} == {"bfloat16"}


def test_only_what_is_accepted_and_supported_is_asked_for():
    reasons = []

    def supports(function: str, **arguments: Any) -> str | None:
        reasons.append("too many tokens" if len(arguments["tokens"]) > 4 else None)
        return reasons[-1]

    few = SimpleNamespace(permute=lambda tokens, routing_map: moe_ref.permute(tokens, routing_map), supports=supports)

    @QUIET
    @conforms("permute", few)
    def test(case: Any) -> None:
        assert case.align == 0 and not case.probs

    test()
    assert {*reasons} == {None, "too many tokens"}
    with pytest.raises(unittest.SkipTest, match="too many tokens"):
        assert_conforms(few, "permute", {"tokens": 9})


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: assert_conforms(moe_ref, "premute"), UsageError, "known are gate, "),
        (lambda: assert_conforms(SimpleNamespace(), "permute"), UsageError, "does not offer permute"),
        (lambda: assert_conforms(moe_ref, "alltoall_dispatch"), UsageError, "which ranks call together"),
        (lambda: assert_conforms(moe_ref, "permute", {"tokenz": 3}), CaseError, "'tokenz' is no field"),
        (lambda: assert_conforms(moe_ref, "permute", '{"function":"glu"}'), UsageError, "must be one of permute"),
        (lambda: conforms("permute", moe_ref, where="colour=1"), UsageError, "no case has the field 'colour'"),
        (lambda: strategies.cases("premute"), UsageError, "known are gate, "),
    ],
)
def test_what_cannot_be_judged_is_refused(call, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        call()


@QUIET
@given(strategies.routing_maps(st.integers(0, 5), topk=3), strategies.routing_maps(tokens=4, experts=7))
def test_routing_maps_have_the_sizes_asked_for(chosen, options):
    assert chosen.dtype == torch.bool and (chosen.sum(1) == 3).all() and len(chosen) <= 5
    assert options.shape == (4, 7)


@QUIET
@given(strategies.logits(3, 5, torch.bfloat16, most=2))
def test_logits_are_exact_steps(logits):
    assert logits.shape == (3, 5) and logits.dtype == torch.bfloat16 and logits.abs().max() <= 2
    assert torch.equal((logits.double() * 8).round(), logits.double() * 8)


def test_logits_have_ties_and_differences():
    distinct: set[int] = set()

    @QUIET
    @given(strategies.logits(4, 4))
    def collect(logits: torch.Tensor) -> None:
        distinct.add(len({*map(float, logits.flatten())}))

    collect()
    assert min(distinct) < 16 and max(distinct) > 1


def test_the_examples_of_the_document_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "an example of the page", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(blocks) == 3 and len(tests) == 4
    for test in tests:
        test()
