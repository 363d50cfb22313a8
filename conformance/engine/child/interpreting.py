"""Makes Triton's interpreter quicker, by half or more where kernels call functions.

While a kernel is interpreted, `triton.language` stands for numpy. Triton (3.9) puts that in place when a launch begins, takes it away when
it ends, and puts all of it in place again at every call of a function inside, which takes longer than most functions do. Here a call does
so only for a module that the launch has not seen to. Also, Triton computes whether whole numbers overflow, for an assertion that it makes in
debugging alone, and lists all dtypes of numpy whenever it wants one: neither is done again and again here.
"""

import sys
from types import ModuleType
from typing import Any


def install() -> None:
    """Change the interpreter, once it has been imported. A second call does nothing."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or getattr(interpreter, "_seen_to_by_launches", False):
        return
    interpreter._seen_to_by_launches = True  # type: ignore[attr-defined]
    language: Any = interpreter.tl  # type: ignore[attr-defined]
    function = interpreter.InterpretedFunction  # type: ignore[attr-defined]
    replaced = interpreter._patch_lang  # type: ignore[attr-defined]
    modules_of: dict[
        int, bool
    ] = {}  # by a function's globals: whether they know triton.language.core, which no launch sees to
    ready = False  # whether that is seen to; nothing takes it away again

    def call(self: Any, *arguments: Any, **settings: Any) -> Any:
        nonlocal ready
        names = self.fn.__globals__
        if id(names) not in modules_of:
            modules_of[id(names)] = any(isinstance(x, ModuleType) and x is language.core for x in names.values())
        if modules_of[id(names)] and not ready:
            replaced(self.fn)
            ready = True
        try:
            return self.rewrite()(*arguments, **settings)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error  # type: ignore[attr-defined]

    function.__call__ = call
    semantic: Any = sys.modules["triton.language.semantic"].TritonSemantic
    overflow = semantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            overflow(self, *operands)

    semantic.binary_op_sanitize_overflow_impl = checked
    listed = interpreter._get_np_dtype  # type: ignore[attr-defined]
    known: dict[str, Any] = {}  # by the name of a scalar dtype; pointers have none

    def np_dtype(dtype: Any) -> Any:
        name = getattr(dtype.scalar, "name", "")
        if name.startswith("pointer"):
            return listed(dtype)
        if name not in known:
            known[name] = listed(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype  # type: ignore[attr-defined]
