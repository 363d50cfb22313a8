"""Registered operators: how `torch.compile` sees this package.

Inside a compiled graph a public function is one call (`traceable`). It is traced as Python down to
the functions that launch kernels (`operator`, `as_operators`). Those are operators of
`torch.library`: the compiler does not look inside. Their implementation for tensors without memory
is the same function, in which `launch` does nothing, so that shapes are written once. An eager call
goes past the registered operators.

An operator takes (tensors, symbolic numbers, the other arguments as text) and returns tensors.
"""

import functools
import io
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moe_fast.launch.backend import is_elsewhere, launch_on
from moe_fast.launch.registry import PUBLIC, RECORDS
from moe_fast.launch.torch_parts import derivatives_are_recorded, mode_of_tensors_without_memory
from moe_fast.launch.torch_parts import has_memory as has_memory

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=type[torch.autograd.Function])
# for the suite's `--since`: outside a compiled graph no call reads the registry of all functions
__reaches__ = ("moe_fast.launch.registry", "moe_fast.launch.tracing")
SCHEMA = "(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]"
# attributes of the mode of tensors without memory: an operator runs in it; what the last returned
INSIDE, RESULT = "_moe_fast_inside", "_moe_fast_result"
_graph: ContextVar[bool] = ContextVar("in a graph", default=False)


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: `torch.compile` does not read it, and traces its operators.

    The import takes a second; Dynamo runs it only when it meets a call.
    """
    index = len(PUBLIC)
    PUBLIC.append(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            from moe_fast.launch import tracing

            traced: R = tracing.traced(index, *args, **kwargs)
            return traced
        return function(*args, **kwargs)

    return call


def record(cls: C) -> C:
    """Decorates a dataclass that public functions take or return."""
    RECORDS.append(cls)
    return cls


def tracing() -> bool:
    """Whether operators are recorded instead of launched."""
    mode = mode_of_tensors_without_memory()
    return mode is not None and not getattr(mode, INSIDE, False)


def in_graph() -> bool:
    """Whether a compiled graph runs the operator. The graph may overwrite results once it has read
    them, so that they must not be shared.
    """
    return _graph.get() or not has_memory()


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor) -> Callable[..., Any]:
    """kernel[grid] on the device of a tensor; nothing where tensors have no memory, or where the
    grid is empty.

    Raises:
        RuntimeError: outside an operator while tracing: the compiled graph would lack this launch.
    """
    if has_memory():
        if 0 in grid:
            return _nothing
        launcher: Callable[..., Any] = kernel[grid]
        return functools.partial(_elsewhere, launcher, like) if is_elsewhere(like) else launcher
    if tracing():
        raise RuntimeError(f"{kernel.__name__} is traced outside an operator")
    return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _elsewhere(launcher: Callable[..., Any], like: Tensor, *args: Any, **constants: Any) -> Any:
    """The launch on a device that is not the current one."""
    with launch_on(like):
        return launcher(*args, **constants)


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that launches kernels and has no gradient of its own.

    It takes and returns tensors, numbers and records of them. It changes no argument, and returns
    new tensors or its arguments, but no views of them. Numbers that it returns depend only on
    shapes.
    """
    home = function.__module__.removeprefix("moe_fast.").replace(".", "_")
    return _operator(function, f"{home}_{function.__name__.strip('_')}")


