"""Launches of kernels, as the compiler sees them."""

from typing import Any, NamedTuple


class Constant(NamedTuple):
    """An argument that is a constant for the compiler: None, or declared so. A dtype by name."""

    value: Any
    is_dtype: bool = False


class Launch(NamedTuple):
    """One specialisation of a kernel."""

    module: str
    kernel: str
    arguments: dict[str, Any]  # by name: a Constant, the name of a type, or a tuple of such
    options: dict[str, Any]
