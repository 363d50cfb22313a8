"""What a forward keeps for its backward, in bytes: by the graph's hooks, and by what stays alive.

Hooks see what the graph saves, unless hooks of the layer itself stand before them. Storages that
are alive are seen whatever holds them: an attribute of a node, a closure, a hook.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from conformance.engine.child.saved_memory import alive_bytes as alive_bytes


def saved_bytes(run: Callable[[], Any], inputs: Iterable[Tensor]) -> int:
    """Of distinct storages that the graph of run() saves besides the given tensors'."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[_place(x)] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert out.requires_grad
    storages = {_place(x) for x in inputs}
    return sum(size for storage, size in sizes.items() if storage not in storages)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
