"""The interpreter's `TritonSemantic`, with fewer steps for common operands.

Only the interpreter's own instance changes its class: compiled kernels keep Triton's. Operands that
a method here does not expect, and all errors, are left to Triton's method.
"""

from math import copysign
from typing import Any

from fast_interpreter.operators import NUMBERS, OPERATIONS, operators
from fast_interpreter.types import dims_of, scalar_types

MOST_CONSTANTS, LARGEST_CONSTANT = 4096, 4096  # constants kept, elements of one

RELIES_ON = (
    *(
        f"triton.language.semantic:TritonSemantic.{name}"
        for name in (
            "make_tensor",
            "computation_type_impl",
            "integer_promote_impl",
            "to_tensor",
            "to_tensor_type",
            "check_ptr_type_impl",
            "binary_op_type_checking_impl",
            "_cast_to_computation_type",
            "binary_op_sanitize_overflow_impl",
            "bitwise_op_type_checking_impl",
            "scalar_constant",
            "splat",
            "expand_dims",
            "broadcast_impl_value",
            "broadcast_tensors",
            "_broadcast_ptr_val_mask",
            "cast",
            "_bool_like",
            *OPERATIONS,
        )
    ),
    *(
        f"triton.runtime.interpreter:InterpreterBuilder.{name}"
        for name in (
            "binary_op",
            "cast_impl",
            "create_splat",
            "create_broadcast",
            "create_expand_dims",
            "create_addptr",
            "create_int_cast",
            "create_fp_to_si",
            "create_fp_to_ui",
            "create_si_to_fp",
            "create_ui_to_fp",
            "create_fp_trunc",
            "create_fp_ext",
            "create_fadd",
            "create_icmpSLT",
            "create_fcmpOLT",
            "get_bf16",
            "get_fp32",
            "get_int32",
            "get_block_ty",
        )
    ),
)
DIGEST = "49c5db3f97275c7d"

_promoted: dict[Any, Any] = {}  # the common type, by two types and how they meet
_constants: dict[Any, Any] = {}
_shapes: dict[Any, Any] = {}  # by two shapes, the one to which both broadcast


def apply(interpreter: Any) -> None:
    """Make the interpreter use the quicker semantic."""
    core, base = interpreter.tl.core, interpreter.TritonSemantic
    scalars = scalar_types(core)
    attributes: dict[str, Any] = {
        "base": base,
        "core": core,
        "scalars": frozenset(map(id, scalars)),
        "integers": frozenset(id(x) for x in scalars if x.is_int()),
        "handle": interpreter.TensorHandle,
        "casts": _casts(interpreter, scalars),
    }
    attributes |= operators(core, base, attributes["scalars"], frozenset(id(x) for x in scalars if x.is_int_signed()))
    methods = {name: x for name, x in vars(Quick).items() if not name.startswith("__")}
    interpreter.interpreter_semantic.__class__ = type("QuickSemantic", (base,), methods | attributes)


def _casts(interpreter: Any, scalars: list[Any]) -> dict[tuple[int, int], Any]:
    """By two types, the numpy type to which Triton's cast just converts."""
    ends = [x for x in scalars if x.name in ("fp32", "fp64") or (x.is_int() and not x.is_bool())]
    half, single = interpreter.tl.float16, interpreter.tl.float32
    pairs = [(a, b) for a in (*ends, interpreter.tl.int1) for b in ends if a is not b]
    pairs += [(half, single), (single, half)]
    return {(id(a), id(b)): interpreter._get_np_dtype(b) for a, b in pairs}


