"""Finding 9: logits that are not contiguous raise in the router."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss as scores_of
    from transformer_engine.pytorch.router import fused_topk_with_score_function as topk
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

logits = torch.randn(4, 16, device="cuda")[:, ::2]
raised = []
for name, call in {
    "fused_topk_with_score_function": lambda: topk(logits, 2, False, None, None, None, "softmax", None),
    "fused_compute_score_for_moe_aux_loss": lambda: scores_of(logits, 2, "softmax"),
}.items():
    try:
        call()
    except Exception as error:
        raised.append(f"{name}: {str(error).splitlines()[0][-90:]}")
wrong = bool(raised)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print("strided logits raise in " + "; ".join(raised) if wrong else "logits may have any strides")
sys.exit(int(wrong))
