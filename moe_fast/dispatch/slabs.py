"""Memory of every rank that all ranks of a group can address, and a barrier between them.

On GPUs of one NVLink host it is torch's symmetric memory. Ranks that share a GPU share memory by
CUDA IPC. On CPUs, where kernels are interpreted, it is a file that all processes map.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.dispatch import ipc
from moe_ref.config import FP8_BLOCK, require

ALIGNED = 256  # bytes; every region begins at a multiple
PROB_BYTES = 8  # bytes of the widest prob
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
BARRIER_MS = 600_000  # a GPU gives up with an error when it has waited that long, as NCCL's watchdog


@dataclass(frozen=True)
class Room:
    """The sizes for which a slab has room."""

    ranks: int
    experts: int
    rows: int
    row_bytes: int

    def regions(self) -> dict[str, int]:
        """Bytes of each region."""
        rows, probs = self.rows * self.row_bytes, self.rows * PROB_BYTES
        # quantisation makes one byte of two or more
        scales = self.rows * 4 * -(-self.row_bytes // (2 * FP8_BLOCK))
        sizes = {
            "counts": 4 * self.ranks * self.experts,
            "link": 4 * self.rows,
            "home": 8 * self.rows,
            "rows": rows,
            "probs": probs,
            "scales": scales,
        }
        return sizes | {"sums": rows, "sum_probs": probs}

    def holds(self, needed: "Room") -> bool:
        return (
            self.ranks == needed.ranks
            and self.experts >= needed.experts
            and self.rows >= needed.rows
            and self.row_bytes >= needed.row_bytes
        )

    def grown(self, needed: "Room") -> "Room":
        """Room for both. The rows at least double, so that all outgrown slabs together take no more
        memory than the last one.
        """
        rows = self.rows if self.rows >= needed.rows else max(2 * self.rows, needed.rows)
        return Room(self.ranks, max(self.experts, needed.experts), rows, max(self.row_bytes, needed.row_bytes))


@dataclass(frozen=True)
class Slab:
    """This rank's memory, where all ranks' memories are, and how to wait for them."""

    room: Room
    memory: Tensor  # uint8
    tables: dict[str, Tensor]  # by region: int64 [W], the address on each rank
    barrier: Callable[[], None]
    references: tuple[Any, ...] = field(default=(), repr=False)  # objects that must live as long as the slab
    transport: str = "mapped file"
    memories: tuple[Tensor, ...] = field(default=(), repr=False)  # the memory of each rank
    aside: Callable[[], None] | None = None  # a barrier for a second stream, which may wait at the same time

    def region(self, name: str, dtype: torch.dtype, count: int, rank: int | None = None) -> Tensor:
        """The first `count` numbers of a region of this rank, or of another rank."""
        begin, memory = offsets(self.room)[name], self.memory if rank is None else self.memories[rank]
        return memory[begin : begin + count * dtype.itemsize].view(dtype)


def offsets(room: Room) -> dict[str, int]:
    """The offset of each region in bytes, and under the name "" the end of the last one."""
    begins, end = {}, 0
    for name, size in room.regions().items():
        begins[name] = end
        end += -(-size // ALIGNED) * ALIGNED
    return begins | {"": end}


def slab_of(room: Room, memory: Tensor, addresses: list[int], barrier: Callable[[], None], *options: Any) -> Slab:
    """The slab of this rank, made of memory that is allocated and whose addresses are known.

    Args:
        addresses: where the memory of each rank begins, as this rank addresses it.
        options: the later fields of `Slab`, from `references` on.
    """
    tables = {
        name: torch.tensor([address + begin for address in addresses], device=memory.device)
        for name, begin in offsets(room).items()
        if name
    }
    return Slab(room, memory, tables, barrier, *options)


_slabs: WeakKeyDictionary[Any, Slab] = WeakKeyDictionary()
# slabs that a CUDA graph may have captured, on this rank or on another
_outgrown: WeakKeyDictionary[Any, list[Slab]] = WeakKeyDictionary()
_meetings = count()  # numbers of the meetings of this process over NVLink


def slab_for(group: Any, device: torch.device, room: Room) -> Slab:
    """The group's slab. The first call, and each call that needs more room than those before, is a
    collective of the group.

    A slab lives as long as its group, even if a larger one has replaced it, because captured graphs
    still store to it, on any rank. So make the largest call first, or use one `num_rows`; all
    smaller slabs together cost at most as much memory again. torch numbers the NVLink meetings of a
    process, whatever the group is: the ranks of a group must have met equally often.

    Raises:
        ValueError: the ranks ask for different room or have not met equally often; NVLink multicast
            is on; ranks on several hosts.
        RuntimeError: the device has no such memory.
    """
    group = dist.group.WORLD if group is None else group
    slab = _slabs.get(group)
    if slab is None or not slab.room.holds(room):
        room = room if slab is None else slab.room.grown(room)
        larger = _on_gpus(group, device, room) if device.type == "cuda" else _shared(group, room)
        if slab is not None:
            _outgrown.setdefault(group, []).append(slab)
        slab = _slabs[group] = larger
    return slab


def transport_of(group: Any) -> str:
    """The name of the way by which the ranks reach each other's memory; "" before they have met."""
    slab = _slabs.get(dist.group.WORLD if group is None else group)
    return "" if slab is None else slab.transport


