"""Finding 5: the scores of the balancing loss choose the smaller score, or too few experts."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss as scores_of
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

far = torch.tensor([[-1e6, 0.0]], device="cuda")  # softmax probabilities 0 and 1
chosen = scores_of(far, 1, "softmax")[0][0].int().tolist()
masked = torch.tensor([[0.5] + [-torch.inf] * 7], device="cuda")
count = int(scores_of(masked, 2, "sqrtsoftplus")[0].sum())
wrong = chosen != [0, 1] or count != 2

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"of softmax probabilities 0 and 1 it chooses {chosen}; with -inf among logits, {count} of 2 experts"
    if wrong
    else "the larger score is chosen, and always as many experts as asked for"
)
sys.exit(int(wrong))
