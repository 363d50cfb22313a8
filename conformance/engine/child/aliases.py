"""Results that lie in the caller's memory: they change when the caller overwrites its inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def alias(outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first output of numbers, and the input whose memory it has; None: there is none. Indices
    that were given may be returned.
    """
    owners = {address: name for name, x in inputs.items() if (address := _address(x))}
    found = ((name, owners.get(_address(x))) for name, x in outputs.items() if _is_plain(x) and x.is_floating_point())
    return next(((name, owner) for name, owner in found if owner), None)


def _is_plain(x: Any) -> bool:
    """What answers as torch's tensors do: others are judged when they are read."""
    return type(x) in (Tensor, Parameter) and x.layout == torch.strided


def _address(x: Tensor) -> int:
    """Of the memory; 0 for none, and for tensors without a storage."""
    try:
        return x.untyped_storage().data_ptr() if x.numel() else 0
    except NotImplementedError:
        return 0
