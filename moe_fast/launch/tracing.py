"""The public functions as a compiled graph has them. Import this while Dynamo traces, not before:
it loads the compiler.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import nonstrict_trace
from torch.utils import _pytree as pytree

from moe_fast.launch.registry import PUBLIC, RECORDS
from moe_ref.config import LayerConfig, Recipe, RouterConfig

__reaches__ = ()  # see `operators`


class Absent:
    """None on its way into a call of a graph and out: such a call neither takes nor returns it."""


class Named:
    """A named tuple on the same way: Dynamo does not build them itself."""

    def __init__(self, kind: Any, parts: list[Any]) -> None:
        self.kind, self.parts = kind, parts


class Result:
    """What a call returns, as the graph takes it: its tensors and integers, and apart from them
    the structure with all constants.
    """

    def __init__(self, x: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(_packed(x))
        self.known = [not isinstance(x, Tensor | torch.SymInt | int) or isinstance(x, bool) for x in leaves]
        self.constants = [x if known else None for x, known in zip(leaves, self.known, strict=True)]
        self.parts = [x for x, known in zip(leaves, self.known, strict=True) if not known]


def _rebuilt(parts: Iterable[Any], context: Any) -> Any:
    spec, known, constants = context
    rest = iter(parts)
    return pytree.tree_unflatten([x if k else next(rest) for x, k in zip(constants, known, strict=True)], spec)


class Refused:
    """An illegal call, in place of its result. The graph's function raises: Dynamo replaces an
    error from within a call by its own, without the reason.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _raised(_: Iterable[Any], reason: str) -> None:
    raise ValueError(reason)


def traced(index: int, *args: Any, **kwargs: Any) -> Any:
    """The public function of that number, as one call."""
    return CALLS[index](*[_packed(x) for x in args], **{name: _packed(x) for name, x in kwargs.items()})


def _packed(x: Any) -> Any:
    if x is None:
        return Absent()
    if isinstance(x, tuple | list):
        parts = [_packed(part) for part in x]
        return Named(type(x), parts) if hasattr(x, "_fields") else tuple(parts) if isinstance(x, tuple) else parts
    return x


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.SymFloat, float, (args, kwargs))
        try:
            return Result(function(*args, **kwargs))
        except ValueError as error:
            return Refused(str(error))

    return nonstrict_trace(call)


pytree.register_pytree_node(Absent, lambda _: ([], None), lambda _, __: None)
pytree.register_pytree_node(Result, lambda x: (x.parts, (x.spec, x.known, x.constants)), _rebuilt)
pytree.register_pytree_node(Refused, lambda x: ([], x.reason), _raised)
pytree.register_pytree_node(Named, lambda x: (x.parts, x.kind), lambda parts, kind: kind(*parts))
for record in (*RECORDS, LayerConfig, Recipe, RouterConfig):
    pytree.register_dataclass(record)
CALLS = [_call(function) for function in PUBLIC]
