"""Low precision: formats, recipes, quantisers."""

from moe_ref.config.state import new_quantizer_state
from moe_ref.quantization.quantize import amax, codes, dequantize, quantize, scales
from moe_ref.quantization.recipes import operands, update_scales

__all__ = ["amax", "codes", "dequantize", "new_quantizer_state", "operands", "quantize", "scales", "update_scales"]
