"""Defects of the router's choice, weights and losses at the edges of inputs; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

EDGE = "a mistake that loads at the edge invite"


# ---- gate and jitter


# ---- the choice


# ---- the weights


# ---- capacity


def _product_with_the_map(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Ranks probs · map: an unrouted token is a 0, which is more than a negative prob."""
    out = drop(probs, routing_map, **settings)
    if settings.get("drop_policy", "probs") != "probs" or settings.get("pad_to_capacity") or not probs.numel():
        return out
    product = torch.where(routing_map != 0, probs.detach(), 0.0)
    best = product.sort(dim=0, descending=True, stable=True).indices[: settings["capacity"]]
    kept = torch.zeros_like(out.routing_map).scatter(0, best, True) & (routing_map != 0)
    return out._replace(probs=torch.where(kept, probs, 0), routing_map=kept)


# ---- losses


DEFECTS: tuple[Defect, ...] = (
    Defect("U18", "an unrouted token is more than a negative prob", EDGE, {"drop_tokens": _product_with_the_map}),
)
