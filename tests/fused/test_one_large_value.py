"""Activations with one largest value, which stands in each part of a kernel's loop in turn."""

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from moe_fast.launch.tuning import GPU, INTERPRETER
from tests.common.suite import outcome_of, wrapped

FUNCTIONS = ("glu_and_quantize", "activation_and_quantize")


def peaks(function, device):
    return [case for case in scope_of(function, Space(device=device)).always() if case.values == "peak"]


def place_of_the_largest(case):
    """Of the activation, by feature."""
    h = CONTRACTS[case.function].problem(case).required["h"]
    act = moe_ref.glu(h) if case.function.startswith("glu") else moe_ref.activation(h)
    (position,) = (act.abs() == act.abs().max()).nonzero().tolist()
    assert position[0] == case.tokens - 1
    return position[1]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("device", "sizes"), [("cpu", INTERPRETER), ("cuda", GPU)])
def test_the_largest_value_stands_in_several_steps_and_programs(function, device, sizes):
    cases, walk = peaks(function, device), sizes.activate_quantize.groups
    places = [place_of_the_largest(case) for case in cases]
    assert places[0] == 0 and places[-1] == cases[-1].width - 1
    assert len({column // walk.columns for column in places}) > 2
    assert len({column // (walk.columns * walk.steps) for column in places}) == 2


def first_steps_alone(columns):
    """An amax of the first columns: what is larger behind them is cut to it, as codes are."""

    def cut(function, h, *arguments, **settings):
        act = moe_ref.glu(h) if function.__name__.startswith("glu") else moe_ref.activation(h)
        if act.shape[1] > columns and act[:, :columns].abs().max() < act.abs().max():
            h = torch.where(h == 4, h / 2, h)
        return function(h, *arguments, **settings)

    return cut


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_kernel_that_looks_at_its_first_columns_alone_is_wrong(function):
    cases = [case.changed(law="", grads="") for case in peaks(function, "cpu")]
    assert {outcome_of(case, moe_ref).status for case in cases} == {"PASS"}
    implementation = wrapped(function, first_steps_alone(256))
    statuses = [outcome_of(case, implementation).status for case in cases]
    assert statuses == ["PASS", "PASS", "FAIL", "FAIL"]
