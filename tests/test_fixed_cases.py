"""Illegal calls and results that were worked out by hand, of every function of one process."""

from typing import Any

import pytest

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.family import by_function
from conformance.core.ranks import Collective, ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import fixed_cases
from conformance.families.experts import illegal_recipes
from conformance.interface import Implementation, load
from tests.common.fast import interpreted
from tests.common.suite import assert_accepted, outcome_of

COLLECTIVES = {name for name, contract in CONTRACTS.items() if isinstance(contract, Collective)}
IN_ONE_PROCESS = [name for name in CONTRACTS if name not in {*COLLECTIVES, "moe_layer"}]


@pytest.mark.parametrize("function", IN_ONE_PROCESS)
def test_the_reference_passes_golden_cases_and_illegal_calls(function):
    """tests/dispatch and tests/layer call functions of several ranks, in a world of processes."""
    cases = [case for case in fixed_cases(function, Space()) if not ranks_of(CONTRACTS[function], case)]
    assert_accepted(cases, moe_ref, share=0)


class Refusing(Implementation):
    """An implementation that keeps the messages of the errors that its functions raise."""

    def __init__(self, name: str) -> None:
        super().__init__(load(name).namespace, name)
        self.messages: list[str] = []

    def call(self, function: str, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().call(function, *arguments, **settings)
        except ValueError as error:
            self.messages.append(str(error))
            raise


@interpreted
@pytest.mark.parametrize("function", [name for name in IN_ONE_PROCESS if name != "sequential_mlp"])
def test_moe_fast_refuses_an_illegal_call_in_the_words_of_the_reference(function):
    """Where the call is refused by both, and not by a value that only the device knows.

    Products of a recipe quantise the same tensors in another order, so that another rule may speak
    first: tests/experts/test_precision_mlp.py has their illegal calls. sequential_mlp, which calls
    its experts one after another, is left out for the same reason.
    """
    contract = CONTRACTS[function]
    for rule in contract.illegal.keys() - by_function(illegal_recipes).get(function, {}).keys():
        case = Case.family[function](function=function, illegal=rule, **scope_of(function, Space()).illegal)
        reference, fast = Refusing("moe_ref"), Refusing("moe_fast")
        statuses = {outcome_of(case, implementation).status for implementation in (reference, fast)}
        if statuses == {"PASS"} and not contract.problem(case).on_device:
            assert reference.messages and fast.messages == reference.messages, rule
