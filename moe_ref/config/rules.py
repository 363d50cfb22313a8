"""The parts of every rule. A rule raises a `ValueError` with the argument, its value and the right
values.
"""

import math

import torch
from torch import Tensor

MAX_EXPERTS = 32767  # an expert id fits in 16 bits, the width that fused routing metadata may store it in


def require(condition: bool, argument: str, value: object, requirement: str) -> None:
    """Raise `ValueError` with `argument`, its `value` and the `requirement`, unless `condition`
    holds.
    """
    if not condition:
        raise ValueError(f"{argument} is {value}; it must be {requirement}")


def is_count(value: object) -> bool:
    """True for a plain integer, or a compiled graph's; False for a bool, a float or a tensor, which
    would be read back from the device.
    """
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for a finite number, plain or a compiled graph's; False for a bool or a tensor."""
    return is_count(value) or (isinstance(value, float | torch.SymFloat) and math.isfinite(value))


def check_float(argument: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """`x` is floating point, of the given shape, on the device of `like`."""
    require(tuple(x.shape) == shape, argument, f"of shape {tuple(x.shape)}", f"of shape {shape}")
    require(x.is_floating_point(), argument, f"of dtype {x.dtype}", "floating point")
    require(x.device == like.device, argument, f"on {x.device}", f"on {like.device}")


def check_probs(probs: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """`probs` is floating point, of the given shape, on the device of `like`."""
    check_float("probs", probs, shape, like)
