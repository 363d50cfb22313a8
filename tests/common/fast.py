"""Helpers for tests of `moe_fast`: device reads, and errors compared with the reference's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref

READS = ("item", "tolist", "nonzero", "__int__", "__index__", "__bool__", "__float__", "cpu", "numpy")
interpreted = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list to which every later read of a tensor by the host is appended."""
    reads: list[Tensor] = []
    for name in READS:
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda self, *arguments, original=original: reads.append(self) or original(self, *arguments)
        )
    return reads


def assert_same_error(function: str, *arguments: Any, **settings: Any) -> None:
    """`moe_fast` raises the reference's ValueError, message included."""
    messages = []
    for namespace in (moe_fast, moe_ref):
        with pytest.raises(ValueError) as caught:
            getattr(namespace, function)(*arguments, **settings)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
