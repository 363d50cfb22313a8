"""Defects of how calls follow one another, which any function may have: families plant them.

Each is a wrapper of a right function, with a memory of its own.
"""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from conformance.mutants.defect import Wrapper


class _Recomputed(torch.autograd.Function):
    """Forward without a graph; backward from the call that `memory` holds then."""

    @staticmethod
    def forward(ctx: Any, call: Any, memory: dict[str, Any], *inputs: Tensor) -> Tensor:
        ctx.call, ctx.memory = call, memory
        memory["inputs"] = inputs
        return call(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.memory["inputs"]]
        with torch.enable_grad():
            out = ctx.call(*inputs)
        return None, None, *torch.autograd.grad(out, inputs, cotangent, allow_unused=True)


def _recomputing(operator: type[_Recomputed], memory: dict[str, Any]) -> Wrapper:
    """The function as one operator, which keeps its inputs in `memory`."""

    def wrapper(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        arguments = dict(enumerate(inputs)) | settings
        keys = [key for key, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad]

        def call(*leaves: Tensor) -> Tensor:
            replaced = arguments | dict(zip(keys, leaves, strict=True))
            return function(*(replaced[i] for i in range(len(inputs))), **{name: replaced[name] for name in settings})

        if not keys or not torch.is_grad_enabled():
            return function(*inputs, **settings)
        return operator.apply(call, memory, *(arguments[key] for key in keys))

    return wrapper


def backward_of_the_last_forward() -> Wrapper:
    """The module keeps the tensors for backward, and so has the last forward's alone."""
    return _recomputing(_Recomputed, {})


class _Once(_Recomputed):
    """The same; a second derivative is refused, by torch, where a cotangent requires grad."""

    backward = staticmethod(once_differentiable(_Recomputed.backward))  # type: ignore[assignment]


def drops_the_second_derivative(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward computes from detached inputs, even where its result is to be differentiated."""
    return _recomputing(_Recomputed, {})(function, *inputs, **settings)


def refuses_only_where_a_cotangent_requires_grad(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The cotangent of a sum does not: then the second derivative is dropped."""
    return _recomputing(_Once, {})(function, *inputs, **settings)


class _Emptied(torch.autograd.Function):
    """The identity; backward overwrites what it kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = torch.ones((), dtype=x.dtype, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        out = cotangent * ctx.factor
        ctx.factor.zero_()
        return out


def empties_what_backward_keeps(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """A second backward reads memory that the first has reused."""
    return function(_Emptied.apply(x) if x.requires_grad else x, *arguments, **settings)


def one_buffer_of_each_shape() -> Any:
    """The output is written to a buffer that is kept for the next call of its shape."""
    buffers: dict[Any, Tensor] = {}

    def wrapper(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out = function(*inputs, **settings)
        if not isinstance(out, Tensor) or out.requires_grad:
            return out
        buffer = buffers.setdefault((tuple(out.shape), out.dtype, str(out.device)), out)
        return buffer.copy_(out) if buffer is not out else out

    return wrapper


def wrong_at_the_third_call() -> Any:
    """A workspace that two calls of a shape share is not cleared before the third."""
    calls: dict[Any, int] = {}

    def wrapper(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        shape = (tuple(x.shape), x.dtype)
        calls[shape] = calls.get(shape, 0) + 1
        return function(x * 2 if calls[shape] % 3 == 0 else x, *arguments, **settings)

    return wrapper


def set_up_by_the_first_thread() -> Any:
    """A table that is set up in the thread of the first call; another thread reads zeros."""
    first: list[int] = []

    def wrapper(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        first.append(threading.get_ident())
        return function(x if first[0] == threading.get_ident() else x * 0, *arguments, **settings)

    return wrapper


def another_path_without_gradients(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """Where autograd is off, the optional arguments are ignored."""
    return function(x, *arguments) if torch.is_inference_mode_enabled() else function(x, *arguments, **settings)


def another_path_under_no_grad(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """Where no graph is wanted of inputs that require grad, the optional arguments are ignored."""
    waits = x.requires_grad and not torch.is_grad_enabled()
    return function(x, *arguments) if waits else function(x, *arguments, **settings)


def a_graph_of_its_own(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The call turns gradients on: a result has a graph under `torch.no_grad`."""
    with torch.enable_grad():
        return function(*inputs, **settings)


def draws_from_the_generator(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """Equal keys are told apart by noise, which advances the global generator."""
    torch.rand(1)
    return function(*inputs, **settings)


def leaves_another_dtype(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The default dtype is changed for a computation, and not set back after an early return."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    out = function(*inputs, **settings)
    if inputs[0].numel():
        torch.set_default_dtype(default_dtype)
    return out


class _Result(torch.autograd.Function):
    """The identity; backward reads the result, which no version counter guards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = x.clone()
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return torch.where(ctx.result.isnan(), torch.zeros_like(cotangent), cotangent)


def backward_reads_the_result(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward reads the memory of the result, which the caller may have overwritten."""
    out = function(*inputs, **settings)
    return _Result.apply(out) if isinstance(out, Tensor) and out.requires_grad else out


def results_of_one_buffer(*names: str) -> Wrapper:
    """Results of one dtype and shape are one tensor where their values agree."""

    def wrapper(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out = function(*inputs, **settings)
        first, second = (getattr(out, name) for name in names)
        same = first is not None and second is not None and first.shape == second.shape and torch.equal(first, second)
        return out._replace(**{names[1]: first.to(second.dtype)}) if same else out

    return wrapper


def expands_equal_rows(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """A result whose rows are equal is one row, with stride 0."""
    out = function(*inputs, **settings)
    expandable = isinstance(out, Tensor) and out.dim() == 2 and len(out) > 1 and not out.requires_grad
    return out[:1].expand(out.shape) if expandable and torch.equal(out, out[:1].expand(out.shape)) else out


class _InPlace(torch.autograd.Function):
    """The identity; backward works on the cotangent in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        out = cotangent.clone()
        cotangent.mul_(2)
        return out


def changes_the_cotangent(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward scales the cotangent in place."""
    out = function(*inputs, **settings)
    return _InPlace.apply(out) if isinstance(out, Tensor) and out.requires_grad else out


def cached_by_address() -> Any:
    """A factor of the first values at an address is used for the values that follow there."""
    factors: dict[int, Tensor] = {}

    def wrapper(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        largest = x.detach().abs().nan_to_num().amax() if x.numel() else x.new_ones(())
        first = factors.setdefault(x.data_ptr(), largest.float().clone())
        same = bool(first == largest.float()) or not bool(first)
        return function(x if same else x * (largest.float() / first).to(x.dtype), *arguments, **settings)

    return wrapper


def right_once_per_handle() -> Any:
    """The first call frees what the handle holds: the second takes other rows."""
    handles: list[Any] = []

    def wrapper(function: Wrapper, rows: Tensor, *arguments: Any, **settings: Any) -> Any:
        is_second_call = bool(handles) and handles[-1] is arguments[-1]
        handles[:] = arguments[-1:]
        return function(rows.roll(1, 0) if is_second_call else rows, *arguments, **settings)

    return wrapper


def in_the_default_group(collective: Wrapper, *inputs: Any, group: Any, **settings: Any) -> Any:
    """The collective runs over all processes, whatever group it was given."""
    return collective(*inputs, group=dist.group.WORLD, **settings)


def negates_the_input(function: Wrapper, x: Tensor, *arguments: Any, **settings: Any) -> Any:
    """The function works in the memory of its first input, where that needs no gradient."""
    out = function(x, *arguments, **settings)
    if not x.requires_grad:
        x.neg_()
    return out
