"""Finding 11: a balancing loss over 2^31 tokens raises, and so does a fraction of a token."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_moe_aux_loss
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

probs, counts = torch.full((4, 4), 0.25, device="cuda"), torch.ones(4, dtype=torch.int32, device="cuda")
raised = []
for total in (2**31 + 8, torch.tensor(0.5, device="cuda")):
    try:
        fused_moe_aux_loss(probs, counts, total, 4, 1, 1.0)
    except Exception as error:
        raised.append(f"{total}: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
has_defect = bool(raised)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print("total_num_tokens of " + "; ".join(raised) if has_defect else "any number of tokens is taken")
sys.exit(int(has_defect))
