"""Defects of the gate's loops over columns and tokens, which a short sum does not show; see
`planted`.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

WIDE = 256  # terms of two steps of a loop


def _without_a_third_step(gate: Wrapper, x: Tensor, weight: Tensor, /, **settings: Any) -> Any:
    """Columns past the second step are left out."""
    if x.dim() == 2 and x.shape[1] > WIDE and x.dtype in (torch.bfloat16, torch.float16):
        x = torch.where(torch.arange(x.shape[1], device=x.device) < WIDE, x, 0)
    return gate(x, weight, **settings)


def _weights_of_the_first_tokens(gate: Wrapper, x: Tensor, weight: Tensor, /, **settings: Any) -> Any:
    """The gradient of the weights leaves out tokens past the second step."""
    if x.dim() != 2 or len(x) <= WIDE or x.dtype not in (torch.bfloat16, torch.float16):
        return gate(x, weight, **settings)
    return torch.cat([gate(x[:WIDE], weight, **settings), gate(x[WIDE:], weight.detach(), **settings)])


LOOP = "a mistake that a loop over a sum invites"
DEFECTS: tuple[Defect, ...] = (
    Defect("T04", "a third step over the columns is left out", LOOP, {"gate": _without_a_third_step}),
    Defect("T05", "a third step over the tokens is left out", LOOP, {"gate": _weights_of_the_first_tokens}),
)
