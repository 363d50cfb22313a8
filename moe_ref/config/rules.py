"""The parts of every rule. A rule raises a `ValueError` with the argument, its value and the right
values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_EXPERTS = 32767  # an expert id fits in 16 bits, the width that fused routing metadata may store it in


def require(condition: bool, argument: str, value: object, requirement: str) -> None:
    """Raise `ValueError` with `argument`, its `value` and the `requirement`, unless `condition`
    holds.
    """
    if not condition:
        raise ValueError(f"{argument} is {value}; it must be {requirement}")


def require_shape(condition: bool, argument: str, x: Tensor, requirement: str) -> None:
    """`require`, with the shape of `x` as the value."""
    require(condition, argument, f"of shape {tuple(x.shape)}", requirement)


def require_dtype(condition: bool, argument: str, x: Tensor, requirement: str) -> None:
    """`require`, with the dtype of `x` as the value."""
    require(condition, argument, f"of dtype {x.dtype}", requirement)


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of the choices."""
    require(value in choices, argument, repr(value), f"one of {', '.join(choices)}")


def check_count(argument: str, value: object) -> None:
    """`value` is a positive integer."""
    require(is_positive(value), argument, value, "a positive integer")


def check_optional_count(argument: str, value: object) -> None:
    """`value` is None or a positive integer."""
    require(value is None or is_positive(value), argument, value, "None or a positive integer")


def check_entries(argument: str, values: Sequence[Any], ranks: int) -> None:
    """`values` has an entry per rank."""
    require(len(values) == ranks, argument, f"a list of {len(values)}", f"a list of {ranks}, an entry per rank")


def is_positive(value: Any) -> bool:
    """True for a positive integer."""
    return is_count(value) and value >= 1


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
    require_shape(tuple(x.shape) == shape, argument, x, f"of shape {shape}")
    require_dtype(x.is_floating_point(), argument, x, "floating point")
    require(x.device == like.device, argument, f"on {x.device}", f"on {like.device}")


def check_probs(probs: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """`probs` is floating point, of the given shape, on the device of `like`."""
    check_float("probs", probs, shape, like)
