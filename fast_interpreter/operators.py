"""Operators of two operands: one call of numpy, after their types are one.

Triton copies both operands to their common shape first. Here numpy broadcasts them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
OPERATIONS = (*ARITHMETIC, *COMPARISONS)
NUMBERS = frozenset((int, float, bool))


def operators(core: Any, base: Any, scalars: frozenset[int], signed: frozenset[int]) -> dict[str, Any]:
    """Methods for a subclass of `base`, by name. The sets hold ids of types."""
    methods = {name: _arithmetic(core, getattr(base, name), run, scalars) for name, run in ARITHMETIC.items()}
    methods["add"] = _addition(core, methods["add"], signed)
    methods |= {name: _comparison(core, getattr(base, name), run, scalars) for name, run in COMPARISONS.items()}
    return methods


def _expects(core: Any, scalars: frozenset[int]) -> Callable[[Any, Any], bool]:
    """Whether one operand is a tensor of numbers, and the other too, or a number."""
    tensor = core.tensor

    def expects(lhs: Any, rhs: Any) -> bool:
        if type(lhs) is tensor:
            return id(lhs.dtype) in scalars and (
                id(rhs.dtype) in scalars if type(rhs) is tensor else type(rhs) in NUMBERS
            )
        return type(rhs) is tensor and id(rhs.dtype) in scalars and type(lhs) in NUMBERS

    return expects


def _arithmetic(core: Any, slow: Any, run: Any, scalars: frozenset[int]) -> Any:
    tensor, expects = core.tensor, _expects(core, scalars)

    def method(self: Any, input: Any, other: Any, sanitize_overflow: Any) -> Any:
        if self.builder.options.debug or not expects(input, other):
            return slow(self, input, other, sanitize_overflow)
        a, b = self.of_one_type(input, other)
        a, b, kind = self.of_one_shape(a, b)
        return tensor(self.builder.binary_op(a.handle, b.handle, run), kind)

    return method


def _addition(core: Any, numbers: Any, signed: frozenset[int]) -> Any:
    """Also adds a signed offset to a pointer."""
    tensor, pointer_type = core.tensor, core.pointer_type

    def add(self: Any, input: Any, other: Any, sanitize_overflow: Any) -> Any:
        if (
            type(input) is tensor
            and type(other) is tensor
            and type(input.dtype) is pointer_type
            and id(other.dtype) in signed
        ):
            a, b, kind = self.of_one_shape(input, other)
            return tensor(self.builder.create_addptr(a.handle, b.handle), kind)
        return numbers(self, input, other, sanitize_overflow)

    return add


def _comparison(core: Any, slow: Any, run: Any, scalars: frozenset[int]) -> Any:
    tensor, int1, expects = core.tensor, core.int1, _expects(core, scalars)

    def method(self: Any, input: Any, other: Any) -> Any:
        if not expects(input, other):
            return slow(self, input, other)
        a, b = self.of_one_type(input, other)
        a, b, kind = self.of_one_shape(a, b)
        return tensor(self.builder.binary_op(a.handle, b.handle, run), kind.with_element_ty(int1))

    return method
