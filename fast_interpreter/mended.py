"""What Triton's interpreter computes otherwise than a GPU, mended: bfloat16.

It truncates float32 to bfloat16 where a GPU rounds to nearest, ties to even, in casts and stores;
multiplies the bit patterns of bfloat16 operands of `tl.dot`; and has no bfloat16 constants before
Triton 3.9. Each part is mended only if the interpreter still does so.
"""

from typing import Any

import numpy as np

LOW = np.uint32(0x7FFF)
QUIET_NAN = np.uint16(0x7FC0)


def apply(interpreter: Any) -> None:
    """Mend the interpreter's builder."""
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    if truncates(interpreter):
        _round_casts(interpreter, builder, language)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), language.bfloat16)
    if _multiplies_bits(interpreter):
        _widen_products(builder, language)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 as the bits of bfloat16: to nearest, ties to even; every NaN stays one."""
    word = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        nearest = ((word + LOW + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), QUIET_NAN, nearest)


def truncates(interpreter: Any) -> bool:
    """Whether 1 + 2⁻⁸ + 2⁻⁹ becomes 1."""
    language, value = interpreter.tl, np.array([1 + 2**-8 + 2**-9], dtype=np.float32)
    source = interpreter.TensorHandle(value, language.float32)
    return int(interpreter.interpreter_builder.cast_impl(source, language.bfloat16).data[0]) == 0x3F80


def _round_casts(interpreter: Any, builder: Any, language: Any) -> None:
    cast_of_triton = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == language.float32 and dst_type.scalar == language.bfloat16:
            return interpreter.TensorHandle(rounded(src.data), dst_type.scalar)
        return cast_of_triton(self, src, dst_type)

    builder.cast_impl = cast_impl


def _multiplies_bits(interpreter: Any) -> bool:
    """Whether 1 times 1 is not 1."""
    language = interpreter.tl
    unit = interpreter.TensorHandle(np.full((1, 1), 0x3F80, dtype=np.uint16), language.bfloat16)
    zero = interpreter.TensorHandle(np.zeros((1, 1), dtype=np.float32), language.float32)
    return float(interpreter.interpreter_builder.create_dot(unit, unit, zero, None, 0).data[0, 0]) != 1.0


def _widen_products(builder: Any, language: Any) -> None:
    dot_of_triton = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *settings: Any) -> Any:
        a, b = (self.cast_impl(x, language.float32) if x.dtype.scalar == language.bfloat16 else x for x in (a, b))
        return dot_of_triton(self, a, b, *settings)

    builder.create_dot = create_dot


def lacks(error: BaseException) -> bool:
    """Whether the interpreter raised for want of a feature that compiled kernels may have."""
    cause = error.__cause__
    return type(error).__name__ == "InterpreterError" and (
        isinstance(cause, NotImplementedError) or "InterpreterBuilder" in str(cause)
    )
