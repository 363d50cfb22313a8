"""Measures the bytes that a call keeps for its backward pass, which stay with its results."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Made(TorchDispatchMode):
    """Every storage that an operation returned, in weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for storage in _storages(out):
            reference = StorageWeakRef(storage)
            self.storages[reference.cdata] = (reference, storage.nbytes())
        return out


def alive_bytes(run: Callable[[], Any], inputs: Iterable[Tensor], afterwards: Callable[[], Any]) -> int:
    """The bytes of storages that run() has allocated and that stay alive with its results, without
    the storages of the given tensors and of the results. `afterwards` launches other kernels,
    because Triton's interpreter keeps the arguments of the last launch alive, and reference cycles
    keep those of the others.
    """
    with _Made() as allocations:
        out = run()
    afterwards()
    gc.collect()
    known_storages = {StorageWeakRef(storage).cdata for storage in _storages((*inputs, out))}
    alive = {address: size for address, (storage, size) in allocations.storages.items() if not storage.expired()}
    return sum(size for address, size in alive.items() if address not in known_storages)


def allocated_bytes(run: Callable[[], Any], inputs: Iterable[Tensor]) -> int:
    """The same on a GPU, by torch's allocator: each storage takes a multiple of 512 bytes."""
    known_storages = {StorageWeakRef(storage).cdata for storage in _storages([*inputs])}
    gc.collect()
    torch.cuda.synchronize()
    bytes_before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    gc.collect()
    sizes = {StorageWeakRef(storage).cdata: storage.nbytes() for storage in _storages(out)}
    of_results = sum(-(-size // 512) * 512 for address, size in sizes.items() if address not in known_storages)
    return torch.cuda.memory_allocated() - bytes_before - of_results


def _storages(tree: Any) -> list[Any]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
