"""The process from which children fork, with torch loaded; starts while this one imports torch."""

from multiprocessing import forkserver, get_context
from typing import Any

from conformance.engine.child.environment import same_modules

PRELOADED = [
    "conformance.engine.child.environment",
    "conformance.engine.child.variables",  # before torch
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "conformance.engine.child.compilers",
    "conformance.engine.child.child",
    "conformance.engine.child.frozen",
]


def start() -> Any:
    """The context of all children; idempotent."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with same_modules():
        forkserver.ensure_running()
    return context
