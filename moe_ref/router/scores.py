"""Score functions: from a row of logits to one number per expert.

Everything here is computed in float32 (float64 for float64 logits); `selection` rounds once, to the
logits' dtype. Mirrors the score functions of
megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from moe_ref.rounding import accumulator_dtype, round_to

EPSILON = 1e-20  # added to a sum that is divided by: moe_utils
FAR = 40  # of a logit: ln(1 + exp(FAR)) is FAR, and ln(1 + exp(-FAR)) is exp(-FAR), to float64's last bit


def softmax(logits: Tensor) -> Tensor:
    """exp(x_e - max x) / Σ_e exp(x_e - max x), over the last dimension.

    An expert of logit -∞ scores exactly 0; a row of -∞ alone is NaN.
    """
    x = round_to(logits, accumulator_dtype(logits.dtype))
    power = (x - x.amax(-1, keepdim=True).detach()).exp() if x.shape[-1] else x
    return power / power.sum(-1, keepdim=True)


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(round_to(logits, accumulator_dtype(logits.dtype)))


def sqrtsoftplus(logits: Tensor) -> Tensor:
    """√ln(1 + exp(x)). Above 20, where they agree to float32's last bit, ln(1 + exp(x)) may be
    taken as x. Below -40 the root is exp(x/2) to float64's last bit, which keeps scores whose
    exp(x) is subnormal.
    """
    x = round_to(logits, accumulator_dtype(logits.dtype))
    return torch.where(x < -FAR, (x.clamp(max=-FAR) / 2).exp(), softplus(x.clamp(min=-FAR), threshold=FAR).sqrt())


SCORES = {"softmax": softmax, "sigmoid": sigmoid, "sqrtsoftplus": sqrtsoftplus}


def normalised(scores: Tensor) -> Tensor:
    """scores / (Σ scores + 1e-20), over the last dimension."""
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)
