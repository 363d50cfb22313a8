"""Finds results in the memory of an input or of another result, with which they would change."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def alias(outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first floating-point output that lies in the memory of an input, and what is wrong with
    it; None if there is none. A function may return the indices that it was given.
    """
    owners = {address: name for name, x in inputs.items() if (address := _address(x))}
    for name, x in outputs.items():
        if _is_plain(x) and x.is_floating_point() and (owner := owners.get(_address(x))):
            return name, f"lies in the memory of its input {owner}, which is the caller's"
    return None


def shared_elements(returned: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first tensor returned by a call that has an element at the address of another result's
    element, and what is wrong with it; None if there is none. Gradients may share memory, because
    autograd shares them.
    """
    results = {name: x for name, x in returned.items() if _is_plain(x) and x.numel() and not name.startswith("d_")}
    for i, (name, x) in enumerate(results.items()):
        if any(stride == 0 and length > 1 for length, stride in zip(x.shape, x.stride(), strict=True)):
            return name, "has several elements in one place: it is expanded"
        for earlier_name in list(results)[:i]:
            if _address(results[earlier_name]) == _address(x) and _overlap(x, results[earlier_name]):
                return name, f"lies in the memory of {earlier_name}, another result"
    return None


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether some element of one tensor has the same address as some element of the other."""
    return bool(torch.isin(_addresses(x), _addresses(y)).any())


def _addresses(x: Tensor) -> Tensor:
    """The addresses of the elements."""
    places = torch.zeros((), dtype=torch.int64)
    for length, stride in zip(x.shape, x.stride(), strict=True):
        places = places[..., None] + torch.arange(length) * stride
    return places.flatten() * x.element_size() + x.data_ptr()


def _is_plain(x: Any) -> bool:
    """Whether the object answers as torch's tensors do.

    Other objects are judged when they are read.
    """
    return type(x) in (Tensor, Parameter) and x.layout == torch.strided and not x.is_nested


def _address(x: Tensor) -> int:
    """The address of the tensor's memory; 0 if it has none, and for tensors without a storage."""
    try:
        return x.untyped_storage().data_ptr() if x.numel() else 0
    except NotImplementedError:
        return 0
