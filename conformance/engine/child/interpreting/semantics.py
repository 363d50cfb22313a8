"""The interpreter's `TritonSemantic`, with fewer steps for common operands.

Only the interpreter's own instance changes its class: compiled kernels keep Triton's. Operands that
a method here does not expect, and all errors, are left to Triton's method.
"""

from math import copysign
from typing import Any

from conformance.engine.child.interpreting.types import dims_of

MOST_CONSTANTS, LARGEST_CONSTANT = 4096, 4096  # constants kept, elements of one

RELIES_ON = tuple(
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
        "broadcast_impl_value",
        "broadcast_tensors",
        "_broadcast_ptr_val_mask",
        "cast",
    )
) + tuple(
    f"triton.runtime.interpreter:InterpreterBuilder.{name}"
    for name in ("create_splat", "create_broadcast", "get_bf16", "get_fp32", "get_int32", "get_block_ty")
)
DIGEST = "fedcbf4d2abbb04c"


def apply(interpreter: Any) -> None:
    """Make the interpreter use the quicker semantic."""
    interpreter.interpreter_semantic.__class__ = quicker(interpreter.TritonSemantic, interpreter.tl.core)


def quicker(base: Any, core: Any) -> Any:
    """The subclass of `base`, TritonSemantic."""
    tensor, pointer_type, constexpr = core.tensor, core.pointer_type, core.constexpr
    names = (*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES)
    scalars = {id(x): x for x in vars(core).values() if type(x) is core.dtype and x.name != "void"}
    integers = frozenset(key for key, x in scalars.items() if x.name in names)
    promoted: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    common: dict[Any, Any] = {}  # by two shapes, the one to which both broadcast

    class QuickSemantic(base):
        def computation_type_impl(self, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div: bool) -> Any:
            key = id(a_ty), a_is_scalar, id(b_ty), b_is_scalar, div
            found = promoted.get(key)
            if found is None:
                found = super().computation_type_impl(a_ty, a_is_scalar, b_ty, b_is_scalar, div)
                if id(a_ty) in scalars and id(b_ty) in scalars:
                    promoted[key] = found
            return found

        def to_tensor(self, x: Any, check_type: bool = True) -> Any:
            kind = type(x)
            if kind is tensor:
                return x
            if kind is constexpr:
                x, kind = x.value, type(x.value)
            if kind is int or kind is float or kind is bool:
                return self._constant(x, self.to_tensor_type(x), None)
            return super().to_tensor(x, check_type)

        def _constant(self, value: Any, dtype: Any, like: Any) -> Any:
            """A scalar as a tensor, or as a block of the shape of the type `like`."""
            key = type(value), value, copysign(1.0, value), id(dtype), id(like)
            found = constants.get(key)
            if found is not None:
                return found[0]
            made = self._cast_to_computation_type(value, dtype)
            if like is not None:
                made = self.splat(made, like.shape)
            if made.handle.data.size <= LARGEST_CONSTANT and id(dtype) in scalars:
                made.handle.data.flags.writeable = False
                if len(constants) >= MOST_CONSTANTS:
                    constants.clear()
                constants[key] = made, like  # keeps the type, so that the id stays in use
            return made

        def binary_op_type_checking_impl(
            self,
            lhs: Any,
            rhs: Any,
            allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False,
            arithmetic_check: bool = True,
            div_or_mod: bool = False,
        ) -> Any:
            if type(lhs) is tensor and type(rhs) is tensor:
                a, b = lhs.dtype, rhs.dtype
                if id(a) in scalars and id(b) in scalars:
                    if arithmetic_check:
                        both = self.computation_type_impl(a, False, b, False, div_or_mod)
                        if a is not both:
                            lhs = self.cast(lhs, both)
                        if b is not both:
                            rhs = self.cast(rhs, both)
                    return self.broadcast_impl_value(lhs, rhs)
                if type(a) is pointer_type and allow_lhs_ptr and id(b) in integers:
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check:
                if type(lhs) is tensor and type(rhs) in (int, float, bool) and id(lhs.dtype) in scalars:
                    return self._with_number(lhs, rhs, False, div_or_mod)
                if type(rhs) is tensor and type(lhs) in (int, float, bool) and id(rhs.dtype) in scalars:
                    return self._with_number(rhs, lhs, True, div_or_mod)[::-1]
            return super().binary_op_type_checking_impl(
                lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
            )

        def _with_number(self, x: Any, number: Any, number_first: bool, div_or_mod: bool) -> Any:
            """The tensor and the number in their common type, of one shape."""
            other = self.to_tensor_type(number)
            if number_first:
                both = self.computation_type_impl(other, True, x.dtype, False, div_or_mod)
            else:
                both = self.computation_type_impl(x.dtype, False, other, True, div_or_mod)
            if x.dtype is not both:
                x = self.cast(x, both)
            return x, self._constant(number, both, x.type if x.type.is_block() else None)

        def binary_op_sanitize_overflow_impl(self, *operands: Any) -> None:
            if self.builder.options.debug:  # its only effect is an assertion for debugging
                super().binary_op_sanitize_overflow_impl(*operands)

        def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
            a, b = lhs.type, rhs.type
            if a is b:
                return lhs, rhs
            left, right = dims_of(a), dims_of(b)
            if left == right:
                return lhs, rhs
            if right is None:
                return lhs, self._splat(rhs, a.with_element_ty(b))
            if left is None:
                return self._splat(lhs, b.with_element_ty(a)), rhs
            shape = common.get((left, right))
            if shape is None:
                lhs, rhs = super().broadcast_impl_value(lhs, rhs)
                if len(left) == len(right):
                    common[left, right] = dims_of(lhs.type)
                return lhs, rhs
            if left != shape:
                lhs = self._broadcast(lhs, shape)
            if right != shape:
                rhs = self._broadcast(rhs, shape)
            return lhs, rhs

        def _splat(self, x: Any, block: Any) -> Any:
            return tensor(self.builder.create_splat(block, x.handle), block)

        def _broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
            return tensor(self.builder.create_broadcast(x.handle, shape), core.block_type(x.dtype, list(shape)))

        def _broadcast_ptr_val_mask(self, ptr: Any, val: Any, mask: Any) -> Any:
            if (
                type(mask) is tensor
                and type(val) is tensor
                and dims_of(ptr.type) == dims_of(val.type) == dims_of(mask.type)
            ):
                return ptr, val, mask
            return super()._broadcast_ptr_val_mask(ptr, val, mask)

        def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
            if input.dtype is dst_ty.scalar:
                return input
            return super().cast(input, dst_ty, fp_downcast_rounding)

    return QuickSemantic
