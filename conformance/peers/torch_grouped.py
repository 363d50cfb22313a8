"""torch.nn.functional.grouped_mm: grouped products of torch.

    moe-conformance run --impl conformance.peers.torch_grouped

Rows past the last offset are not repaired, and nothing is checked but by the rules of
`moe_ref.config`. It has no bias per expert, and no scales: `_scaled_grouped_mm` has no CPU kernel.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_ref.config import check_grouped_dgrad, check_grouped_linear, check_grouped_wgrad

VECTOR = 16  # bytes: strides are multiples of it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(function: str, **arguments: Any) -> str | None:
    """The dtypes that its kernels have, and rows of whole 16 bytes."""
    payload = next(iter(arguments.values()))
    if payload.dtype not in DTYPES:
        return f"{function} of {payload.dtype}".replace("torch.", "")
    sides = {n for x in arguments.values() if isinstance(x, Tensor) and x.dtype == payload.dtype for n in x.shape[-1:]}
    sides |= set(arguments["weight"].shape[1:]) if "weight" in arguments else set()
    odd = [n for n in sorted(sides) if n * payload.element_size() % VECTOR]
    return f"{function} of {odd[0]} columns: no whole {VECTOR} bytes" if odd else None


def declares(function: str) -> dict[str, Any]:
    """The kernels read the counts on the device, not on the host."""
    return {"unchecked": ("tokens_per_expert",), "noncontiguous": False, "differentiable": function == "grouped_linear"}


def _ends(tokens_per_expert: Tensor) -> Tensor:
    """The end of each expert's rows."""
    return tokens_per_expert.cumsum(0, dtype=torch.int32)


def grouped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """x W_eᵀ of each expert's rows."""
    check_grouped_linear(rows, weight, tokens_per_expert, None)
    return grouped_mm(rows, weight.mT, offs=_ends(tokens_per_expert))


def grouped_dgrad(d_out: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """d_out W_e of each expert's rows."""
    check_grouped_dgrad(d_out, weight, tokens_per_expert)
    return grouped_mm(d_out, weight, offs=_ends(tokens_per_expert))


def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """d_outᵀ x of each expert's rows."""
    check_grouped_wgrad(d_out, rows, tokens_per_expert, None)
    return grouped_mm(d_out.mT, rows, offs=_ends(tokens_per_expert))
