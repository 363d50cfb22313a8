"""Footprints of this project's kernels: whatever runs is in them, and they are found quickly."""

import os
from pathlib import Path

import pytest

import moe_fast
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.tracing import traced
from conformance.engine.choose.plan import fixed_cases
from conformance.engine.footprint.companions import companions
from conformance.engine.footprint.footprint import Footprints
from conformance.interface import Implementation, load
from tests.common.suite import EVERYTHING, gate_cases
from tests.engine.footprint.kit import footprints_in

FOLDER = os.path.dirname(str(moe_fast.__file__))
TRACED = ("gate", "jitter", "z_loss", "topk_indices", "sort_chunks", "multihot_to_indices")
BY_INTERPRETER = "<module>"  # a kernel whose source Triton's interpreter runs again
SEVERAL = {
    "unpermute": {"permute"},
    "route": {"new_state", "finish_batch", "state_tensors", "state_from"},
    "sequential_mlp": {"grouped_mlp"},
    "quantize": {"codes", "scales", "amax", "dequantize"},
}


@pytest.fixture(scope="module")
def found() -> Footprints:
    return footprints_in(Path(FOLDER).parent, "moe_fast")


def ran(cases: list[Case]) -> set[str]:
    """The functions of moe_fast that the cases run, as labels of parts."""
    implementation = load("moe_fast")
    with traced(FOLDER + os.sep) as calls:
        for case in cases:
            evaluate(case, implementation)
    pairs = [call.split(":") for call in calls]
    names = [
        (os.path.basename(FOLDER) + "." + file.removesuffix(".py").replace("/", "."), name) for file, name in pairs
    ]
    return {f"{module}:{name.partition('.<locals>')[0]}" for module, name in names if name != BY_INTERPRETER}


@pytest.mark.parametrize("function", TRACED)
def test_whatever_runs_is_in_the_footprint(function, found):
    labels = {label.partition(" for ")[0] for label in found.functions[function]}
    assert {name.replace(".__init__:", ":") for name in ran(fixed_cases(function, EVERYTHING)[:6])} <= labels


def test_every_offered_function_has_a_footprint(found):
    implementation = load("moe_fast")
    offered = {name for name in CONTRACTS if implementation.offers(name)}
    assert set(found.functions) == offered
    assert not [label for parts in found.functions.values() for label in parts if "all files" in label]


def test_a_kernel_is_in_the_footprints_of_its_functions_alone(found):
    holding = {name for name, parts in found.functions.items() if "moe_fast.router._capacity:drop_kernel" in parts}
    assert holding == {"drop_tokens", "route", "moe_layer"}


class Recording(Implementation):
    """The reference, and the functions it was asked for."""

    asked: set[str]

    def call(self, function, *args, **settings):
        self.asked.add(function)
        return super().call(function, *args, **settings)


@pytest.mark.parametrize("function", SEVERAL)
def test_the_functions_that_a_judgement_calls_are_known(function):
    recording = Recording(load("moe_ref").namespace, "moe_ref")
    recording.asked = set()
    for case in gate_cases(function, every=9, seeds=range(3, 4), draws=20):
        evaluate(case, recording)
    assert SEVERAL[function] <= recording.asked - {function} <= companions(function)
