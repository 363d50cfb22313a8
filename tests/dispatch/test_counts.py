"""The host's copy of the counts of a dispatch: the host waits when it first reads the copy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fast.dispatch import counts, overlap
from moe_fast.dispatch.counts import CountsOnHost


def test_the_pair_is_of_the_call_and_the_device_s_counts_are_themselves():
    device = torch.tensor([2, 0, 3])
    pair = CountsOnHost(device)
    device += 1
    assert pair.host.tolist() == [2, 0, 3] and pair.device is device


class Gpu:
    """What a GPU would be asked, in order, by counts that say they are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        event = SimpleNamespace(synchronize=lambda: self.asked.append("host waits"))
        stream = SimpleNamespace(
            wait_stream=lambda main: self.asked.append("side waits"),
            record_event=lambda: self.asked.append("event") or event,
        )
        monkeypatch.setattr(overlap.torch.cuda, "current_stream", lambda device: "main")
        monkeypatch.setattr(overlap.torch.cuda, "stream", lambda side: self)
        monkeypatch.setattr(counts, "side_stream", lambda device: stream)
        monkeypatch.setattr(counts.torch, "empty", self.pinned)

    def pinned(self, shape: Any, dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory
        return SimpleNamespace(copy_=lambda x, non_blocking: self.asked.append(f"copy, {non_blocking=}"))

    def __enter__(self) -> None:
        self.asked.append("on the side")

    def __exit__(self, *_: Any) -> None:
        self.asked.append("on the main")

    def counts(self) -> Any:
        record_stream = lambda stream: self.asked.append("memory kept")  # noqa: E731
        then = SimpleNamespace(record_stream=record_stream)
        counts_view = SimpleNamespace(clone=lambda: self.asked.append("kept apart") or then)
        return SimpleNamespace(device=torch.device("cuda"), shape=(3,), dtype=torch.int64, detach=lambda: counts_view)


COPIED = ["kept apart", "side waits", "on the side", "copy, non_blocking=True", "event", "on the main", "memory kept"]


def test_a_gpu_copies_on_a_stream_of_its_own_and_the_host_waits_at_the_first_read_alone(monkeypatch):
    gpu = Gpu(monkeypatch)
    pair = CountsOnHost(gpu.counts())
    assert gpu.asked == COPIED
    for _ in range(2):
        assert pair.host is not None
    assert gpu.asked == [*COPIED, "host waits"]


def test_a_pair_that_is_read_at_once_is_seen_to_wait(monkeypatch):
    """The twin."""
    gpu = Gpu(monkeypatch)
    CountsOnHost(gpu.counts()).host  # noqa: B018
    assert gpu.asked != COPIED
