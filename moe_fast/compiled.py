"""The functions of `moe_fast`, each compiled into one graph, for the suite: `--impl
moe_fast.compiled`.

The graph is not lowered to machine code (backend "aot_eager"). What is judged are the operators,
their shapes and their gradients, as any backend sees them. An illegal call raises its own error,
not the compiler's. Dispatchers are missing. Functions that read the device or compute nothing are
not compiled.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch

import moe_fast
from moe_fast import dispatch
from moe_fast.launch.registry import PUBLIC

BACKEND = "aot_eager"
ANY_NUMBER = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # of shapes
functorch.donated_buffer = False  # in this process, for laws that run a backward again
# arguments that are not offered: a process group, a list that a backward extends, a function of the
# caller's, tensors that a call raises; and what a layer saves, which the compiler chooses
NOT_OFFERED = ("ranks", "group", "wgrads", "rows_again", "amaxes")
NOT_OF_A_LAYER = (*NOT_OFFERED, "recompute")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    graph = torch.compile(function, fullgraph=True, backend=BACKEND)

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


_traced = {function.__name__ for function in PUBLIC}
_names = [name for name in moe_fast.__all__ if name not in (*dispatch.__all__, "declares", "supports")]
_functions = {name: getattr(moe_fast, name) for name in _names}
globals().update({name: _compiled(f) if name in _traced else f for name, f in _functions.items()})
declares, supports = moe_fast.declares, moe_fast.supports
__all__ = [*_names, "declares", "supports"]
