"""The router of DeepSeek-V3 in Hugging Face transformers, given logits.

moe-conformance run --impl conformance.peers.hf_deepseek:DeepseekV3
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from conformance.peers.hf_routers import Mixtral, routed
from moe_ref.config import Routed, check_topk_routing


class DeepseekV3:
    """The router chooses by sigmoid scores with a bias, among groups; a group's score is the sum of
    its two best.
    """

    scope = "score=sigmoid and dtype=float32"

    @staticmethod
    def supports(function: str, **arguments: Any) -> str | None:
        """A group's score adds two keys, and a bias is float32; other calls are not supported."""
        if arguments.get("score_function") != "sigmoid":
            return f"topk_routing by {arguments.get('score_function', 'softmax')}"
        groups, group_topk = arguments.get("num_groups"), arguments.get("group_topk")
        if groups and group_topk and arguments["topk"] // group_topk != 2:
            return f"topk_routing of {arguments['topk'] // group_topk} experts a group: its groups count two"
        if arguments["logits"].shape[1] // (groups or 1) < 2:
            return "topk_routing of groups of one expert: its groups count two"
        bias = arguments.get("expert_bias")
        if bias is not None and bias.dtype != torch.float32:
            return f"an expert_bias of {bias.dtype}"
        return Mixtral.supports(function, **arguments)

    @staticmethod
    def topk_routing(
        logits: Tensor, *, topk: int, score_function: str = "softmax", num_groups: int | None = None,
        group_topk: int | None = None, scaling_factor: float | None = None, expert_bias: Tensor | None = None,
    ) -> Routed:  # fmt: skip
        """`moe_ref.topk_routing`; one expert is not normalised."""
        check_topk_routing(logits, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, None)
        groups = {"n_group": num_groups or 1, "topk_group": group_topk or num_groups or 1}
        scale = {"routed_scaling_factor": 1.0 if scaling_factor is None else scaling_factor}
        return routed(DeepseekV3TopkRouter, logits, topk, bias=expert_bias, norm_topk_prob=topk > 1, **groups, **scale)
