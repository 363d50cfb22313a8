"""A router asked for float32 has float32, whatever autocast is around it."""

import pytest
import torch

import moe_fast
import moe_ref


@pytest.mark.parametrize("package", [moe_ref, moe_fast])
def test_logits_in_float32_are_the_same_under_autocast(package):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 65, generator=generator).bfloat16().requires_grad_() for size in (9, 7))
    expected = package.gate(x, weight, router_dtype="fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = package.gate(x, weight, router_dtype="fp32")
        rounded = x.float() @ weight.float().T
    assert autocast.dtype == torch.float32 and torch.equal(expected, autocast)
    assert not torch.equal(rounded.float(), autocast)
    gradients = [torch.autograd.grad(out.sum(), (x, weight)) for out in (expected, autocast)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
