"""Finding 12: a chunk sort without chunks does not compile, although there are rows past them."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

rows, none = torch.ones(5, 16, device="cuda"), torch.empty(0, dtype=torch.int32, device="cuda")
try:
    has_defect, message = not torch.equal(te.moe_sort_chunks_by_index(rows, none, none), rows), "other rows"
except Exception as error:
    has_defect, message = True, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(f"sorting no chunk: {message}" if has_defect else "rows past no chunk stay")
sys.exit(int(has_defect))
