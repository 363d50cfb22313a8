"""Products traced as `torch.compile` does for an H200, without one, in a process that compiles."""

import itertools
import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode

from evidence.machine_code import calls
from evidence.machine_code.launches import as_on_an_h200

EVERY = 5  # of the calls


def without_memory(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """A tensor of the running FakeTensorMode; the autograd of a CPU runs without a GPU."""
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def errors_of_products() -> tuple[int, list[str]]:
    """(calls, what those say that raise), but for widths that a recipe refuses."""
    count, errors = 0, []
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("moe_fast.")]
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "check_device"):
                stack.enter_context(patch.object(module, "check_device"))
        stack.enter_context(patch.object(calls, "meta", without_memory))
        # as a graph has them: asked for an address, they raise
        stack.enter_context(config.patch(fake_tensor_allow_unsafe_data_ptr_access=False))
        stack.enter_context(as_on_an_h200(lambda **_: True))
        stack.enter_context(FakeTensorMode())
        for text, call in itertools.islice(itertools.chain(calls.products(), calls.layers()), 0, None, EVERY):
            count += 1
            try:
                call()
            except Exception as error:
                if "it must be of a multiple" not in str(error):
                    errors.append(f"{text}: {error}")
    return count, errors
