"""Finding 3: a strided sorted_index of the chunk sort is read as if it were contiguous."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

rows = torch.arange(10.0, device="cuda")[:, None].repeat(1, 16)
sizes = torch.tensor([3, 0, 1, 4], dtype=torch.int32, device="cuda")
strided = torch.tensor([2, 0, 0, 0, 3, 0, 1, 0], dtype=torch.int32, device="cuda")[::2]  # 2, 0, 3, 1
expected = [3, 0, 1, 2, 4, 5, 6, 7, 8, 9]
try:
    got = te.moe_sort_chunks_by_index(rows, sizes, strided)[:, 0].int().tolist()
except Exception:
    got = expected  # refused, which is not silent
has_defect = got != expected

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(f"rows come as {got}; right is {expected}" if has_defect else "the order is read by its strides, or refused")
sys.exit(int(has_defect))
