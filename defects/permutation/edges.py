"""Defects of permutation at the edges of sizes, in gradients and in layouts; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.families.permutation.permute import Permute
from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import (
    read_as_contiguous,
    with_backward,
    with_gradient,
)

LAYOUT = "a mistake that contiguous tensors do not show"
EMPTY = "a mistake that empty slots and empty experts invite"


def _stride_of_one_column(base: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    """Column stride 1 is taken for contiguous; of rows of one element it says nothing."""
    narrow = x.dim() == 2 and x.shape[1] == 1 and x.stride(0) != 1 and len(x) > 1
    return base(with_backward(x, read_as_contiguous(x), lambda g: g) if narrow else x, *rest, **settings)


# ---- unpermute


def _merged(change: Callable[[Tensor, Tensor], Tensor]) -> Wrapper:
    """unpermute with change(probs, rows)."""

    def wrapper(base: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
        if isinstance(settings.get("probs"), Tensor) and settings["probs"].is_floating_point():
            settings["probs"] = change(settings["probs"], rows)
        return base(rows, row_map, **settings)

    return wrapper


def _from_the_start(probs: Tensor, rows: Tensor) -> Tensor:
    shifted = probs.storage_offset() and probs.is_contiguous()
    return with_values(probs, lambda x: read_as_contiguous(probs, 0)) if shifted else probs


# ---- chunks


# ---- indices


def _gradient_of_an_empty_slot(to_map: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    """Slot -1 reads the gradient of the last expert, as numpy's index does."""
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["last"] = g[:, -1:]
        return g

    back: Change = lambda g: torch.where(indices < 0, seen["last"].expand_as(g).to(g.dtype), g)  # noqa: E731
    out = to_map(indices, with_gradient(probs, back), **settings)
    return out._replace(probs=with_gradient(out.probs, noted))


BOTH = (Permute.function, "unpermute")


DEFECTS: tuple[Defect, ...] = (
    Defect("X09", "rows of one column are taken for contiguous", LAYOUT, dict.fromkeys(BOTH, _stride_of_one_column)),
    Defect("X13", "the storage offset of merging probs is forgotten", LAYOUT, {BOTH[1]: _merged(_from_the_start)}),
    Defect(
        "X19",
        "an empty slot gets the gradient of the last expert",
        EMPTY,
        {"indices_to_multihot": _gradient_of_an_empty_slot},
    ),
)
