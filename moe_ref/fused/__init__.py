"""Two stages in one launch: permutation or activation, and quantisation."""

from moe_ref.fused.activate_and_quantize import (
    activation_and_quantize,
    activation_backward_and_quantize,
    glu_and_quantize,
    glu_backward_and_quantize,
)
from moe_ref.fused.permute_and_quantize import permute_and_quantize

__all__ = [
    "activation_and_quantize",
    "activation_backward_and_quantize",
    "glu_and_quantize",
    "glu_backward_and_quantize",
    "permute_and_quantize",
]
