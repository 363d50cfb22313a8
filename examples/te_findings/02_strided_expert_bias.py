"""Finding 2: a strided expert_bias is read as if it were contiguous: other experts are chosen."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_topk_with_score_function as topk
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

logits = torch.zeros(1, 3, device="cuda")
strided = torch.tensor([0.0, 5.0, 0.0, 5.0, 1.0, 5.0], device="cuda")[::2]  # 0, 0, 1
chosen = []
for bias in (strided, strided.contiguous()):
    try:
        chosen.append(topk(logits, 1, False, None, None, None, "sigmoid", bias)[1].int().argmax().item())
    except Exception:
        chosen.append(2)  # refused, which is not silent
has_defect = chosen[0] != 2

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"bias 0, 0, 1 chooses expert {chosen[0]}; the same bias, contiguous, chooses {chosen[1]}"
    if has_defect
    else "a strided bias chooses as a contiguous one, or is refused"
)
sys.exit(int(has_defect))
