"""Routers of Hugging Face transformers, each given logits.

moe-conformance run --impl conformance.peers.hf_routers:Mixtral      # or Qwen3, GptOss
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe_ref.config import Routed, check_topk_routing


class _Logits(Tensor):
    """A weight whose product with the logits is the logits, including infinities."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.nn.functional.linear else super().__torch_function__(func, types, args, kwargs)


def routed(router: Any, logits: Tensor, topk: int, bias: Tensor | None = None, **config: Any) -> Routed:
    """The router's choice, dense."""
    sizes = {"num_experts_per_tok": topk} | dict.fromkeys(
        ("num_local_experts", "num_experts", "hidden_size"), logits.shape[1]
    )
    module = router(SimpleNamespace(**sizes, **config)).to(logits.device)
    if bias is not None:
        module.e_score_correction_bias = bias
    del module.weight
    module.weight = torch.zeros(0).as_subclass(_Logits)
    _, weights, indices = module(logits)
    probs = torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device).scatter(1, indices, weights)
    return Routed(probs, torch.zeros_like(probs, dtype=torch.bool).scatter(1, indices, True))


class Mixtral:
    """A softmax over all experts, normalised over the chosen ones, which is the softmax over those.
    In float32.
    """

    scope = "dtype=float32"

    @staticmethod
    def supports(function: str, **arguments: Any) -> str | None:
        """Weights are float32, whatever the dtype of the logits is."""
        dtype = arguments["logits"].dtype
        return None if dtype == torch.float32 else f"logits of {dtype}: the weights are float32"

    @staticmethod
    def topk_routing(logits: Tensor, *, topk: int) -> Routed:
        """`moe_ref.topk_routing`."""
        check_topk_routing(logits, topk, "softmax", None, None, None, None, None)
        return routed(MixtralTopKRouter, logits, topk)


class Qwen3:
    """The same in the dtype of the logits; with pre_softmax without norm_topk_prob."""

    @staticmethod
    def declares(function: str) -> dict[str, Any]:
        """The softmax is in float32, of float64 logits too."""
        return {"accumulator": "float32_only"}

    @staticmethod
    def topk_routing(logits: Tensor, *, topk: int, pre_softmax: bool = False) -> Routed:
        """`moe_ref.topk_routing`."""
        check_topk_routing(logits, topk, "softmax", None, None, None, None, None)
        return routed(Qwen3MoeTopKRouter, logits, topk, norm_topk_prob=not pre_softmax)


class GptOss:
    """A softmax of the chosen logits, in their dtype."""

    @staticmethod
    def declares(function: str) -> dict[str, Any]:
        """The softmax is in the logits' dtype."""
        return {"accumulator": "storage"}

    @staticmethod
    def topk_routing(logits: Tensor, *, topk: int) -> Routed:
        """`moe_ref.topk_routing`."""
        check_topk_routing(logits, topk, "softmax", None, None, None, None, None)
        return routed(GptOssTopKRouter, logits, topk)
