"""Finding 17: a lazily negated tensor is read without its minus."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_moe_aux_loss
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

probs = -torch.full((8, 4), 0.25, device="cuda")
negated = torch._neg_view(-probs)  # the values of probs, in memory with the other sign, as of x.conj().imag
counts = torch.tensor([1, 2, 3, 2], dtype=torch.int32, device="cuda")
losses = []
for x in (negated, negated.resolve_neg()):
    try:
        losses.append(fused_moe_aux_loss(x, counts, 8, 4, 1, 1.0).item())
    except Exception:
        losses.append(None)  # refused, which is not silent
has_defect = losses[0] not in (None, losses[1])

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"the loss is {losses[0]}; of the same probs, with the minus applied, {losses[1]}"
    if has_defect
    else "a pending minus is read, or refused"
)
sys.exit(int(has_defect))
