"""Finding 5: the scores of the balancing loss choose the smaller score, or too few experts."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss as scores_of
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

far = torch.tensor([[-torch.inf, 0.0]], device="cuda")  # softmax probabilities 0 and 1
chosen = scores_of(far, 1, "softmax")[0][0].int().tolist()
masked = torch.full((3, 8), -torch.inf, device="cuda")
masked[0, 3], masked[1, 2], masked[1, 7] = 0.5, -3.5, 0.0
try:
    counts = scores_of(masked, 2, "sqrtsoftplus")[0].sum(1).tolist()
except RuntimeError:
    counts = [2, 2, 2]  # releases before 2.13 have no such scores
has_defect = chosen != [0, 1] or counts != [2, 2, 2]

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"of softmax probabilities 0 and 1 it chooses {chosen}; with -inf among logits, {counts} experts where K is 2"
    if has_defect
    else "the larger score is chosen, and always K experts"
)
sys.exit(int(has_defect))
