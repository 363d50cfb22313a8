"""Two stages in one launch: permutation or activation, and quantisation."""

from typing import Any

from torch import Tensor

from moe_fast import permutation, quantization
from moe_fast.declared import COMPUTED, SUM, Family
from moe_fast.experts.activations import check_probs
from moe_fast.fused.activate_and_quantize import (
    activation_and_quantize,
    activation_backward_and_quantize,
    glu_and_quantize,
    glu_backward_and_quantize,
)
from moe_fast.fused.permute_and_quantize import permute_and_quantize
from moe_fast.permutation import permute, unpermute
from moe_fast.quantization import amax, codes, dequantize, scales

_QUANTIZED = COMPUTED


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    if function != "permute_and_quantize":
        check_probs(settings.get("probs"))


_family = Family(
    {
        permute_and_quantize: SUM,  # the host does not wait if num_rows or capacity is given
        glu_and_quantize: _QUANTIZED,
        glu_backward_and_quantize: _QUANTIZED | {"differentiable": False},
        activation_and_quantize: _QUANTIZED,
        activation_backward_and_quantize: _QUANTIZED | {"differentiable": False},
    },
    _check,
    {permutation: (permute, unpermute), quantization: (amax, codes, dequantize, scales)},
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
