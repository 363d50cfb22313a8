"""Two stages in one launch: permutation or activation, and quantisation.

`permute`, `unpermute` and the four readers of codes are here because they read the results.
"""

from moe_ref.fused.activate_and_quantize import (
    activation_and_quantize,
    activation_backward_and_quantize,
    glu_and_quantize,
    glu_backward_and_quantize,
)
from moe_ref.fused.permute_and_quantize import permute_and_quantize
from moe_ref.permutation.permute import permute, unpermute
from moe_ref.quantization.quantize import amax, codes, dequantize, scales

__all__ = [
    "activation_and_quantize",
    "activation_backward_and_quantize",
    "amax",
    "codes",
    "dequantize",
    "glu_and_quantize",
    "glu_backward_and_quantize",
    "permute",
    "permute_and_quantize",
    "scales",
    "unpermute",
]
