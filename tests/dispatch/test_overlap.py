"""Overlapped work gives the same as alone; `benchmarks/dispatch.py` checks and times it on GPUs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fast.dispatch import overlap
from moe_fast.dispatch.overlap import beside


def test_both_results_and_both_gradients_come_back():
    x = torch.arange(4.0, requires_grad=True)
    local, exchanged = beside(partial(torch.mul, x, 2), lambda: (x * 3, None), x.device)
    assert torch.equal(local, x.detach() * 2) and torch.equal(exchanged[0], x.detach() * 3)
    (local.sum() + exchanged[0].sum()).backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))


def test_local_work_is_launched_before_the_exchange():
    order = []
    beside(lambda: order.append("local"), lambda: order.append("exchange"), torch.device("cpu"))
    assert order == ["local", "exchange"]


class Streams:
    """torch.cuda, as far as it orders the work of two streams; what runs on the side is marked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.where = "main"

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda stream: self.asked.append("main waits"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.where = "side"
        yield
        self.where = "main"

    def work(self, name: str) -> Callable[[], None]:
        return lambda: self.asked.append(f"{name} on {self.where}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(overlap.torch, "cuda", streams)
    side = SimpleNamespace(wait_stream=lambda main: streams.asked.append("side waits"))
    monkeypatch.setattr(overlap, "side_stream", lambda device: side)
    return streams


CUDA = torch.device("cuda")


def test_on_a_gpu_the_side_waits_for_what_was_before_and_later_work_for_both(gpu):
    beside(gpu.work("local"), gpu.work("exchange"), CUDA)
    assert gpu.asked == ["side waits", "local on side", "exchange on main", "main waits"]


def test_work_in_a_backward_is_waited_for_by_the_next_step_alone(gpu, monkeypatch):
    launched_beside = overlap.launched_beside
    monkeypatch.setattr(overlap, "launched_beside", lambda local, device: launched_beside(local, CUDA))
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: gpu.asked.append("exchange on main"))
    overlap.in_backward(y, gpu.work("gradients")).sum().backward()
    overlap.wait_for([], CUDA)
    assert gpu.asked == ["side waits", "gradients on side", "exchange on main", "main waits"]
    assert torch.equal(x.grad, torch.ones(2))
