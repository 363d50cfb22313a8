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
failures = []
for name, call in {
    "fused_topk_with_score_function": lambda x: topk(x, 2, False, None, None, None, "softmax", None)[1],
    "fused_compute_score_for_moe_aux_loss": lambda x: scores_of(x, 2, "softmax")[0],
}.items():
    try:
        if not torch.equal(call(logits), call(logits.contiguous())):
            failures.append(f"{name}: other experts are chosen, without an error")
    except Exception as error:
        failures.append(f"{name} raises: {str(error).splitlines()[0][-90:]}")
has_defect = bool(failures)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print("strided logits in " + "; ".join(failures) if has_defect else "logits may have any strides")
sys.exit(int(has_defect))
