"""Low precision: quantisers, and the codes and scales that they compute."""

from moe_fast.declared import COMPUTED, COPY, READ, Family
from moe_fast.quantization.group_scales import update_scales
from moe_fast.quantization.quantize import quantize
from moe_fast.quantization.quantized import amax, codes, dequantize, scales
from moe_ref.config.state import new_quantizer_state

_family = Family(
    {
        quantize: COMPUTED,
        codes: COPY,
        scales: READ,
        amax: READ,
        dequantize: COMPUTED,
        new_quantizer_state: COPY,
        update_scales: COMPUTED,
    }
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
