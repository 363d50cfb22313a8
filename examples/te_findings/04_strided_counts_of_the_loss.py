"""Finding 4: strided counts of the balancing loss are read as if they were contiguous."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_moe_aux_loss
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

probs = torch.full((8, 4), 0.25, device="cuda")
strided = torch.tensor([1, 0, 2, 0, 3, 0, 2, 0], dtype=torch.int32, device="cuda")[::2]  # 1, 2, 3, 2
losses = []
for counts in (strided, strided.contiguous()):
    try:
        losses.append(fused_moe_aux_loss(probs, counts, 8, 4, 1, 1.0).item())
    except Exception:
        losses.append(None)  # refused, which is not silent
has_defect = losses[0] not in (None, losses[1])

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"the loss is {losses[0]}; of the same counts, contiguous, {losses[1]}"
    if has_defect
    else "counts are read by their strides, or refused"
)
sys.exit(int(has_defect))
