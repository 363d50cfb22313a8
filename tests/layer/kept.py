"""What a forward keeps for its backward, in bytes: by the graph's hooks, and by what stays alive.

Hooks see what the graph saves, unless hooks of the layer itself stand before them. Storages that
are alive are seen whatever holds them: an attribute of a node, a closure, a hook.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(run: Callable[[], Any], given: Iterable[Tensor]) -> int:
    """Of distinct storages that the graph of run() saves besides the given tensors'."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[_place(x)] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert out.requires_grad
    known = {_place(x) for x in given}
    return sum(size for place, size in sizes.items() if place not in known)


class _Made(TorchDispatchMode):
    """Every storage that an operation returned, in weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out


def alive_bytes(run: Callable[[], Any], given: Iterable[Tensor], afterwards: Callable[[], Any]) -> int:
    """Of storages made by run() and alive with its result, besides the given tensors' and its own.

    `afterwards` launches another kernel: the interpreter holds the arguments of its last one, and
    circles of its own of the others.
    """
    with _Made() as made:
        out = run()
    afterwards()
    gc.collect()
    known = {x.untyped_storage()._cdata for x in (*given, out)}
    alive = {place: size for place, (storage, size) in made.storages.items() if not storage.expired()}
    return sum(size for place, size in alive.items() if place not in known)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
