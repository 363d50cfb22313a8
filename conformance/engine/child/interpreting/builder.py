"""The interpreter's numpy operations, with fewer checks around each of them."""

from typing import Any

RELIES_ON = tuple(
    f"triton.runtime.interpreter:{name}"
    for name in (
        "TensorHandle.__init__",
        "TensorHandle.__post_init__",
        "TensorHandle.get_element_ty",
        "_validate_np_data_size",
        "_get_np_dtype",
        "InterpreterBuilder.binary_op",
        "InterpreterBuilder.ternary_op",
        "InterpreterBuilder.create_masked_load",
    )
    if name != "TensorHandle.__init__"  # written by dataclasses
)
DIGEST = "25002cae1b59269e"


def apply(interpreter: Any) -> None:
    """Patch the handles, and give the builder its quicker class."""
    core = interpreter.tl.core
    scalars = [x for x in vars(core).values() if type(x) is core.dtype and x.name != "void"]
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

    interpreter.TensorHandle.__init__ = init


def _quick_numpy_types(interpreter: Any, core: Any, scalars: list[Any]) -> None:
    slow, pointer_type, address = interpreter._get_np_dtype, core.pointer_type, interpreter.np.dtype("uint64")
    known = {id(x): slow(x) for x in scalars}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if type(scalar) is pointer_type:
            return address
        return known.get(id(scalar)) or slow(dtype)

    interpreter._get_np_dtype = np_dtype


def quicker(interpreter: Any, bits: dict[int, int]) -> Any:
    """The subclass of `InterpreterBuilder`."""
    handle, boolean = interpreter.TensorHandle, interpreter.np.dtype(bool)

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

    return QuickBuilder
