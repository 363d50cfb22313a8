"""megatron-core 0.9 to 0.16 as an implementation: what of `moe_ref` a release has, by its names.

Names of functions changed between releases; they are looked up, and what is missing is not offered.
"""

from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moe_ref.config import AuxScores, PaddedMap, Routed

_routing: Any = getattr(
    moe_utils, "topk_routing_with_score_function", getattr(moe_utils, "topk_softmax_with_capacity", None)
)


def declares(function: str) -> dict[str, Any]:
    """Weights are computed in the dtype of the logits."""
    return {"accumulator": "storage"} if function == "topk_routing" else {}


if hasattr(moe_utils, "group_limited_topk"):

    def topk_routing(logits: Tensor, *, topk: int, num_groups: int, group_topk: int) -> Routed:
        """The choice in groups, and its weights."""
        return Routed(*_routing(logits, topk, num_groups=num_groups, group_topk=group_topk)[:2])


def jitter(x: Tensor, *, eps: float) -> Tensor:
    """TopKRouter.apply_input_jitter of a router that has jittered nothing yet."""
    router = SimpleNamespace(config=SimpleNamespace(moe_input_jitter_eps=eps), input_jitter=None)
    return TopKRouter.apply_input_jitter(router, x)


if hasattr(moe_utils, "compute_routing_scores_for_aux_loss"):

    def aux_loss_scores(logits: Tensor, *, topk: int, score_function: str = "softmax") -> AuxScores:
        """The map comes first in the package."""
        routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, topk, score_function)
        return AuxScores(scores, routing_map)


if hasattr(moe_utils, "pad_routing_map"):

    def pad_routing_map(routing_map: Tensor, *, align: int) -> PaddedMap:
        """The package writes into its argument, so it gets a copy."""
        none: Any = None
        return PaddedMap(moe_utils.pad_routing_map(routing_map.clone(), align), none)
