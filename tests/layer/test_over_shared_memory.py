"""The layer over memory that the ranks share, as an implementation."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.child import ChildOptions
from conformance.engine.choose.draw import scope_of
from conformance.engine.run.pool import Pool
from conformance.families.layer.cases import LayerCase
from conformance.families.layer.space import WORLDS, of_world
from moe_fast.dispatch import symmetric
from moe_fast.layer import layer as stages
from moe_fast.layer import over_shared_memory
from tests.common.fast import interpreted

pytestmark = interpreted


def cases() -> list[Case]:
    """The gate's whose ranks use HybridEP, once each."""
    scope = scope_of("moe_layer", Space())
    return [scope.case(of_world(world)) for world in WORLDS if world["dispatcher"] == "hybridep"]


def early(case: Case) -> bool:
    """Whether its tokens leave before the router has chosen."""
    assert isinstance(case, LayerCase)
    return len(case.counts) == 2 and bool(case.budget) and case.topk >= stages.EARLY_TOPK


def statuses(namespace: str) -> list[tuple[bool, str]]:
    with Pool(ChildOptions(namespace, "cpu")) as pool:
        pool.start()
        return sorted((early(case), outcome.status) for case, outcome in pool.run(cases()))


def sent_another(tokens: Any, **settings: Any) -> symmetric.Early:
    return start_early(tokens.roll(1, 0), **settings)._replace(tokens=tokens)


def layer_that_sends_others_early(*arguments: Any, **settings: Any) -> Any:
    with mock.patch.object(symmetric, "start_early", sent_another):
        return over_shared_memory.moe_layer(*arguments, **settings)


start_early = symmetric.start_early
read = {name: getattr(over_shared_memory, name) for name in ("new_state", "state_from", "state_tensors")}
WRONG = SimpleNamespace(moe_layer=layer_that_sends_others_early, **read)


def test_some_cases_send_tokens_early_and_others_do_not():
    assert {early(case) for case in cases()} == {False, True}


@pytest.mark.parametrize(
    "namespace, sent_early",
    [("moe_fast.layer.over_shared_memory", "PASS"), ("tests.layer.test_over_shared_memory:WRONG", "FAIL")],
)
def test_the_layer_is_accepted_and_one_that_sends_other_tokens_is_not(namespace, sent_early):
    judged = statuses(namespace)
    assert {status for is_early, status in judged if not is_early} == {"PASS"}
    assert {status for is_early, status in judged if is_early} == {sent_early}
