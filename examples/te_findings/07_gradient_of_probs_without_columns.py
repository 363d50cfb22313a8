"""Finding 7: where rows have no column, the probs' gradient of the chunk sort is never written."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

probs = torch.ones(4096, device="cuda", requires_grad=True)
sizes, order = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([4096], [0]))
rows = torch.empty(4096, 0, device="cuda", requires_grad=True)
out = te.moe_sort_chunks_by_index_with_probs(rows, probs, sizes, order)[1]
dirty = [torch.full((4096,), torch.nan, device="cuda") for _ in range(64)]
del dirty  # what the allocator gives next holds NaN
(gradient,) = torch.autograd.grad(out.sum(), probs)
bad = int((gradient != 1).sum())
has_defect = bad > 0

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"{bad} of 4096 gradients of the probs are not 1, as {gradient[:3].tolist()}"
    if has_defect
    else "every gradient of the probs is written"
)
sys.exit(int(has_defect))
