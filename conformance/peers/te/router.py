"""The router through Transformer Engine: choice, scores for the balancing loss, and the loss.

`fused_topk_with_score_function`, `fused_compute_score_for_moe_aux_loss` and `fused_moe_aux_loss` of
transformer_engine.pytorch.router. Of equal keys it may choose any; with fewer than K finite keys it
chooses an expert twice, which no host can see.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.peers.te.part import Part, named
from conformance.peers.te.trace import Unavailable
from moe_ref.config import (
    AuxScores,
    Routed,
    TopK,
    check_load_balancing_loss,
    check_logits,
    check_score_function,
    check_topk,
    check_topk_routing,
)

MOST_TOKENS = 2**31 - 1  # of a loss: it takes a C int


class Router(Part):
    """Functions of moe_ref.router."""

    needs: ClassVar = {
        "topk_routing": ("fused_topk",),
        "topk_indices": ("fused_topk_indices",),
        "aux_loss_scores": ("fused_scores",),
        "load_balancing_loss": ("fused_aux_loss",),
    }

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """The documented limits: no float64, some tokens, whole groups."""
        if isinstance(payload, Tensor) and payload.numel() == 0:
            return f"{function} of no token"
        if settings.get("score_function") == "sqrtsoftplus" and not self.probes.sqrtsoftplus:
            return f"{function} by sqrtsoftplus"
        groups, group_topk = settings.get("num_groups"), settings.get("group_topk")
        if (
            groups
            and group_topk
            and (settings["topk"] % group_topk or settings["topk"] // group_topk > payload.shape[1] // groups)
        ):
            return (
                f"{function} of topk {settings['topk']} in {group_topk} groups of {payload.shape[1] // groups} experts"
            )
        bias = settings.get("expert_bias")
        if bias is not None and bias.dtype != torch.float32:
            return f"expert_bias of {named(bias)}"
        return super().supports(function, payload, settings)

    def declares(self, function: str) -> dict[str, Any]:
        """Before 2.13 sums are in the logits' dtype."""
        if self.complete or function == "load_balancing_loss" or self.probes.float32_scores:
            return {}
        return {"accumulator": "storage"}

    def _wide(self, logits: Tensor) -> Tensor:
        """Logits in float32, where a release computes in their dtype."""
        if self.complete and logits.dtype != torch.float32 and not self.probes.float32_scores:
            self.trace.step("logits in float32")
            return logits.float()
        return logits

    def topk_routing(
        self, logits: Tensor, *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
        num_groups: int | None = None, group_topk: int | None = None, scaling_factor: float | None = None,
        expert_bias: Tensor | None = None,
    ) -> Routed:  # fmt: skip
        """`moe_ref.topk_routing` without `precomputed_indices`."""
        choice = (topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, None)
        return Routed(*self._chosen(logits, choice, pre_softmax))

    def topk_indices(
        self, logits: Tensor, *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
        num_groups: int | None = None, group_topk: int | None = None, scaling_factor: float | None = None,
        expert_bias: Tensor | None = None,
    ) -> TopK:  # fmt: skip
        """`moe_ref.topk_indices` without `precomputed_indices`: experts are written into a tensor
        that is given, and the probs are read from dense ones.
        """
        choice = (topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, None)
        room = torch.empty((len(logits), topk), dtype=torch.int64, device=logits.device)
        probs, indices = self._chosen(logits, choice, pre_softmax, topk_indices=room)
        return TopK(probs.gather(1, indices), indices)

    def _chosen(
        self, logits: Tensor, choice: tuple[Any, ...], pre_softmax: bool, **tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Probs [N,E] in the logits' dtype, and the choice."""
        check_topk_routing(logits, *choice)
        topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, _ = choice
        computed_logits = self._wide(logits)
        self.trace.step("fused_topk_with_score_function")
        probs, chosen = self.features.get("fused_topk")(
            logits=computed_logits,
            topk=topk,
            use_pre_softmax=pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            score_function=score_function,
            expert_bias=expert_bias,
            **tensors,
        )
        return probs if computed_logits is logits else probs.to(logits.dtype), chosen

    def aux_loss_scores(self, logits: Tensor, *, topk: int, score_function: str = "softmax") -> AuxScores:
        """`moe_ref.aux_loss_scores` without `padding_mask`."""
        check_logits(logits)
        check_topk(topk, logits.shape[1])
        check_score_function(score_function)
        if self.complete and topk == 1 and score_function != "softmax" and not self.probes.normalises_one:
            raise Unavailable("scores of topk 1 are not normalised")
        computed_logits = self._wide(logits)
        self.trace.step("fused_compute_score_for_moe_aux_loss")
        routing_map, scores = self.features.get("fused_scores")(
            logits=computed_logits, topk=topk, score_function=score_function
        )
        return AuxScores(scores, routing_map)

    def load_balancing_loss(
        self,
        scores: Tensor,
        tokens_per_expert: Tensor,
        *,
        total_num_tokens: int | Tensor,
        topk: int,
        num_experts: int,
        coeff: float,
    ) -> Tensor:
        """`moe_ref.load_balancing_loss`; the number of tokens is a positive integer of the host."""
        check_load_balancing_loss(scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)
        is_integer = isinstance(total_num_tokens, int) and 0 < total_num_tokens <= MOST_TOKENS
        if self.complete and not is_integer:
            raise Unavailable("total_num_tokens is no positive C int of the host")
        computed_scores = scores.float() if self.complete else scores  # the loss has the dtype of its probs
        self.trace.step("fused_moe_aux_loss")
        loss: Tensor = self.features.get("fused_aux_loss")(
            probs=computed_scores,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=total_num_tokens,
            num_experts=num_experts,
            topk=topk,
            coeff=coeff,
        )
        return loss
