"""Chosen cases are legal, and ask for nothing that an implementation does not take."""

import functools
import json

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core import covering
from conformance.core.case import Case, axes_of, case_from
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.engine.run.corpus import checked
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.permutation.cases import RoutingCase
from conformance.judge.exact import bits
from tests.engine.drawn_cases import FUNCTIONS, STEPPED, covered, draws
from tests.engine.promises import NO_GRADIENTS

# one after another: they share cases
of_every_function = pytest.mark.parametrize("function", FUNCTIONS, scope="module")


def all_cases(function: str, space: Space) -> list[Case]:
    random = draws(function)[:25] if space == Space() else drawn(strategy(function, space), 3, 10)
    pairs = (covered(function) if space == Space() else rough(function, space)).cases
    added = scope_of(function, space).more(pairs) if function not in COLLECTIVES else []
    return [*fixed_cases(function, space), *pairs, *added, *scope_of(function, space).far(), *random]


def rough(function: str, space: Space) -> covering.Covered:
    """A covering array that is made faster, of more cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(covering, "CANDIDATES", 2)
        return covering_cases(function, space)


@functools.cache
def every_case(function: str) -> list[Case]:
    return all_cases(function, Space())


def tensors_of(case: Case) -> dict[str, bytes]:
    problem = CONTRACTS[case.function].problem(case)
    tensors = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
    return {name: bits(x).tobytes() for name, x in tensors.items()}


@of_every_function
def test_cases_are_legal_and_survive_json_with_equal_tensors(function):
    """Every fifth: the gate computes all of them."""
    for case in every_case(function)[FUNCTIONS.index(function) % 5 :: 5]:
        reread = checked(case_from(json.loads(case.text)))  # the reference computes it
        assert reread == case and (case.illegal or tensors_of(reread) == tensors_of(case))
        assert case.law in ("", *scope_of(case.function, Space()).laws(case))


@of_every_function
def test_every_neighbour_is_a_legal_other_case(function):
    contract = CONTRACTS[function]
    for case in draws(function)[:10]:
        neighbour = scope_of(function, Space()).neighbour(case)
        assert neighbour.text != case.text
        contract.expected(neighbour, contract.problem(neighbour), {})


def asked_for(case: Case) -> set[tuple[str, str]]:
    """(function, setting) of every call that the case makes, and parameters of those that read."""
    problem = CONTRACTS[case.function].problem(case)
    calls = {(call.function, name) for call in (problem, problem.producer) if call for name in call.settings}
    readers = (axis for axis in axes_of(type(case)).values() if "." in axis.argument)
    return calls | {(case.function, axis.argument) for axis in readers if getattr(case, axis.name) != axis.default}


# every other setting: each is lacking beside some that are accepted; functions take turns in which
OPTIONAL = {function: [*contract.optional] for function, contract in CONTRACTS.items()}
HALVES = {name: frozenset(settings[turn % 2 :: 2]) for turn, (name, settings) in enumerate(OPTIONAL.items())}


@of_every_function
def test_settings_that_are_not_accepted_and_layouts_are_never_asked_for(function):
    """By an implementation that lacks some settings and needs contiguous inputs."""
    unaccepted = {(function, name) for name in HALVES[function]}
    space = Space(without={function: HALVES[function]}, contiguous_only=frozenset({function}))
    cases = all_cases(function, space)
    assert not any(asked_for(case) & unaccepted for case in cases)
    assert unaccepted <= set().union(*map(asked_for, every_case(function)))
    if function not in STEPPED:
        assert all(case.layout == "contiguous" for case in cases)
        assert any(case.layout != "contiguous" for case in every_case(function))


@of_every_function
def test_gradients_are_not_asked_of_what_is_not_differentiable(function):
    undifferentiable = Space(not_differentiable=frozenset({function}))
    assert not any(getattr(case, "grads", "") for case in all_cases(function, undifferentiable))
    assert function in NO_GRADIENTS or any(case.grads for case in every_case(function))


def test_settings_that_a_producer_does_not_accept_are_never_asked_for():
    unaccepted = {("permute", name) for name in HALVES["permute"]}
    cases = all_cases("unpermute", Space(without={"permute": HALVES["permute"]}))
    assert unaccepted and not any(asked_for(case) & unaccepted for case in cases)


def test_laws_that_need_a_gpu_are_only_drawn_there():
    case = RoutingCase(function="permute", tokens=2, experts=2, slack=0)
    assert "graph_capture" in scope_of(case.function, Space(device="cuda")).laws(case)
    assert "graph_capture" not in scope_of(case.function, Space()).laws(case)
