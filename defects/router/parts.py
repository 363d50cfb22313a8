"""Parts of planted defects: the sort keys of a choice, and a call with other experts or weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper
from moe_ref.router.scores import SCORES


def keys_of(logits: Tensor, settings: dict[str, Any]) -> Tensor:
    """The sort keys of the choice, float32."""
    function = settings.get("score_function", "softmax")
    keys = (
        logits.detach().float()
        if function == "softmax" and not settings.get("pre_softmax")
        else SCORES[function](logits.detach().float())
    )
    return keys if settings.get("expert_bias") is None else keys + settings["expert_bias"]


def chosen_by(index: Tensor, base: Wrapper, logits: Tensor, settings: dict[str, Any]) -> Any:
    """The base's weights for the experts chosen by the defect."""
    left = {name: x for name, x in settings.items() if name not in ("num_groups", "group_topk")}
    return base(logits, **left | {"precomputed_indices": index})


def reweighted(base: Wrapper, logits: Tensor, settings: dict[str, Any], weigh: Callable[[Tensor], Tensor]) -> Any:
    """The base's choice with the weights weigh(index), [T,K]; scattered to [T,E] if dense."""
    out = base(logits, **settings)
    dense = hasattr(out, "routing_map")
    index = (out.routing_map != 0).nonzero()[:, 1].reshape(len(logits), settings["topk"]) if dense else out.indices
    weights = (weigh(index) * (settings.get("scaling_factor") or 1.0)).to(logits.dtype)
    return out._replace(probs=torch.zeros_like(out.probs).scatter(1, index, weights) if dense else weights)
