"""The losses of one routing step, of a configuration and over ranks.

Each rank computes a share, and the shares add up. N are counts per expert, the scores come from
`aux_loss_scores`, T this rank's tokens in B sequences of S, token t = s · B + b:

    aux      load_balancing_loss of N = Σ over the tp_cp ranks, tokens T · |tp_cp|
    seq      the same with a column per (sequence, expert), tokens S · |tp_cp|, divided by B
    global   N = mean over micro-batches so far of Σ over the tp_dp_cp ranks, tokens T · |tp_dp_cp|
    z        z_loss with coeff / |tp_cp|

With a padding mask the tokens are the valid ones, Σ N / K (of `seq` the average length). All are
divided by `loss_divisor`. Differs: docs/differences.md#router.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config import RankGroup, RouterConfig, RouterRanks, RouterState
from moe_ref.router.balancing import aux_loss_scores, load_balancing_loss, z_loss


class LossTerm(NamedTuple):
    """One loss of a step."""

    value: Tensor  # this rank's share
    attached: Tensor  # its part of the training loss; differs from the value if losses are per token


def z_term(logits_TE: Tensor, config: RouterConfig, padding_mask: Tensor | None, group: RankGroup) -> LossTerm:
    """The z-loss. Per token: times this rank's valid tokens and the ranks, for it is a mean over
    one rank's tokens.
    """
    loss = z_loss(logits_TE, coeff=config.z_loss_coeff / group.size, padding_mask=padding_mask) / config.loss_divisor
    tokens = _valid_tokens(logits_TE, padding_mask) * group.size
    return LossTerm(loss, loss * tokens if config.loss_per_token else loss)


def balancing_terms(
    logits_TE: Tensor,
    config: RouterConfig,
    state: RouterState,
    batch_size: int,
    padding_mask: Tensor | None,
    ranks: RouterRanks,
) -> tuple[dict[str, LossTerm], RouterState]:
    """The balancing losses that are on, and the state with the counts of the global one.

    Per token: times the valid tokens of all ranks that share the sequence.
    """
    if not config.balancing_coeffs:
        return {}, state
    topk, num_experts = config.topk, config.num_experts
    score: dict[str, Any] = {"topk": topk, "score_function": config.score_function}
    scores_TE, map_TE = aux_loss_scores(logits_TE, padding_mask=padding_mask, **score)
    valid = ranks.tp_cp.sum(_valid_tokens(logits_TE, padding_mask))

    def counts(group: RankGroup, sequences: int = 1) -> Tensor:
        return group.sum(map_TE.reshape(-1, sequences * num_experts).sum(0))  # row s, column b · E + e

    def term(name: str, counted: Tensor, now: Tensor, group: RankGroup, sequences: int = 1) -> LossTerm:
        tokens = (
            len(logits_TE) // sequences * group.size if padding_mask is None else now.sum().double() / topk / sequences
        )
        scores = scores_TE.reshape(-1, sequences * num_experts)
        sizes: dict[str, Any] = {"topk": topk, "num_experts": num_experts, "coeff": config.balancing_coeffs[name]}
        loss = load_balancing_loss(scores, counted, total_num_tokens=tokens, **sizes)
        loss = loss / sequences / config.loss_divisor
        return LossTerm(loss, loss * valid if config.loss_per_token else loss)

    terms = {}
    if "aux_loss" in config.balancing_coeffs:
        now = counts(ranks.tp_cp)
        terms["aux_loss"] = term("aux_loss", now, now, ranks.tp_cp)
    if "seq_aux_loss" in config.balancing_coeffs:
        now = counts(ranks.tp_cp, batch_size)
        terms["seq_aux_loss"] = term("seq_aux_loss", now, now, ranks.tp_cp, batch_size)
    if "global_aux_loss" in config.balancing_coeffs:
        now = counts(ranks.tp_dp_cp)
        total, steps = state.global_tokens_per_expert + now, state.global_steps + 1
        state = state._replace(global_tokens_per_expert=total, global_steps=steps)
        terms["global_aux_loss"] = term("global_aux_loss", total.double() / steps, now, ranks.tp_dp_cp)
    return terms, state


def _valid_tokens(logits_TE: Tensor, padding_mask: Tensor | None) -> Tensor:
    """[]: the tokens that are no padding."""
    return (torch.zeros(len(logits_TE), device=logits_TE.device) if padding_mask is None else padding_mask).eq(0).sum()
