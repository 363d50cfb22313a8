"""Terms that keep the experts' loads even: balancing losses, z-loss, and the expert bias.

Mirrors `compute_routing_scores_for_aux_loss`, `switch_load_balancing_loss_func`, `z_loss_func`,
`MoEAuxLossAutoScaler` and `get_updated_expert_bias` of megatron.core.transformer.moe.moe_utils, and
`fused_compute_score_for_moe_aux_loss` and `fused_moe_aux_loss` of
transformer_engine.pytorch.router. Differs: docs/differences.md#router.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ref.config import (
    AuxScores,
    check_coeff,
    check_load_balancing_loss,
    check_logits,
    check_loss_scale,
    check_padding_mask,
    check_score_function,
    check_topk,
    check_update_expert_bias,
)
from moe_ref.rounding import accumulator_dtype, round_to
from moe_ref.router.scores import SCORES, normalised
from moe_ref.router.selection import best


def aux_loss_scores(
    logits_TE: Tensor, *, topk: int, score_function: str = "softmax", padding_mask: Tensor | None = None
) -> AuxScores:
    """Scores and choice as the balancing losses see them: of all experts, without bias, groups,
    scaling or capacity.

        scores = softmax(x), or s / (Σ_E s + 1e-20) with s = σ(x) or √ln(1+exp x), also for K = 1
        routing_map = the K largest scores of each token; of equal ones the lower expert

    Rows of padding are 0 and False, whatever they hold. A row with NaN or +∞, or of nothing but -∞
    with softmax, has unspecified scores; sqrtsoftplus has no specified gradient in a row with a
    logit below -87.

    Args:
        logits_TE: floating point.
        topk, score_function: K, and "softmax", "sigmoid" or "sqrtsoftplus", as in `topk_indices`.
        padding_mask: [T], True for padding.

    Returns:
        `AuxScores`, in float32 (float64 for float64 logits).

    Raises:
        ValueError: see `moe_ref.config`: check_logits, check_topk, check_score_function,
            check_padding_mask.
    """
    check_logits(logits_TE)
    check_topk(topk, logits_TE.shape[1])
    check_score_function(score_function)
    check_padding_mask(padding_mask, len(logits_TE))
    valid_T1 = (
        torch.ones_like(logits_TE[:, :1], dtype=torch.bool) if padding_mask is None else padding_mask[:, None] == 0
    )
    scores_TE = SCORES[score_function](
        torch.where(valid_T1, logits_TE, 0)
    )  # whatever padding holds, NaN included, is not read
    if score_function != "softmax":
        scores_TE = normalised(scores_TE)
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, best(scores_TE.detach(), topk), True)
    return AuxScores(torch.where(valid_T1, scores_TE, 0), map_TE & valid_T1)


def load_balancing_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    *,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    """The balancing loss of the Switch Transformer, this rank's share of it.

        loss = coeff · E / (K · N²) · Σ_j tokens_per_expert[j] · Σ_t scores[t, j]
        N    = total_num_tokens

    Columns may be several times the experts: a sequence loss folds B sequences into B·E columns.
    Shares over the ranks whose counts are in `tokens_per_expert` add up to the whole; uniform
    routing and scores make coeff.

    Args:
        scores: [rows, columns] floating point.
        tokens_per_expert: [columns], summed over all ranks that share the loss; gets no gradient.
        total_num_tokens: N, tokens on all those ranks; 0 makes a loss of 0. A tensor has one
            element, which the host does not read. For a sequence loss with padding it is the mean
            length, which may be less than 1.
        topk, num_experts: K and E.
        coeff: c ≥ 0.

    Returns:
        [] in float32 (float64 for float64 scores). dscores[t, j] = dloss · coeff · E / (K · N²) ·
        tokens_per_expert[j].

    Raises:
        ValueError: see `moe_ref.config.check_load_balancing_loss`.
    """
    check_load_balancing_loss(scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)
    accumulator = accumulator_dtype(scores.dtype)
    per_column = round_to(scores, accumulator).sum(0) * tokens_per_expert.detach().to(accumulator)
    total = torch.as_tensor(total_num_tokens, device=scores.device).reshape(()).to(accumulator)
    tokens = torch.where(total > 0, total, 1)
    factor = torch.where(total > 0, coeff * num_experts / topk / tokens / tokens, 0.0)
    return per_column.sum() * factor


def z_loss(logits_TE: Tensor, *, coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """The penalty on large logits.

        loss = coeff · mean_t (ln Σ_e exp x_te)²     over tokens that are no padding; 0 without any

    Args:
        logits_TE: floating point.
        coeff: c ≥ 0, already divided by the ranks that compute the same loss.
        padding_mask: [T], True for padding.

    Returns:
        [] in float32 (float64 for float64 logits). dx_te = dloss · coeff · 2 · lse_t ·
        softmax(x)_te / n.

    Raises:
        ValueError: see `moe_ref.config`: check_logits, check_coeff, check_padding_mask.
    """
    check_logits(logits_TE)
    check_coeff(coeff)
    check_padding_mask(padding_mask, len(logits_TE))
    if padding_mask is not None:
        logits_TE = logits_TE[padding_mask == 0]
    square_T = round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).logsumexp(1) ** 2
    return coeff * square_T.sum() / max(len(square_T), 1)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.full_like(ctx.like, ctx.scale), None


def attach_loss(x: Tensor, loss: Tensor, *, scale: float = 1.0) -> Tensor:
    """x itself, with a loss attached.

        out = x;   dx = dout;   dloss = scale, whatever dout is

    The balancing losses ride on probs and the z-loss on logits: a loss gets its gradient only if
    its carrier does.

    Args:
        x: any shape, floating point; the carrier.
        loss: one element, floating point.
        scale: the factor of the training loss, divided by the micro-batches.

    Raises:
        ValueError: see `moe_ref.config.check_loss_scale`.
    """
    check_loss_scale(scale)
    return _AttachLoss.apply(x, loss, scale)


def update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, *, update_rate: float) -> Tensor:
    """The next bias: up where an expert had fewer tokens than the average, down where it had more.

        bias'[e] = bias[e] + update_rate · sign(mean(c) - c[e]),   sign(0) = 0

    Args:
        expert_bias: [E] float32. In bf16 a step of 1e-3 would vanish once the bias is 0.5.
        tokens_per_expert: c, [E] counts of the whole global batch, summed over all ranks.
        update_rate: ≥ 0.

    Returns:
        [E] float32, a new tensor.

    Raises:
        ValueError: a bias that is not float32 or float64, counts of another shape, a rate that is
            no number ≥ 0.
    """
    check_update_expert_bias(expert_bias, tokens_per_expert, update_rate)
    count = tokens_per_expert.double()  # exact below 2⁵³, and so is the comparison E · c with Σ c
    direction = (count.sum() - len(count) * count).sign()
    return expert_bias + update_rate * direction.to(expert_bias.dtype)
