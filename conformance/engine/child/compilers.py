"""Loads torch's compiler, and Triton with it, where there is a GPU, when imported.

The process from which children fork imports this: each of them would take a second for it. Without
a GPU, or with TRITON_INTERPRET, an implementation chooses Triton's interpreter before it loads
Triton.
"""

import os
from importlib import import_module

from conformance.private_parts import available

# by the driver's library of management: CUDA itself, once asked, works in no process that forks
_count = available("torch.cuda._device_count_nvml") or int

if _count() > 0 and not os.environ.get("TRITON_INTERPRET"):
    import_module("torch._dynamo")  # its import is all that it is for, which a linter would remove
