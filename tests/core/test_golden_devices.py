"""Hand-computed calls take their tensors from the case, so that a GPU judges them on the GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Problem

CALLS = [
    pytest.param(problem, id=f"{function}-{name}")
    for function, contract in CONTRACTS.items()
    for name, (problem, _) in contract.golden.items()
    if problem.script and not problem.produced
]


class Called(Exception):
    """Ends a script at its first call."""


class Recorder:
    """An implementation that keeps the devices of its first call's tensors."""

    devices: frozenset[str] = frozenset()

    def call(self, function: str, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.devices = frozenset(x.device.type for x in tensors)
        raise Called


def devices(problem: Problem) -> frozenset[str]:
    """Devices of the tensors that the script passes on, when all that it is given is on `meta`."""
    assert problem.script
    recorder = Recorder()
    arguments = {**problem.required, **problem.settings}
    on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(Called):
        problem.script(recorder, on_meta)
    return recorder.devices


@pytest.mark.parametrize("problem", CALLS)
def test_arguments_are_where_the_inputs_are(problem: Problem) -> None:
    assert devices(problem) <= {"meta"}


def test_a_tensor_of_the_script_itself_is_found() -> None:
    problem = Problem(
        "permute",
        {"x": torch.ones(1)},
        script=lambda impl, arguments: impl.call("permute", [arguments["x"], torch.ones(1)]),
    )
    assert devices(problem) == {"meta", "cpu"}
