"""An implementation is any namespace that offers some of the reference's functions.

    moe-conformance run --impl my_kernels.moe          a module
    moe-conformance run --impl my_kernels.moe:Fused    a class, object or namespace in a module

The namespace may also offer three functions:

    supports(function, **arguments) -> None | reason   gets meta tensors: shapes, dtypes, settings
    declares(function) -> dict                         the guarantees, in terms of VOCABULARY
    transport(function, group) -> str                  how ranks reach each other, if not by it

Calls pass the required tensors by position, all other arguments by keyword, defaults omitted.
"""

import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VOCABULARY = {
    "accumulator": "dtype of sums: 'float32' (the default), 'storage', or 'hopper_fp8': "
    "fp8 GEMMs with a scale per tensor or per 128 sum in 14 bits, promoted to float32",
    "emulated": "scalings whose GEMMs run on a unit for wider numbers: a tuple of str; printed, not tested",
    "reduction_order": "in words; printed, not tested",
    "tie_rule": "of equal keys, which is chosen: 'lowest_index', or, by default, any",
    "scale_arithmetic": "of scales other than powers of two: 'division' (default) or 'reciprocal', rounded once more",
    "deterministic": "bit-equal results on every run: True or False (the default)",
    "differentiable": "gradients through autograd: True (the default) or False",
    "noncontiguous": "accepts inputs of any strides: True (the default) or False",
    "host_sync_free": "never waits for the device where a static size is given: True or False (the default)",
    "graph_capturable": "may be captured in a CUDA graph where a static size is given: True or False (the default)",
    "unchecked": "names of arguments whose illegal values are not detected: a tuple of str",
    "omits": "names of outputs that are not returned: a tuple of str",
}
DEFAULTS = {"accumulator": "float32", "differentiable": True, "noncontiguous": True}


class UsageError(Exception):
    """Unusable user input; the message is one clear sentence."""


class Implementation:
    """A namespace, asked by function name."""

    def __init__(self, namespace: Any, name: str = "") -> None:
        self.namespace, self.name = namespace, name
        self._parameters: dict[str, frozenset[str] | None] = {}

    def offers(self, function: str) -> bool:
        return callable(getattr(self.namespace, function, None))

    def lacks(self, function: str, settings: dict[str, Any]) -> list[str]:
        """The settings that the function's signature has no parameter for.

        `scales.layout` is the parameter `layout` of another function, which the call needs too.
        """
        return [name for name in settings if not self._takes(name if "." in name else f"{function}.{name}")]

    def _takes(self, name: str) -> bool:
        """Whether the function is offered, and its signature has the parameter."""
        function, _, parameter = name.partition(".")
        if function not in self._parameters:
            offered = self.offers(function)
            parameters = inspect.signature(getattr(self.namespace, function)).parameters.values() if offered else ()
            anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
            self._parameters[function] = None if anything else frozenset(p.name for p in parameters)
        known = self._parameters[function]
        return known is None or parameter in known

    def supports(self, function: str, arguments: dict[str, Any]) -> str | None:
        """The reason that this call is not supported, or None."""
        if not hasattr(self.namespace, "supports"):
            return None
        with torch.device("meta"):
            shown = {
                k: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for k, v in arguments.items()
            }
        return self.namespace.supports(function, **shown)

    def declares(self, function: str) -> dict[str, Any]:
        """The namespace's declarations for `function`, merged over the defaults.

        Raises:
            UsageError: a key that is not in VOCABULARY.
        """
        declared = dict(self.namespace.declares(function)) if hasattr(self.namespace, "declares") else {}
        for key in declared:
            if key not in VOCABULARY:
                raise UsageError(
                    f"{self.name} declares {key!r} for {function}; the vocabulary is {', '.join(VOCABULARY)}"
                )
        return DEFAULTS | declared

    def transport(self, function: str, group: Any) -> str:
        """The namespace's transport between the ranks of a group; "" if it is the group's."""
        named = getattr(self.namespace, "transport", None)
        return str(named(function, group)) if callable(named) else ""

    def call(self, function: str, *args: Any, **settings: Any) -> Any:
        return getattr(self.namespace, function)(*args, **settings)


def imported(module_name: str) -> Any:
    """The module; for `moe_ref`, whose collectives take all ranks' inputs, its one-rank adapter."""
    return importlib.import_module("conformance.peers.reference_world" if module_name == "moe_ref" else module_name)


def load(name: str) -> Implementation:
    """Import the namespace `name`: a module, or module:attribute.

    Raises:
        UsageError: it cannot be imported, raises while it is, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        right = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"--impl {name}: give the module's name, not its file: {right}")
    try:
        namespace: Any = imported(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UsageError(
                f"--impl {name}: there is no module {missing!r}, installed, on PYTHONPATH or in {os.getcwd()}"
            ) from None
        if missing.startswith(f"{module_name}.") or missing.rpartition(".")[0] == "":
            raise UsageError(
                f"--impl {name}: it imports {missing!r}, which does not exist ({_raised_at(error)})"
            ) from None
        raise UsageError(
            f"--impl {name}: there is no module {missing!r}; something inside a module is written module:name"
        ) from None
    except BaseException as error:
        raise UsageError(
            f"--impl {name}: importing it raised {type(error).__name__}: {error} ({_raised_at(error)})"
        ) from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(namespace, part):
            raise UsageError(f"--impl {name}: {module_name} has no {attribute!r}")
        namespace = getattr(namespace, part)
    return Implementation(namespace, name)


def _raised_at(error: BaseException) -> str:
    """The file and line that raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}"


def named_outputs(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A call's outputs by name: a tensor, a plain tuple in order, a dict, or an object's fields.

    Raises:
        ValueError: the result has the wrong number of values, or lacks a field.
    """
    if isinstance(result, Tensor) and len(names) == 1:
        return {names[0]: result}
    if isinstance(result, dict):
        result = SimpleNamespace(**result)
    if isinstance(result, (tuple, list)) and not hasattr(result, "_fields"):
        if len(result) != len(names):
            raise ValueError(f"returned {len(result)} values; it must return {len(names)}: {', '.join(names)}")
        return dict(zip(names, result, strict=True))
    missing = [name for name in names if not hasattr(result, name)]
    if missing:
        raise ValueError(
            f"returned {type(result).__name__} without {', '.join(missing)}; it must have {', '.join(names)}"
        )
    return {name: getattr(result, name) for name in names}


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """One autograd function out of two bare kernels.

        forward(*args, **settings) -> (outputs, saved)   outputs: a tensor or a tuple; saved: any
        backward(saved, *cotangents) -> gradients        one per positional argument, or None

    The cotangent of an unused output is None.
    """

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, settings, *args):
            ctx.set_materialize_grads(False)
            outputs, ctx.kept = forward(*args, **settings)
            whole = outputs if isinstance(outputs, tuple) else (outputs,)
            ctx.mark_non_differentiable(*(x for x in whole if isinstance(x, Tensor) and not x.is_floating_point()))
            return outputs

        @staticmethod
        def backward(ctx, *cotangents):
            gradients = backward(ctx.kept, *cotangents)
            return (None, *(gradients if isinstance(gradients, tuple) else (gradients,)))

    return lambda *args, **settings: Bare.apply(settings, *args)
