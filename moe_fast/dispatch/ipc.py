"""Memory of other processes of the same host, by CUDA IPC: for ranks that share a GPU, where torch
has no symmetric memory.
"""

import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.dispatch import _ipc as kernels
from moe_fast.launch.backend import INTERPRETED, launch_on
from moe_fast.launch.torch_parts import opened_storage, shared_storage
from moe_ref.config import require


class Place(NamedTuple):
    """The host and the GPU of a rank."""

    host: str
    gpu: str  # its UUID: processes may number their GPUs differently


class Offer(NamedTuple):
    """What another process needs to address a tensor of bytes."""

    gpu: str
    storage: tuple[Any, ...]  # as torch describes it
    begin: int  # offset of the tensor in its storage
    size: int


def place_of(device: torch.device) -> Place:
    return Place(socket.gethostname(), _uuid(device.index))


def offer_of(memory: Tensor) -> Offer:
    """The offer of this process's memory. The process must keep the memory; the call waits for the
    device.
    """
    torch.cuda.synchronize(memory.device)  # what was written here comes before what others write
    storage = shared_storage(memory)
    return Offer(_uuid(memory.device.index), storage, int(memory.storage_offset()), len(memory))


def opened(offer: Offer, device: torch.device) -> Tensor:
    """The memory that another process of this host has offered, for kernels on `device`.

    Raises:
        ValueError: its GPU is not visible here, or the device cannot address it.
    """
    visible = [_uuid(index) for index in range(torch.cuda.device_count())]
    require(offer.gpu in visible, "group", f"with a rank on GPU {offer.gpu}", f"of ranks on {visible}, visible here")
    home = visible.index(offer.gpu)
    near = home == device.index or torch.cuda.can_device_access_peer(device.index, home)
    require(near, "group", f"with a rank on GPU {home}", f"of ranks on GPUs that {device} can address")
    # opened by the device that will use it, wherever it lies: this maps it for that device
    storage = opened_storage(device, offer.storage)
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, offer.begin, (offer.size,), (1,))


def wait_for_all(flags_table: Tensor, rank: int, limit_ms: int) -> None:
    """A barrier on the device over the flags of all ranks, whose addresses are in the table."""
    limit = None if INTERPRETED else limit_ms * 1_000_000
    with launch_on(flags_table):
        kernels.handshake_kernel[(1,)](flags_table, rank, len(flags_table), LIMIT_NS=limit, num_warps=1)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
