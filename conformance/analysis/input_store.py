"""An activation's input kept as E4M3 codes without a scale, at which its gradients are taken."""

import torch
from torch import Tensor

from conformance.analysis.running import Running
from moe_ref.quantization.formats import E4M3, decode, encode

# larger numbers round past 448, E4M3's largest: a cast may saturate or give NaN
MOST_KEPT = 464.0


def in_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 numbers, ties to even, in x's dtype; float64 is rounded to float32 first."""
    return decode(encode(x.float(), E4M3), E4M3, dtype=x.dtype)


def beyond_e4m3(x: Tensor) -> Tensor:
    """Where casts to E4M3 may disagree about the code: larger numbers saturate or become NaN."""
    return x.abs() > MOST_KEPT


def kept_in_e4m3(h: Running) -> Running:
    """The E4M3 interval of h: encoding is monotonic. Unknown where h may exceed the range."""
    value, low, high = (in_e4m3(h.value + side * h.error) for side in (0, -1, 1))
    error = torch.where(value.isfinite(), torch.maximum(high - value, value - low), 0.0)
    return Running(value, torch.where(beyond_e4m3(h.value.abs() + h.error), torch.inf, error), h.dtype)
