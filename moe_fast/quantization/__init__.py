"""Low precision: formats, recipes, quantisers."""

from moe_fast.quantization.group_scales import new_quantizer_state, update_scales
from moe_fast.quantization.quantize import quantize
from moe_fast.quantization.quantized import amax, codes, dequantize, scales

__all__ = [
    "amax",
    "codes",
    "dequantize",
    "new_quantizer_state",
    "quantize",
    "scales",
    "update_scales",
]
