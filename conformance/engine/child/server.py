"""The process from which children fork, with torch loaded; starts while this one imports torch."""

import os
from multiprocessing import forkserver, get_context
from typing import Any

from conformance.engine.child.environment import same_modules

PRELOADED = [
    "conformance.engine.child.environment",
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "conformance.engine.child.compilers",
    "conformance.engine.child.child",
    "conformance.engine.child.frozen",
]
# some hosts hang with multicast
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def start() -> Any:
    """The context of all children; idempotent."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)  # before torch starts in any child
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with same_modules():
        forkserver.ensure_running()
    return context
