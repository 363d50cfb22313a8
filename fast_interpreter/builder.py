"""The interpreter's numpy operations, with fewer checks around each of them."""

from typing import Any

from fast_interpreter.types import scalar_types

RELIES_ON = tuple(
    f"triton.runtime.interpreter:{name}"
    for name in (
        "TensorHandle.__post_init__",
        "TensorHandle.get_element_ty",
        "_validate_np_data_size",
        "_get_np_dtype",
        "InterpreterBuilder.binary_op",
        "InterpreterBuilder.create_splat",
        "InterpreterBuilder.create_expand_dims",
    )
)
DIGEST = "399f9adec5d326b6"


def apply(interpreter: Any) -> None:
    """Patch the handles, and give the builder its quicker class."""
    core = interpreter.tl.core
    scalars = scalar_types(core)
    bits = {id(x): max(8, x.primitive_bitwidth) for x in scalars}
    _quick_handle(interpreter, bits)
    _quick_numpy_types(interpreter, core, scalars)
    interpreter.interpreter_builder.__class__ = quicker(interpreter, bits)


def _quick_handle(interpreter: Any, bits: dict[int, int]) -> None:
    check = interpreter.TensorHandle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        most = bits.get(id(dtype))
        if most is None or data.itemsize * 8 > most:
            check(self)  # raises for most types

    def element_type(self: Any) -> Any:
        dtype = self.dtype
        while "element_ty" in dtype.__dict__:
            dtype = dtype.element_ty
        return dtype

    interpreter.TensorHandle.__init__, interpreter.TensorHandle.get_element_ty = init, element_type


def _quick_numpy_types(interpreter: Any, core: Any, scalars: list[Any]) -> None:
    slow, pointer_type, address = interpreter._get_np_dtype, core.pointer_type, interpreter.np.dtype("uint64")
    numpy_types = {id(x): slow(x) for x in scalars}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if type(scalar) is pointer_type:
            return address
        return numpy_types.get(id(scalar)) or slow(dtype)

    interpreter._get_np_dtype = np_dtype


def quicker(interpreter: Any, bits: dict[int, int]) -> Any:
    """The subclass of `InterpreterBuilder`."""
    handle, np = interpreter.TensorHandle, interpreter.np
    boolean = np.dtype(bool)

    class QuickBuilder(interpreter.InterpreterBuilder):
        def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
            a, b, dtype = lhs.data, rhs.data, lhs.dtype
            most = bits.get(id(dtype))
            if most is None or (a.dtype is boolean and b.dtype is boolean):
                return super().binary_op(lhs, rhs, op)
            output = op(a, b)
            if output.itemsize * 8 > most:
                output = output.astype(interpreter._get_np_dtype(dtype))
            return handle(output, dtype)

        def create_splat(self, ret_ty: Any, arg: Any) -> Any:
            dtype = arg.dtype
            if id(dtype) not in bits:
                return super().create_splat(ret_ty, arg)
            data = np.empty(tuple(ret_ty.shape), interpreter._get_np_dtype(dtype))
            data[...] = arg.data
            return handle(data, dtype)

        def create_expand_dims(self, arg: Any, axis: int) -> Any:
            data = arg.data
            if not 0 <= axis <= data.ndim:
                return super().create_expand_dims(arg, axis)
            return handle(data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    return QuickBuilder