def _on_gpus(group: Any, device: torch.device, room: Room) -> Slab:
    places: list[Any] = [None] * room.ranks
    dist.all_gather_object(places, ipc.place_of(device), group=group)
    hosts = sorted({location.host for location in places})
    require(len(hosts) == 1, "group", f"of ranks on {', '.join(hosts)}", "of ranks on one host, with one memory")
    # torch refuses symmetric memory to ranks that share a device
    return (_nvlink if len(set(places)) == room.ranks else _by_handles)(group, device, room)


def _nvlink(group: Any, device: torch.device, room: Room) -> Slab:
    import torch.distributed._symmetric_memory as symmetric

    require(
        os.environ.get(MULTICAST) == "1",
        MULTICAST,
        repr(os.environ.get(MULTICAST)),
        "1, set before torch is imported: multicast is not used",
    )
    answers: list[Any] = [None] * room.ranks
    dist.all_gather_object(answers, (room, next(_meetings)), group=group)  # without it, torch would wait for ever
    _check_room([rank_room for rank_room, _ in answers])
    for rank, (_, meeting) in enumerate(answers):
        require(
            meeting == answers[0][1],
            "group",
            f"whose rank {rank} has met others {meeting} times",
            f"{answers[0][1]} times, as rank 0",
        )
    size = offsets(room)[""]
    # announce_kernel writes counts, links are zeroed, and kernels that push or sum write the rest
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    require(not handle.multicast_ptr, "group", "with a multicast pointer", f"without: {MULTICAST} was set too late")
    memories = tuple(handle.get_remote_tensor(rank, (size,), torch.uint8) for rank in range(room.ranks))
    barrier, aside = (partial(handle.barrier, channel=channel, timeout_ms=BARRIER_MS) for channel in (0, 1))
    slab = slab_of(room, memory, [x.data_ptr() for x in memories], barrier, (handle,), "symmetric memory")
    return replace(slab, memories=memories, aside=aside)


def _by_handles(group: Any, device: torch.device, room: Room) -> Slab:
    rank, flags = dist.get_rank(group), offsets(room)[""]
    memory = torch.empty(flags + 4 * room.ranks, dtype=torch.uint8, device=device)  # written as in `_nvlink`
    memory[flags:] = 0
    answers: list[Any] = [None] * room.ranks
    dist.all_gather_object(answers, (room, ipc.offer_of(memory)), group=group)
    _check_room([rank_room for rank_room, _ in answers])
    mapped = [memory if peer == rank else ipc.opened(offer, device) for peer, (_, offer) in enumerate(answers)]
    addresses = [mapping.data_ptr() for mapping in mapped]
    table = torch.tensor([address + flags for address in addresses], device=device)
    barrier = partial(ipc.wait_for_all, table, rank, BARRIER_MS)
    return slab_of(room, memory, addresses, barrier, (), "cuda ipc", tuple(mapped))


def _check_room(rooms: list[Room]) -> None:
    for rank, room in enumerate(rooms):
        require(room == rooms[0], "room", f"{room} on rank {rank}", f"{rooms[0]}, as on rank 0")


def _shared(group: Any, room: Room) -> Slab:
    rank, size = dist.get_rank(group), max(offsets(room)[""], 1)
    names: list[Any] = [None] * room.ranks
    with tempfile.NamedTemporaryFile(prefix="moe-fast-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.truncate(size)
        dist.all_gather_object(names, file.name, group=group)
        mapped = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
        dist.barrier(group)  # when all have mapped the file, its name is not needed
    living = ref(group)  # the slab must not keep its own group
    memory, addresses = mapped[rank], [x.data_ptr() for x in mapped]
    return slab_of(room, memory, addresses, lambda: dist.barrier(living()), (), "mapped file", tuple(mapped))