class Quick:
    """Methods for a subclass of TritonSemantic. `scalars`, `integers`: ids of types never freed."""

    base: Any  # TritonSemantic
    core: Any
    tensor: Any
    handle: Any
    builder: Any
    scalars: frozenset[int]
    integers: frozenset[int]
    casts: dict[tuple[int, int], Any]
    splat: Any
    to_tensor_type: Any
    _cast_to_computation_type: Any

    def computation_type_impl(self, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div: bool) -> Any:
        key = id(a_ty), a_is_scalar, id(b_ty), b_is_scalar, div
        promotion = _promoted.get(key)
        if promotion is None:
            promotion = self.base.computation_type_impl(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div)
            if id(a_ty) in self.scalars and id(b_ty) in self.scalars:
                _promoted[key] = promotion
        return promotion

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is self.tensor:
            return x
        if kind is self.core.constexpr:
            x, kind = x.value, type(x.value)
        if kind in NUMBERS:
            return self._constant(x, self.to_tensor_type(x), None)
        return self.base.to_tensor(self, x, check_type)

    def _constant(self, value: Any, dtype: Any, like: Any) -> Any:
        """A scalar as a tensor, or as a block of the shape of the type `like`."""
        key = type(value), value, copysign(1.0, value), id(dtype), id(like)
        cached_constant = _constants.get(key)
        if cached_constant is not None:
            return cached_constant[0]
        constant = self._cast_to_computation_type(value, dtype)
        if like is not None:
            constant = self.splat(constant, like.shape)
        if constant.handle.data.size <= LARGEST_CONSTANT and id(dtype) in self.scalars:
            constant.handle.data.flags.writeable = False
            if len(_constants) >= MOST_CONSTANTS:
                _constants.clear()
            _constants[key] = constant, like  # keeps the type, so that the id stays in use
        return constant

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        tensor, scalars = self.tensor, self.scalars
        if type(lhs) is tensor and type(rhs) is tensor:
            a, b = lhs.dtype, rhs.dtype
            if id(a) in scalars and id(b) in scalars:
                if arithmetic_check:
                    lhs, rhs = self.of_one_type(lhs, rhs, div_or_mod)
                return self.broadcast_impl_value(lhs, rhs)
            if type(a) is self.core.pointer_type and allow_lhs_ptr and id(b) in self.integers:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check:
            if type(lhs) is tensor and type(rhs) in NUMBERS and id(lhs.dtype) in scalars:
                lhs, rhs = self.of_one_type(lhs, rhs, div_or_mod, like=lhs.type)
                return lhs, rhs
            if type(rhs) is tensor and type(lhs) in NUMBERS and id(rhs.dtype) in scalars:
                lhs, rhs = self.of_one_type(lhs, rhs, div_or_mod, like=rhs.type)
                return lhs, rhs
        return self.base.binary_op_type_checking_impl(
            self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def of_one_type(self, lhs: Any, rhs: Any, div_or_mod: bool = False, like: Any = None) -> Any:
        """Two operands in their common type; a number gets the shape of `like`."""
        is_lhs_number, is_rhs_number = type(lhs) in NUMBERS, type(rhs) in NUMBERS
        a = self.to_tensor_type(lhs) if is_lhs_number else lhs.dtype
        b = self.to_tensor_type(rhs) if is_rhs_number else rhs.dtype
        both = self.computation_type_impl(a, is_lhs_number, b, is_rhs_number, div_or_mod)
        if like is not None and not like.is_block():
            like = None
        if is_lhs_number:
            lhs = self._constant(lhs, both, like)
        elif a is not both:
            lhs = self.cast(lhs, both)
        if is_rhs_number:
            rhs = self._constant(rhs, both, like)
        elif b is not both:
            rhs = self.cast(rhs, both)
        return lhs, rhs

    def of_one_shape(self, lhs: Any, rhs: Any) -> tuple[Any, Any, Any]:
        """Operands that numpy broadcasts to their common shape, and the left one's type in it."""
        a, b = lhs.type, rhs.type
        if a is b:
            return lhs, rhs, a
        lhs_dims, rhs_dims = dims_of(a), dims_of(b)
        if rhs_dims is None or lhs_dims == rhs_dims:
            return lhs, rhs, a
        if lhs_dims is None:
            return lhs, rhs, b.with_element_ty(lhs.dtype)
        shape = _shapes.get((lhs_dims, rhs_dims))
        if shape is None:
            lhs, rhs = self.broadcast_impl_value(lhs, rhs)  # raises where the shapes do not fit
            return lhs, rhs, lhs.type
        return lhs, rhs, a if lhs_dims == shape else self.core.block_type(lhs.dtype, list(shape))

    def binary_op_sanitize_overflow_impl(self, *operands: Any) -> None:
        if self.builder.options.debug:  # its only effect is an assertion for debugging
            self.base.binary_op_sanitize_overflow_impl(self, *operands)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b:
            return lhs, rhs
        lhs_dims, rhs_dims = dims_of(a), dims_of(b)
        if lhs_dims == rhs_dims:
            return lhs, rhs
        if rhs_dims is None:
            return lhs, self._splat(rhs, a.with_element_ty(b))
        if lhs_dims is None:
            return self._splat(lhs, b.with_element_ty(a)), rhs
        shape = _shapes.get((lhs_dims, rhs_dims))
        if shape is None:
            lhs, rhs = self.base.broadcast_impl_value(self, lhs, rhs)
            if len(lhs_dims) == len(rhs_dims):
                _shapes[lhs_dims, rhs_dims] = dims_of(lhs.type)
            return lhs, rhs
        if lhs_dims != shape:
            lhs = self._broadcast(lhs, shape)
        if rhs_dims != shape:
            rhs = self._broadcast(rhs, shape)
        return lhs, rhs

    def _splat(self, x: Any, block: Any) -> Any:
        return self.tensor(self.builder.create_splat(block, x.handle), block)

    def _broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.tensor(self.builder.create_broadcast(x.handle, shape), self.core.block_type(x.dtype, list(shape)))

    def _broadcast_ptr_val_mask(self, ptr: Any, val: Any, mask: Any) -> Any:
        if type(mask) is self.tensor and dims_of(ptr.type) == dims_of(val.type) == dims_of(mask.type):
            return ptr, val, mask
        return self.base._broadcast_ptr_val_mask(self, ptr, val, mask)

    def expand_dims(self, input: Any, axis: int) -> Any:
        dims = dims_of(input.type)
        if dims is None or not 0 <= axis <= len(dims):
            return self.base.expand_dims(self, input, axis)
        block = self.core.block_type(input.dtype, [*dims[:axis], 1, *dims[axis:]])
        return self.tensor(self.builder.create_expand_dims(input.handle, axis), block)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        dtype, scalar = input.dtype, dst_ty.scalar
        if dtype is scalar:
            return input
        numpy_type = self.casts.get((id(dtype), id(scalar)))
        if numpy_type is None or fp_downcast_rounding is not None:
            return self.base.cast(self, input, dst_ty, fp_downcast_rounding)
        kind = input.type
        kind = kind.with_element_ty(scalar) if kind.is_block() else dst_ty
        return self.tensor(self.handle(input.handle.data.astype(numpy_type), scalar), kind)
