"""Overlapped work gives the same as alone; `benchmarks/dispatch.py` checks and times it on GPUs."""

from functools import partial

import torch

from moe_fast.dispatch.overlap import beside


def test_both_results_and_both_gradients_come_back():
    x = torch.arange(4.0, requires_grad=True)
    local, exchanged = beside(partial(torch.mul, x, 2), lambda: (x * 3, None), x.device)
    assert torch.equal(local, x.detach() * 2) and torch.equal(exchanged[0], x.detach() * 3)
    (local.sum() + exchanged[0].sum()).backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))


def test_what_is_local_is_launched_first():
    order = []
    beside(lambda: order.append("local"), lambda: order.append("exchange"), torch.device("cpu"))
    assert order == ["local", "exchange"]
