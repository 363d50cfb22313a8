"""Defects that were reported of public permutations, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import only

FEW = 4  # rows of a token that a kernel of their number adds


def _narrow_rows(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return rows.dtype in (torch.bfloat16, torch.float16)


def _few_in_the_rows_dtype(unpermute: Wrapper, right: Tensor, rows: Tensor, row_map: Any, **settings: Any) -> Tensor:
    """Up to four rows of a token are added in their own dtype."""

    def added(out: Tensor) -> Tensor:
        sums = out.clone()
        for token in range(len(out)):
            own = (row_map.token_P == token).nonzero().flatten()
            if 2 < len(own) <= FEW:
                total = rows.detach()[own[0]]
                for row in own[1:]:
                    total = total + rows.detach()[row]
                sums[token] = total
        return sums

    return with_values(right, added)


def _narrow_and_plain(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return _narrow_rows(rows) and settings.get("probs") is None


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB29",
        "few rows of a token are added in 16 bits",
        "vLLM #46643",
        {"unpermute": only(_narrow_and_plain, _few_in_the_rows_dtype)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
