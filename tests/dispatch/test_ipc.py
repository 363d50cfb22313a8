"""Ranks that share a GPU address each other's memory by CUDA IPC, whose calls are played here."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.dispatch import ipc, slabs
from moe_fast.dispatch.ipc import Offer, Place, offer_of, opened, place_of, wait_for_all
from moe_fast.dispatch.slabs import BARRIER_MS, Room
from moe_fast.launch.backend import INTERPRETED

CPU, DEVICE = torch.device("cpu"), "cpu" if INTERPRETED else "cuda"
ROOM = Room(2, 2, 4, 8)


# ---- the barrier


def flags_of(ranks: int) -> tuple[Tensor, Tensor]:
    """[W,W], by rank and the peer that raises them, and the table of each rank's."""
    flags = torch.zeros((ranks, ranks), dtype=torch.int32, device=DEVICE)
    return flags, torch.tensor([row.data_ptr() for row in flags], device=DEVICE)


def test_a_rank_raises_its_flag_on_every_peer_and_takes_down_those_raised_here():
    flags, table = flags_of(3)
    flags[1, [0, 2]] = 1  # ranks 0 and 2 are there
    wait_for_all(table, 1, BARRIER_MS)
    assert flags.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def test_a_rank_alone_passes_again_and_again():
    flags, table = flags_of(1)
    for _ in range(3):
        wait_for_all(table, 0, BARRIER_MS)
    assert flags.tolist() == [[0]]


# ---- memory, with CUDA's part of it played


class Gpus:
    """GPUs of one host as processes see them; memory of all processes is this one's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *uuids: str, near: bool = True) -> None:
        self.shared: list[Tensor] = []
        self.opened_by: list[int] = []
        self.waits = 0
        properties = lambda index: SimpleNamespace(uuid=uuids[index or 0])  # noqa: E731
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, home: near)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", self.share)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", self.open)

    def wait(self, device: torch.device) -> None:
        self.waits += 1

    def share(self, *_: Any) -> tuple[Any, ...]:
        assert self.waits  # a peer may write at once
        return (0, "handle")

    def open(self, device: int, handle: str) -> torch.UntypedStorage:
        assert handle == "handle"
        self.opened_by.append(device)
        self.shared.append(torch.zeros(512, dtype=torch.uint8))
        return self.shared[-1].untyped_storage()


def test_an_offer_names_the_gpu_and_the_bytes_and_opens_as_the_same_bytes(monkeypatch):
    gpus = Gpus(monkeypatch, "GPU-a")
    memory = torch.zeros(512, dtype=torch.uint8)
    offer = offer_of(memory[256:300])
    assert offer == Offer("GPU-a", ("handle",), 256, 44)
    there = opened(offer, torch.device("cuda", 0))
    there.fill_(7)
    assert gpus.shared[0].nonzero().flatten().tolist() == list(range(256, 300))


def test_a_gpu_is_found_by_its_uuid_and_one_that_is_not_visible_is_refused(monkeypatch):
    Gpus(monkeypatch, "GPU-b", "GPU-a")
    assert place_of(torch.device("cuda", 1)) == Place(socket.gethostname(), "GPU-a")
    with pytest.raises(ValueError, match=r"group is with a rank on GPU GPU-c; it must be of ranks on .*visible here"):
        opened(Offer("GPU-c", ("handle",), 0, 1), torch.device("cuda", 0))


def test_memory_of_another_gpu_is_opened_by_the_device_that_uses_it(monkeypatch):
    gpus = Gpus(monkeypatch, "GPU-a", "GPU-b")
    opened(Offer("GPU-a", ("handle",), 0, 1), torch.device("cuda", 1))
    assert gpus.opened_by == [1]


def test_a_gpu_that_cannot_be_addressed_is_refused(monkeypatch):
    Gpus(monkeypatch, "GPU-a", "GPU-b", near=False)
    with pytest.raises(ValueError, match="group is with a rank on GPU 1; it must be of ranks on GPUs that cuda:0 can"):
        opened(Offer("GPU-b", ("handle",), 0, 1), torch.device("cuda", 0))


# ---- the choice of a slab


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def answered(monkeypatch: pytest.MonkeyPatch, *by_other: Any) -> None:
    """Gathers of two ranks, in which the other rank answers so, or, if None, as this one does."""
    answers = iter(by_other)

    def gather(out: list[Any], value: Any, group: Any) -> None:
        answer = next(answers)
        out[:] = [value, value if answer is None else answer]

    monkeypatch.setattr(dist, "all_gather_object", gather)


@pytest.mark.parametrize(
    ("peer", "chosen"), [(Place("a", "GPU-b"), "symmetric memory"), (Place("a", "GPU-a"), "cuda ipc")]
)
def test_ranks_with_own_gpus_get_symmetric_memory_and_others_cuda_ipc(peer, chosen, group, monkeypatch):
    monkeypatch.setattr(ipc, "place_of", lambda device: Place("a", "GPU-a"))
    monkeypatch.setattr(slabs, "_nvlink", lambda *_: "symmetric memory")
    monkeypatch.setattr(slabs, "_by_handles", lambda *_: "cuda ipc")
    answered(monkeypatch, peer)
    assert slabs._on_gpus(group, CPU, ROOM) == chosen


def test_ranks_on_several_hosts_are_refused_with_a_sentence(group, monkeypatch):
    monkeypatch.setattr(ipc, "place_of", lambda device: Place("a", "GPU-a"))
    answered(monkeypatch, Place("b", "GPU-b"))
    with pytest.raises(ValueError, match="group is of ranks on a, b; it must be of ranks on one host"):
        slabs._on_gpus(group, CPU, ROOM)


def test_a_slab_over_ipc_has_all_ranks_regions_and_flags_that_are_down(group, monkeypatch):
    peer, waited = torch.zeros(10_000, dtype=torch.uint8), []
    monkeypatch.setattr(ipc, "offer_of", lambda memory: "offer")
    monkeypatch.setattr(ipc, "opened", lambda offer, device: peer)
    monkeypatch.setattr(ipc, "wait_for_all", lambda *arguments: waited.append(arguments))
    answered(monkeypatch, None)
    slab = slabs._by_handles(group, CPU, ROOM)
    flags = slabs.offsets(ROOM)[""]
    assert slab.transport == "cuda ipc"
    assert slab.tables["link"].tolist() == [x.data_ptr() + slabs.offsets(ROOM)["link"] for x in (slab.memory, peer)]
    assert slab.memory[flags:].tolist() == [0] * 8
    slab.barrier()
    ((table, rank, limit),) = waited
    assert (table.tolist(), rank, limit) == ([x.data_ptr() + flags for x in (slab.memory, peer)], 0, BARRIER_MS)
    assert slab.memories[1] is peer


def test_other_room_on_another_rank_is_refused(group, monkeypatch):
    monkeypatch.setattr(ipc, "offer_of", lambda memory: "offer")
    answered(monkeypatch, (Room(2, 2, 5, 8), "offer"))
    with pytest.raises(ValueError, match=r"room is Room\(.*rows=5.* on rank 1; it must be .*as on rank 0"):
        slabs._by_handles(group, CPU, ROOM)