def _operator(function: Callable[P, R], name: str) -> Callable[P, R]:
    @torch.library.custom_op(f"moe_fast::{name}", mutates_args=(), schema=SCHEMA)
    def registered(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
        args, kwargs = _loaded(call, tensors, numbers)
        token = _graph.set(True)
        try:
            return _Dumped(function(*args, **kwargs), tensors).tensors
        finally:
            _graph.reset(token)

    @registered.register_fake
    def _(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
        mode = mode_of_tensors_without_memory()
        setattr(mode, INSIDE, True)
        try:
            args, kwargs = _loaded(call, tensors, numbers)
            result = _Dumped(function(*args, **kwargs), tensors)
        finally:
            setattr(mode, INSIDE, False)
        setattr(mode, RESULT, (result.text, result.numbers))
        return result.tensors

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not tracing():
            return function(*args, **kwargs)
        dumped_call = _Dumped((args, kwargs), [])
        with torch.no_grad():
            tensors = registered(dumped_call.tensors, dumped_call.numbers, dumped_call.text)
        text, numbers = getattr(mode_of_tensors_without_memory(), RESULT)
        result: R = _loaded(text, tensors, numbers, dumped_call.tensors)
        return result

    return call


class _Dumped(pickle.Pickler):
    """A structure as text, with its tensors and its symbolic numbers in separate lists.
    `known_tensors` are named by their index.
    """

    def __init__(self, structure: Any, known_tensors: list[Tensor]) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self.numbers: list[torch.SymInt] = []
        self._places: dict[int, tuple[str, Any]] = {id(x): ("known", i) for i, x in enumerate(known_tensors)}
        self.dump(structure)
        self.text = buffer.getvalue().hex()

    def persistent_id(self, x: Any) -> tuple[str, Any] | None:
        if isinstance(x, Tensor):
            if id(x) not in self._places:
                self._places[id(x)] = "tensor", len(self.tensors)
                self.tensors.append(x)
            return self._places[id(x)]
        if isinstance(x, torch.SymInt):
            self.numbers.append(x)
            return "number", len(self.numbers) - 1
        if isinstance(x, torch.SymBool | torch.SymFloat):
            return "value", bool(x) if isinstance(x, torch.SymBool) else float(x)
        return None


class _Loader(pickle.Unpickler):
    """The inverse of `_Dumped`."""

    def __init__(self, text: str, **places: Any) -> None:
        super().__init__(io.BytesIO(bytes.fromhex(text)))
        self._places = places

    def persistent_load(self, pid: tuple[str, Any]) -> Any:
        kind, position = pid
        return position if kind == "value" else self._places[kind][position]


def _loaded(text: str, tensors: list[Tensor], numbers: list[Any], known_tensors: list[Tensor] | None = None) -> Any:
    return _Loader(text, tensor=tensors, number=numbers, known=known_tensors).load()


class _Context:
    """The `ctx` of an autograd function within an operator: what the forward saves for the
    backward, and what it says about its outputs.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.constant: tuple[Tensor, ...] = ()
        self.materialized = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constant = outputs

    def set_materialize_grads(self, value: bool) -> None:
        self.materialized = value


def as_operators(function: F) -> F:
    """Decorate an autograd function whose forward and backward launch kernels: each becomes an
    operator.

    Both follow the rules of `operator`. Outside grad mode `apply` is the forward alone. It is then
    told that no input needs a gradient, so that it saves nothing.
    """
    recorded: Callable[..., Any] = function.apply
    forward: Callable[..., Any] = function.forward
    backward: Callable[..., Any] = function.backward
    once = getattr(backward, "__wrapped__", backward)  # a compiled backward is differentiable once anyway

    def run_forward(needs_input_grad: tuple[bool, ...], *args: Any) -> tuple[Any, _Context]:
        ctx = _Context(needs_input_grad)
        return forward(ctx, *args), ctx

    def run_backward(ctx: _Context, *cotangents: Tensor | None) -> Any:
        return once(ctx, *cotangents)

    home = function.__module__.removeprefix("moe_fast.").replace(".", "_")
    name = f"{home}_{function.__name__.strip('_')}"
    forward_operator = _operator(run_forward, f"{name}_forward")
    backward_operator = _operator(run_backward, f"{name}_backward")

    @functools.wraps(forward)
    def either_forward(ctx: Any, *args: Any) -> Any:
        if not tracing():
            return forward(ctx, *args)
        outputs, ctx.traced = forward_operator(tuple(ctx.needs_input_grad), *args)
        ctx.save_for_backward(*ctx.traced.saved_tensors)
        ctx.mark_non_differentiable(*ctx.traced.constant)
        ctx.set_materialize_grads(ctx.traced.materialized)
        ctx.traced.saved_tensors = ctx.traced.constant = ()
        return outputs

    @functools.wraps(backward)
    def either_backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if not tracing():
            return backward(ctx, *cotangents)
        ctx.traced.saved_tensors = ctx.saved_tensors
        return backward_operator(ctx.traced, *cotangents)

    def apply(*args: Any) -> Any:
        if derivatives_are_recorded():
            return recorded(*args)
        return either_forward(_Context((False,) * len(args)), *args)

    function.forward, function.backward = staticmethod(either_forward), staticmethod(either_backward)  # type: ignore
    function.apply = staticmethod(apply)  # type: ignore[method-assign]
    return function
