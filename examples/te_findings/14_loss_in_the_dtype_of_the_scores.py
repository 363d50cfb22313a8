"""Finding 14: the balancing loss has the scores' dtype, so bfloat16 keeps three digits of it."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_moe_aux_loss
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

probs = torch.full((512, 4), 0.25, device="cuda") + torch.arange(4, device="cuda") / 512
counts = torch.tensor([127, 128, 129, 128], dtype=torch.int32, device="cuda")
losses = [fused_moe_aux_loss(x, counts, 512, 4, 1, 0.01) for x in (probs.bfloat16(), probs.bfloat16().float())]
has_defect = losses[0].dtype != torch.float32

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"of the same scores: {losses[0].item():.9f} in {losses[0].dtype}, {losses[1].item():.9f} in float32"
    if has_defect
    else "the loss is float32"
)
sys.exit(int(has_defect))
