"""Reads tensors that a call returned or was given, even if the call left them in an odd state."""

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.judge.exact import bits
from conformance.texts import described


class Unreadable(Exception):
    """A returned tensor is no plain tensor; the message says what it is."""


def read(x: Tensor, device: str, negated: bool = False) -> Tensor:
    """The values of a tensor returned by a call on this device, on the host.

    Args:
        negated: an input was, so that the tensor may be.

    Raises:
        Unreadable: it is no plain tensor, or on another device.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            x = x.resolve_neg() if negated else x
            odd = _kind(x) or _place(x, device)
        if not odd:
            host = x.detach().cpu()
            with torch._C.DisableTorchFunctionSubclass():
                host = host if type(host) is Tensor else host.as_subclass(Tensor)
            bits(host)
            return host
    except Exception as error:
        raise Unreadable(f"is a {type(x).__name__} that cannot be read: {described(error)}") from error
    raise Unreadable(f"{odd}; it must be a plain tensor on the inputs' device")


def is_freed(x: Tensor) -> bool:
    """Whether the storage is smaller than the tensor, as after `untyped_storage().resize_(0)`."""
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    elements = x.storage_offset() + last + 1
    return x.numel() > 0 and elements * x.element_size() > x.untyped_storage().nbytes()


def first_changed(masters: Mapping[str, Tensor], placed: Mapping[str, Tensor]) -> str:
    """The name of the first input or cotangent that a call has changed; empty: none."""
    return next((name for name, x in masters.items() if is_changed(placed[name], x)), "")


def is_changed(x: Tensor, master: Tensor) -> bool:
    """Whether a call has changed its input: values, or shape, dtype and storage in place."""
    x = x.detach()
    if x.shape != master.shape or x.dtype != master.dtype or is_freed(x):
        return True
    host = x.cpu().resolve_neg()
    differs = bits(master) != bits(host)
    if x.is_neg():  # torch's minus keeps a NaN, but changes its bits
        differs &= ~(master.isnan() & host.isnan()).numpy()
    return bool(differs.any())


def _kind(x: Tensor) -> str:
    if x.is_nested:
        return "is a nested tensor"
    if x.layout != torch.strided:
        return f"has the layout {x.layout}"
    if x.is_quantized:
        return f"is a quantised tensor of {x.dtype}"
    if x.is_complex():
        return f"has dtype {x.dtype}"
    if x.is_neg() or x.is_conj():
        return "is a lazily negated view"
    return ""


def _place(x: Tensor, device: str) -> str:
    """What is wrong with the device of a tensor.

    Integers may be on the host, where counts are read.
    """
    host_allowed = not x.is_floating_point()
    if x.device.type != device and not (host_allowed and x.device.type == "cpu"):
        return f"is on {x.device.type}, the inputs are on {device}"
    return "has a storage smaller than itself, as if it were freed" if is_freed(x) else ""
