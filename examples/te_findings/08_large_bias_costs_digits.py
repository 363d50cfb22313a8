"""Finding 8: a large expert bias costs the digits of the probabilities."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_topk_with_score_function as topk
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

logits = torch.randn(256, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
errors = []
for size in (0.0, 64.0):
    bias = torch.full((8,), size, device="cuda")  # the same for all: it changes no choice
    probs, chosen = topk(logits, 4, False, None, None, None, "sigmoid", bias)
    score = logits.double().sigmoid() * chosen
    errors.append((probs.double() - score / score.sum(1, keepdim=True)).abs().max().item())
has_defect = errors[1] > 5 * errors[0]

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"largest error {errors[0]:.1e} without a bias, {errors[1]:.1e} with a bias of 64"
    if has_defect
    else "the bias chooses, and does not change the probabilities"
)
sys.exit(int(has_defect))
