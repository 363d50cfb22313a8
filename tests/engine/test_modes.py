"""A call that leaves a mode of the process changed is found, and the mode is set back."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.interface import Implementation, ModeChanged
from conformance.modes import MODES, Modes

CHANGES = {
    "stack of torch function modes": lambda: TorchFunctionMode().__enter__(),
    "stack of torch dispatch modes": lambda: TorchDispatchMode().__enter__(),
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "choice of deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "treatment of subnormal numbers": lambda: torch.set_flush_denormal(True),
    "precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "working directory": lambda: os.chdir("/"),
}


def test_every_mode_is_tested():
    assert [mode.name for mode in MODES] == list(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_mode_is_named_and_set_back(name):
    modes = Modes()
    implementation = Implementation(SimpleNamespace(permute=CHANGES[name]))
    with pytest.raises(ModeChanged, match=f"returned with another {name} than before the call"):
        implementation.call("permute")
    assert modes.restore() == ""


def test_a_default_device_is_a_function_mode():
    implementation = Implementation(SimpleNamespace(permute=lambda: torch.set_default_device("meta")))
    for _ in range(2):
        with pytest.raises(ModeChanged, match="another stack of torch function modes"):
            implementation.call("permute")
        assert torch.get_default_device().type == "cpu"


def test_a_mode_is_set_back_after_an_error():
    def permute():
        torch.set_grad_enabled(False)
        raise KeyError("permute")

    with pytest.raises(KeyError):
        Implementation(SimpleNamespace(permute=permute)).call("permute")
    assert torch.is_grad_enabled()


def test_a_call_may_change_modes_for_itself():
    def permute():
        with torch.no_grad(), torch.device("meta"):
            return 3

    assert Implementation(SimpleNamespace(permute=permute)).call("permute") == 3
