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
ENVIRONMENT = {  # variables for torch in the children, unless the user has set them
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # some hosts hang with multicast
    "NCCL_NVLS_ENABLE": "0",
    # With AMX, a CPU's 16-bit product of an odd number of terms reads one of the next row's, times
    # 0: an infinity or a NaN there makes this row NaN, whoever multiplies by torch.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}


def start() -> Any:
    """The context of all children; idempotent."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before torch starts in any child
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with same_modules():
        forkserver.ensure_running()
    return context
