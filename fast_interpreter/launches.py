"""A launch patches the language from a list, and functions keep what Triton looks up again.

While a kernel runs, `triton.language` uses numpy, and must not afterwards: the same functions also
compile kernels and refuse calls outside of kernels. Triton searches the language for what to patch
at the start of each launch, and again at each call of a device function. Here the search is made
once; a launch sets the attributes that it found, and restores them at its end.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

RELIES_ON = (
    *(
        f"triton.runtime.interpreter:{name}"
        for name in (
            "_LangPatchScope.set_attr",
            "_LangPatchScope.restore",
            "_patch_attr",
            "_patch_builtin",
            "_patch_lang_tensor",
            "_patch_reduce_scan",
            "_patch_lang_core",
            "_patch_lang",
            "GridExecutor.__init__",
            "GridExecutor.__call__",
            "InterpretedFunction.run",
            "InterpretedFunction.rewrite",
            "InterpretedFunction.__call__",
        )
    ),
    *(
        f"triton.language.core:{name}"
        for name in (
            "builtin",
            "is_builtin",
            "add",
            "sub",
            "mul",
            *(f"tensor.__{name}__" for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")),
            *(f"tensor.__{name}__" for name in ("floordiv", "rfloordiv", "mod", "rmod", "and", "rand", "or", "ror")),
            *(f"tensor.__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "xor", "rxor")),
        )
    ),
)
DIGEST = "169126d28c59df48"

# Operators of a tensor that are a method of the semantic, after `constexpr` is unwrapped.
OPERATORS = {
    "truediv": "truediv",
    "floordiv": "floordiv",
    "mod": "mod",
    "and": "and_",
    "or": "or_",
    "xor": "xor_",
    "lt": "less_than",
    "le": "less_equal",
    "gt": "greater_than",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
REFLECTED = ("truediv", "floordiv", "mod", "and", "or", "xor")
_MISSING = object()


def apply(interpreter: Any) -> None:
    """Patch launches and calls of device functions."""
    patches = Patches(interpreter)
    _quick_launch(interpreter, patches)
    _quick_call(interpreter, patches)


class Patches:
    """Attributes that differ while a kernel runs, of triton.language and of its core."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._core_module = interpreter.tl.core
        language, core = self._patched(interpreter.tl), self._patched(self._core_module)
        of_language = {(id(holder), name) for holder, name, _, _ in language}
        self._language = Switch(language)
        self._core = Switch([row for row in core if (id(row[0]), row[1]) not in of_language])
        self._sees_core: dict[int, tuple[bool, Any]] = {}  # by the id of globals, with them
        self.launches = 0  # that are running, one inside another
        self._core_patched = False

    def _patched(self, module: Any) -> list[tuple[Any, str, Any, Any]]:
        """(holder, attribute, value in a kernel, value on the host) of what Triton patches."""
        scope = self._interpreter._patch_lang(SimpleNamespace(__globals__={"language": module}))
        on_host: dict[tuple[int, str], Any] = {}
        for holder, name, value in scope._changes:
            on_host.setdefault((id(holder), name), (holder, value is self._interpreter._MISSING, value))
        rows = []
        for (_, name), (holder, missing, value) in on_host.items():
            in_kernel = self._quicker(holder, name, value, holder.__dict__[name])
            rows.append((holder, name, in_kernel, _MISSING if missing else value))
        scope.restore()
        return rows

    def _quicker(self, holder: Any, name: str, on_host: Any, in_kernel: Any) -> Any:
        """The same as `in_kernel`, in fewer calls."""
        core, semantic = self._core_module, self._interpreter.interpreter_semantic
        if holder is core.tensor and name in _names_of_operators():
            return _operator(name.strip("_"), core, semantic)
        code = core.builtin(lambda: None).__code__
        wraps = (getattr(in_kernel, "__kwdefaults__", None) or {}).get("member") is on_host
        if wraps and isinstance(on_host, FunctionType) and on_host.__code__ is code:
            return _with_semantic(on_host.__wrapped__, semantic)  # type: ignore[attr-defined]
        return in_kernel

    def sees_core(self, function: Any) -> bool:
        """Whether triton.language.core is a global of the function."""
        names = function.__globals__
        if id(names) not in self._sees_core:
            modules = [x for x in names.values() if isinstance(x, ModuleType)]
            core = any(x is self._core_module for x in modules)
            is_visible = core or any(x is self._interpreter.tl for x in modules)
            assert is_visible, "triton.language must be visible from within jit'd function"
            self._sees_core[id(names)] = core, names
        return self._sees_core[id(names)][0]

    def begin(self, function: Any) -> None:
        """A launch of the function starts."""
        self.sees_core(function)
        if not self.launches:
            self._language.on()
        self.launches += 1
        self.see(function)

    def see(self, function: Any) -> None:
        """The function is called in a launch."""
        if not self._core_patched and self.sees_core(function):
            self._core_patched = True
            self._core.on()

    def end(self) -> None:
        """A launch ends."""
        self.launches -= 1
        if self.launches:
            return
        if self._core_patched:
            self._core_patched = False
            self._core.off()
        self._language.off()


