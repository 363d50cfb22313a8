"""Defects of permutation that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import always, only

SEVERAL = "a mistake that one option alone does not show"
OWNER = "a mistake about whose memory it is"


def _unlisted_have_a_gradient(
    function: Wrapper, right: Any, routing_map: Tensor, probs: Tensor, **settings: Any
) -> Any:
    """An expert that finds no slot has the gradient of the last slot."""
    if not probs.requires_grad:
        return right
    nth = (routing_map != 0).cumsum(1) * (routing_map != 0)
    over = torch.where(nth == settings["topk"] + 1, probs, 0).sum(1, keepdim=True)
    lost = torch.cat([torch.zeros_like(right.probs[:, :-1]), (over - over.detach()).to(right.probs.dtype)], 1)
    return right._replace(probs=right.probs + lost)


def _row_map_by_shape() -> Wrapper:
    """The row map is cached by the shape of the routing map and the number of its ones."""
    kept: dict[Any, Any] = {}

    def planted(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
        out = permute(tokens, routing_map, **settings)
        key = (tuple(routing_map.shape), tuple(out.tokens_per_expert.tolist()), len(out.rows), settings.get("align"))
        return out._replace(row_map=kept.setdefault(key, out.row_map))

    return planted


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE015",
        "an expert without a slot has the gradient of the last",
        SEVERAL,
        {"multihot_to_indices": only(always, _unlisted_have_a_gradient)},
    ),
    ("AE019", "a row map is cached by its counts", OWNER, {"permute": _row_map_by_shape()}),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
