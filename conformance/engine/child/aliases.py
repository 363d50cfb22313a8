"""Results that lie in the caller's memory, or in that of another result: they change with it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def alias(outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first output of numbers in an input's memory, and what is wrong; None: there is none.
    Indices that were given may be returned.
    """
    owners = {address: name for name, x in inputs.items() if (address := _address(x))}
    owners_of_outputs = (
        (name, owners.get(_address(x))) for name, x in outputs.items() if _is_plain(x) and x.is_floating_point()
    )
    descriptions = (
        (name, f"lies in the memory of its input {owner}, which is the caller's")
        for name, owner in owners_of_outputs
        if owner
    )
    return next(descriptions, None)


def shared_elements(returned: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first tensor that a call returned with an element in the place of another's, and what is
    wrong; None: there is none. Gradients, which autograd shares, may.
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
    """Whether an element of both has the same address."""
    return bool(torch.isin(_addresses(x), _addresses(y)).any())


def _addresses(x: Tensor) -> Tensor:
    """The addresses of the elements."""
    places = torch.zeros((), dtype=torch.int64)
    for length, stride in zip(x.shape, x.stride(), strict=True):
        places = places[..., None] + torch.arange(length) * stride
    return places.flatten() * x.element_size() + x.data_ptr()


def _is_plain(x: Any) -> bool:
    """What answers as torch's tensors do: others are judged when they are read."""
    return type(x) in (Tensor, Parameter) and x.layout == torch.strided and not x.is_nested


def _address(x: Tensor) -> int:
    """Of the memory; 0 for none, and for tensors without a storage."""
    try:
        return x.untyped_storage().data_ptr() if x.numel() else 0
    except NotImplementedError:
        return 0
