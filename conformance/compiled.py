"""An implementation whose functions are each compiled by `torch.compile` into one graph.

    moe-conformance run --impl conformance.compiled:my_kernels.moe             the default backend
    moe-conformance run --impl conformance.compiled:dynamic.my_kernels.moe     sizes are symbols
    moe-conformance run --impl conformance.compiled:aot_eager.my_kernels.moe   no machine code

A function that does not trace whole (`fullgraph=True`) fails, and an illegal call raises its own
error, not the compiler's. The default backend needs a GPU or a C++ compiler, and seconds for each
new structure of a call; "aot_eager" shows what any backend sees of the operators: their shapes,
aliases and gradients. Dispatchers are not offered, because a process group is no argument of a
graph. Functions that have no contract, and those of parameters, which move no rows, run eagerly.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from conformance.catalogue import CONTRACTS, FAMILIES, NAMES
from conformance.interface import imported
from conformance.usage import UsageError, missing_module

FORMS: dict[str, dict[str, Any]] = {"dynamic": {"dynamic": True}, "aot_eager": {"backend": "aot_eager"}}
ANY_NUMBER = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # of shapes
# arguments that are not offered: a process group, a list that a backward extends, a function of the
# caller's, tensors that a call raises; and what a layer saves, which the compiler chooses
NOT_OFFERED = ("ranks", "group", "wgrads", "rows_again", "amaxes")
NOT_OF_A_LAYER = (*NOT_OFFERED, "recompute")
EAGER = {contract.function for contract in FAMILIES[NAMES.index("parameters")].contracts}
NEEDS_RANKS = {contract.function for contract in FAMILIES[NAMES.index("dispatch")].contracts}


def _compiled(function: Callable[..., Any], form: dict[str, Any]) -> Callable[..., Any]:
    from torch._dynamo import config as dynamo  # it imports Triton, which an implementation may set up first
    from torch._functorch import config as functorch

    functorch.donated_buffer = False  # in this process, for laws that run a backward again
    graph = torch.compile(function, fullgraph=True, **form)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with dynamo.patch(ANY_NUMBER):
                return graph(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException:
            function(*args, **kwargs)  # raises what the compiler reports, if the call is illegal
            raise

    signature = inspect.signature(function)
    omitted = NOT_OF_A_LAYER if function.__name__ == "moe_layer" else NOT_OFFERED
    offered = [x for x in signature.parameters.values() if x.name not in omitted]
    call.__signature__ = signature.replace(parameters=offered)  # type: ignore[attr-defined]
    return call


def _module(name: str) -> Any:
    try:
        return imported(name)
    except ModuleNotFoundError as error:
        raise UsageError(missing_module(f"conformance.compiled:{name}", error.name or name)) from None


def _member(base: Any, name: str) -> Any:
    """An attribute of a namespace, or a module of a package that has not been imported yet."""
    if hasattr(base, "__path__") and not hasattr(base, name) and find_spec(f"{base.__name__}.{name}"):
        return imported(f"{base.__name__}.{name}")
    return getattr(base, name)


class Compiled:
    """A namespace, or the way to one, whose functions are compiled in one form."""

    # inductor reads such a tensor without its minus: torch.compile(lambda x: x + 1) is wrong for it
    scope = "layout!=negated"

    def __init__(self, form: dict[str, Any], base: Any = None) -> None:
        self._form, self._base = form, base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in NEEDS_RANKS:
            raise AttributeError(name)
        base = self.__dict__["_base"]
        if base is None and name in CONTRACTS:
            raise UsageError("--impl conformance.compiled: it names no implementation to compile, as :my_kernels does")
        value = _module(name) if base is None else _member(base, name)
        if inspect.ismodule(value):
            return Compiled(self._form, value)
        if name in CONTRACTS and name not in EAGER:
            value = _compiled(value, self._form)
        setattr(self, name, value)  # one graph for all calls
        return value


_default = Compiled({})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Compiled(FORMS[name]) if name in FORMS else getattr(_default, name)
