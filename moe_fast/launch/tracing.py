"""The public functions as a compiled graph calls them. Import this module while Dynamo traces, not
before, because it loads the compiler.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_fast.launch.registry import PUBLIC, RECORDS
from moe_fast.launch.torch_parts import nonstrict_trace
from moe_ref.config import LayerConfig, Recipe, RouterConfig

__reaches__ = ()  # see `operators`


class Absent:
    """A stand-in for None among the arguments and results of a graph's call, which can neither take
    nor return None.
    """


class Named:
    """A stand-in for a named tuple there, because Dynamo does not build named tuples itself."""

    def __init__(self, kind: Any, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class Result:
    """The result of a call in the form in which a graph takes it: its tensors and integers, and
    apart from them the structure with all constants.
    """

    def __init__(self, x: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(_packed(x))
        self.is_constant = [not isinstance(x, Tensor | torch.SymInt | int) or isinstance(x, bool) for x in leaves]
        self.constants = [x if constant else None for x, constant in zip(leaves, self.is_constant, strict=True)]
        self.variables = [x for x, constant in zip(leaves, self.is_constant, strict=True) if not constant]


def _rebuilt(variables: Iterable[Any], context: Any) -> Any:
    spec, is_constant, constants = context
    remaining_variables = iter(variables)
    return pytree.tree_unflatten(
        [x if k else next(remaining_variables) for x, k in zip(constants, is_constant, strict=True)], spec
    )


class Refused:
    """An illegal call, in place of its result. The graph's function raises the error, because
    Dynamo replaces an error from within a call by its own, which has no reason.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _raised(_: Iterable[Any], reason: str) -> None:
    raise ValueError(reason)


def traced(index: int, *args: Any, **kwargs: Any) -> Any:
    """The call of the public function with this index, as one call of the graph."""
    return CALLS[index](*[_packed(x) for x in args], **{name: _packed(x) for name, x in kwargs.items()})


def _packed(x: Any) -> Any:
    if x is None:
        return Absent()
    if isinstance(x, tuple | list):
        items = [_packed(item) for item in x]
        return Named(type(x), items) if hasattr(x, "_fields") else tuple(items) if isinstance(x, tuple) else items
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


def _register_settings(kind: type) -> None:
    """Make settings a node of torch's trees.

    They are rebuilt without their check, because torch also maps arguments to values that are no
    settings: `torch.utils.checkpoint` of torch 2.11 maps each of them to None.
    """
    names = [field.name for field in fields(kind)]

    def flattened(settings: Any) -> tuple[list[Any], list[str]]:
        present = [name for name in names if getattr(settings, name) is not None]
        return [getattr(settings, name) for name in present], present

    def rebuilt(values: Iterable[Any], present: list[str]) -> Any:
        settings: Any = object.__new__(kind)
        values_by_name = dict(zip(present, values, strict=True))
        for name in names:
            object.__setattr__(settings, name, values_by_name.get(name))
        return settings

    def flattened_with_keys(settings: Any) -> tuple[list[Any], list[str]]:
        values, present = flattened(settings)
        return list(zip(map(pytree.GetAttrKey, present), values, strict=True)), present

    pytree.register_pytree_node(kind, flattened, rebuilt, flatten_with_keys_fn=flattened_with_keys)


pytree.register_pytree_node(Absent, lambda _: ([], None), lambda _, __: None)
pytree.register_pytree_node(Result, lambda x: (x.variables, (x.spec, x.is_constant, x.constants)), _rebuilt)
pytree.register_pytree_node(Refused, lambda x: ([], x.reason), _raised)
pytree.register_pytree_node(Named, lambda x: (x.items, x.kind), lambda items, kind: kind(*items))
for record in RECORDS:
    pytree.register_dataclass(record)
for settings_kind in (LayerConfig, Recipe, RouterConfig):
    _register_settings(settings_kind)
CALLS = [_call(function) for function in PUBLIC]
