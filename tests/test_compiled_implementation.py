"""An implementation whose functions are compiled, judged like any other."""

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.interface import Implementation, UsageError, load


def status_of(implementation: Implementation, function: str) -> str:
    """The status of the function's first golden case."""
    golden = next(iter(CONTRACTS[function].golden))
    return evaluate(Case.family[function](function=function, golden=golden), implementation).status


def test_a_compiled_function_is_judged():
    implementation = load("conformance.compiled:aot_eager.moe_ref")
    assert status_of(implementation, "glu") == "PASS"
    assert implementation.namespace.glu is not moe_ref.glu
    assert implementation.namespace.glu is implementation.namespace.glu  # one graph for all calls


@pytest.mark.parametrize(("form", "options"), [("", {}), ("dynamic.", {"dynamic": True})])
def test_a_form_names_options_of_the_compiler(monkeypatch, form, options):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options) or function)
    assert load(f"conformance.compiled:{form}moe_ref").offers("glu")
    assert calls == [{"fullgraph": True} | options]


def glu(h: Tensor, **settings: object) -> Tensor:
    """The reference's, by way of a number that only the host knows."""
    return moe_ref.glu(h, **settings) if float(h.sum()) < torch.inf else h


def test_a_function_that_does_not_trace_whole_fails():
    assert status_of(load(__name__), "glu") == "PASS"
    assert status_of(load(f"conformance.compiled:aot_eager.{__name__}"), "glu") == "FAIL"


def test_dispatchers_are_not_offered():
    implementation = load("conformance.compiled:moe_ref")
    assert implementation.offers("permute") and not implementation.offers("alltoall_dispatch")


def test_what_cannot_be_compiled_is_named():
    with pytest.raises(UsageError, match="there is no module 'my_kernel'"):
        load("conformance.compiled:my_kernel")
    with pytest.raises(UsageError, match="names no implementation"):
        load("conformance.compiled:dynamic").offers("glu")
