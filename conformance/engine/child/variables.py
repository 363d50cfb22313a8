"""Variables for torch in the children, unless the user has set them.

The process from which children fork imports this module before torch; no other process does.
"""

import os

VARIABLES = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # some hosts hang with multicast
    "NCCL_NVLS_ENABLE": "0",
    # With AMX, a CPU's 16-bit product of an odd number of terms reads one of the next row's, times
    # 0: an infinity or a NaN there makes this row NaN, whoever multiplies by torch.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}

for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)
