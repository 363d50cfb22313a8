"""Registered operators: what `torch.compile` sees of this package.

Inside a compiled graph a public function is one call (`traceable`), which is traced as Python down
to the functions that launch kernels (`operator`, `as_operators`). Those are operators of
`torch.library`: opaque to the compiler, with an implementation for tensors without memory, which is
the same function with `launch` doing nothing. So shapes are written once. An eager call goes past
the registered operators.

An operator takes (tensors, symbolic numbers, the rest of the call as text) and returns tensors.
"""

import functools
import io
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_fast.launch.registry import PUBLIC, RECORDS

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=type[torch.autograd.Function])
# for the suite's `--since`: outside a compiled graph no call reads the registry of all functions
__reaches__ = ("moe_fast.launch.registry", "moe_fast.launch.tracing")
SCHEMA = "(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]"
# attributes of the mode of tensors without memory: an operator runs in it; what the last returned
INSIDE, RESULT = "_moe_fast_inside", "_moe_fast_result"
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_mode = torch._C._get_dispatch_mode
_graph: ContextVar[bool] = ContextVar("in a graph", default=False)


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: `torch.compile` does not read it, and traces its operators.

    Dynamo runs the import when it meets the call, and not before: it takes a second.
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


def has_memory() -> bool:
    """Whether tensors have memory; while tracing they have not, and no kernel is launched."""
    return _mode(_FAKE) is None


def tracing() -> bool:
    """Whether operators are recorded in place of their launches."""
    mode = _mode(_FAKE)
    return mode is not None and not getattr(mode, INSIDE, False)


def in_graph() -> bool:
    """Whether a compiled graph runs the operator: it may overwrite results once it has read them,
    so that they must be no one else's.
    """
    return _graph.get() or not has_memory()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid]; nothing where tensors have no memory.

    Raises:
        RuntimeError: outside an operator while tracing: the compiled graph would lack this launch.
    """
    if has_memory():
        launcher: Callable[..., Any] = kernel[grid]
        return launcher
    if tracing():
        raise RuntimeError(f"{kernel.__name__} is traced outside an operator")
    return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that launches kernels and has no gradient of its own.

    It takes and returns tensors, numbers and records of them. It changes no argument, and returns
    new tensors or arguments, not views of arguments. Numbers that it returns follow from shapes.
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
        mode = _mode(_FAKE)
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
        given = _Dumped((args, kwargs), [])
        with torch.no_grad():
            tensors = registered(given.tensors, given.numbers, given.text)
        text, numbers = getattr(_mode(_FAKE), RESULT)
        result: R = _loaded(text, tensors, numbers, given.tensors)
        return result

    return call


class _Dumped(pickle.Pickler):
    """A structure as text, with its tensors and its symbolic numbers apart; some are known."""

    def __init__(self, structure: Any, known: list[Tensor]) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self.numbers: list[torch.SymInt] = []
        self._places: dict[int, tuple[str, Any]] = {id(x): ("known", i) for i, x in enumerate(known)}
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

    def persistent_load(self, place: tuple[str, Any]) -> Any:
        kind, at = place
        return at if kind == "value" else self._places[kind][at]


def _loaded(text: str, tensors: list[Tensor], numbers: list[Any], known: list[Tensor] | None = None) -> Any:
    return _Loader(text, tensor=tensors, number=numbers, known=known).load()


class _Context:
    """What the forward of an autograd function leaves for its backward, and says of its outputs."""

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
    """Decorates an autograd function whose forward and backward launch kernels: an operator each.

    Both follow the rules of `operator`. Outside grad mode `apply` is the forward alone, which then
    needs no gradient, whatever its tensors require: it makes and keeps nothing for a backward.
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
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return recorded(*args)
        return either_forward(_Context((False,) * len(args)), *args)

    function.forward, function.backward = staticmethod(either_forward), staticmethod(either_backward)  # type: ignore
    function.apply = staticmethod(apply)  # type: ignore[method-assign]
    return function
