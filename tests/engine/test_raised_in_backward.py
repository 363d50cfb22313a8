"""What a backward raises is no error of the harness, also below torch's checkpoint."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

from conformance.engine.child import evaluate


class ReadsTwice(torch.autograd.Function):
    """Its backward unpacks what it saved twice, which a checkpoint refuses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * d_out * (ctx.saved_tensors[0] == ctx.saved_tensors[0])


def raised(call: Any) -> BaseException:
    with pytest.raises((CheckpointError, ValueError)) as caught:
        call()
    return caught.value


def test_an_error_of_a_backward_is_the_implementations():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(ReadsTwice.apply, x, use_reentrant=False)
    assert not evaluate._of_the_harness(raised(out.sum().backward))


def test_an_error_of_the_suite_is_its_own():
    def law() -> None:
        raise ValueError("a law that is wrong")

    assert evaluate._of_the_harness(raised(law))