class Switch:
    """Sets the attributes of rows (holder, attribute, value in a kernel, value on the host)."""

    def __init__(self, rows: list[tuple[Any, str, Any, Any]]) -> None:
        self._attributes: list[tuple[Any, str, Any, Any]] = []
        self._modules: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        for holder, name, in_kernel, on_host in rows:
            if isinstance(holder, ModuleType) and on_host is not _MISSING:
                _, kernel, host = self._modules.setdefault(id(holder), (vars(holder), {}, {}))
                kernel[name], host[name] = in_kernel, on_host
            else:
                self._attributes.append((holder, name, in_kernel, on_host))

    def on(self) -> None:
        """As in a kernel."""
        for names, kernel, _ in self._modules.values():
            names.update(kernel)
        for holder, name, value, _ in self._attributes:
            setattr(holder, name, value)

    def off(self) -> None:
        """As outside of kernels."""
        for names, _, host in self._modules.values():
            names.update(host)
        for holder, name, _, value in self._attributes:
            if value is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


def _with_semantic(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        settings["_semantic"] = semantic
        return function(*arguments, **settings)

    return call


def _names_of_operators() -> set[str]:
    names = (*OPERATORS, *(f"r{name}" for name in REFLECTED), "add", "radd", "sub", "rsub", "mul", "rmul")
    return {f"__{name}__" for name in names}


def _operator(name: str, core: Any, semantic: Any) -> Callable[..., Any]:
    """The operator `name` of a tensor, as a call of the semantic."""
    reflected = name.startswith("r") and name[1:] in (*REFLECTED, "add", "sub", "mul")
    name = name[1:] if reflected else name
    checked = name in ("add", "sub", "mul")  # called with "check for overflow"
    method = getattr(semantic, OPERATORS.get(name, name))
    unwrap, tail = core._unwrap_if_constexpr, (True,) if checked else ()
    if reflected:
        return lambda self, other, _semantic=None: method(unwrap(other), self, *tail)
    return lambda self, other, _semantic=None: method(self, unwrap(other), *tail)


def _quick_launch(interpreter: Any, patches: Patches) -> None:
    executor, knobs = interpreter.GridExecutor, interpreter.triton.knobs
    slow_init = executor.__init__
    constexprs: dict[Any, Any] = {}  # by kernel
    specs: dict[Any, Any] = {}

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn not in constexprs:
            slow_init(self, fn, arg_names, grid, pre_run_hooks)
            constexprs[fn] = self.constexprs
            specs[fn] = inspect.getfullargspec(fn)
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.constexprs = constexprs[fn]

    def launch(self: Any, *args_dev: Any, **kwargs: Any) -> None:
        spec = specs[self.fn]
        kwargs = {name: x for name, x in kwargs.items() if name in spec.args or name in spec.kwonlyargs}
        args_hst, kwargs_hst = self._init_args_hst(args_dev, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args_hst, **kwargs_hst)
        patches.begin(self.fn)
        try:
            _run(self, args_hst, kwargs_hst)
        finally:
            patches.end()
        self._restore_args_dev(args_dev, args_hst, kwargs, kwargs_hst)

    def _run(self: Any, args_hst: Any, kwargs_hst: Any) -> None:
        values = _arguments(self.fn, specs[self.fn], args_hst, kwargs_hst)
        args = {name: x if name in self.constexprs else interpreter._implicit_cvt(x) for name, x in values.items()}
        grid = self.grid(args) if callable(self.grid) else self.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        grid = grid + (1,) * (3 - len(grid))
        builder, fn = interpreter.interpreter_builder, self.fn
        builder.set_grid_dim(*grid)
        try:
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        builder.set_grid_idx(x, y, z)
                        fn(**args)
        except Exception as error:
            if knobs.compilation.front_end_debugging:
                raise
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__init__, executor.__call__ = init, launch


def _arguments(function: Any, spec: inspect.FullArgSpec, positional: Any, named: dict[str, Any]) -> dict[str, Any]:
    """What `inspect.getcallargs` returns."""
    values = dict(zip(spec.args, positional, strict=False)) | named
    defaults = spec.defaults or ()
    for name, x in zip(spec.args[len(spec.args) - len(defaults) :], defaults, strict=True):
        values.setdefault(name, x)
    is_positional = not (spec.varargs or spec.varkw or spec.kwonlyargs)
    if (
        is_positional
        and len(positional) <= len(spec.args) == len(values)
        and named.keys().isdisjoint(spec.args[: len(positional)])
    ):
        return values
    return inspect.getcallargs(function, *positional, **named)


def _quick_call(interpreter: Any, patches: Patches) -> None:
    function = interpreter.InterpretedFunction
    slow_call = function.__call__

    def call(self: Any, *arguments: Any, **settings: Any) -> Any:
        if not patches.launches:
            return slow_call(self, *arguments, **settings)
        patches.see(self.fn)
        try:
            return self.rewrite()(*arguments, **settings)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    function.__call__ = call
