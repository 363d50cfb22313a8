"""E4M3, E5M2, E2M1 and E8M0 as lists of their values, in which a number is searched."""

from typing import Any

import numpy as np

BITS = {"e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B), "e2m1": (2, 1, 1, 0x7)}  # exponent, mantissa, bias, last
NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}


def _values(name: str) -> np.ndarray:
    _, mantissa, bias, last = BITS[name]
    num_fractions = 2**mantissa
    return np.array(
        [
            (num_fractions + code % num_fractions) * 2.0 ** (code // num_fractions - bias - mantissa)
            if code >= num_fractions
            else code * 2.0 ** (1 - bias - mantissa)
            for code in range(last + 1)
        ]
    )


VALUES = {name: _values(name) for name in BITS}
LARGEST = {name: float(values[-1]) for name, values in VALUES.items()}
POWERS = np.array([2.0 ** (code - 127) for code in range(255)])


def encode(x: np.ndarray, name: str, noise: np.ndarray | None = None) -> np.ndarray:
    """The codes of float64 numbers.

    Of the two neighbours it is the nearer one; halfway the even one; or with noise the upper one,
    with a probability equal to the distance from the lower. For E8M0 it is always the upper one.
    """
    size = np.abs(x)
    if name == "e8m0":
        code = np.minimum(np.searchsorted(POWERS, size, "left"), 254)
        return np.where(np.isnan(x), 255, code).astype(np.uint8)
    values = VALUES[name]
    last = len(values) - 1
    low = np.clip(np.searchsorted(values, size, "right") - 1, 0, last)
    high = np.minimum(low + 1, last)
    middle = (values[low] + values[high]) / 2
    if noise is None:
        up = (size > middle) | ((size == middle) & (low % 2 == 1))
    else:
        up = noise * (values[high] - values[low]) < size - values[low]
    code = np.where(up, high, low) + np.where(np.signbit(x), 2 ** sum(BITS[name][:2]), 0)
    return np.where(np.isnan(x), NAN[name], code).astype(np.uint8)


def decode(codes: np.ndarray, name: str) -> Any:
    """The values of codes, float64."""
    sign = 2 ** sum(BITS[name][:2])
    body = codes.astype(np.int64) % sign
    values = np.append(VALUES[name], np.full(sign - len(VALUES[name]), np.nan))
    return np.where(codes >= sign, -values[body], values[body])
