"""Finding 18: second derivatives of the fused router are missing, without an error."""

import sys

import torch

try:
    from transformer_engine import __version__ as version
    from transformer_engine.pytorch.router import fused_topk_with_score_function
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

logits = torch.randn(3, 33, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
options = {"use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None}
probs, _ = fused_topk_with_score_function(logits, 3, **options, score_function="softmax", expert_bias=None)
(gradient,) = torch.autograd.grad(probs.square().sum(), logits, create_graph=True)
penalty = gradient.square().sum() + logits.sum()  # the second term has the derivative 1
try:
    (second,) = torch.autograd.grad(penalty, logits)
    has_defect = torch.equal(second, torch.ones_like(second))
except RuntimeError:
    has_defect = False  # refused, which is not silent

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
message = "has no derivative, without an error" if has_defect else "has a derivative, or is refused"
print(f"the penalty of the gradient {message}")
sys.exit(int(has_defect))
