"""The router from logits to probs, map and losses, with what it remembers from step to step.

    logits ── z-loss rides on them ── choice (top-k | Sinkhorn | quantiles) ── capacity ── balancing losses ride on probs ── counts

Mirrors `TopKRouter` of megatron.core.transformer.moe.router and `RouterReplay` of router_replay. State is passed, not kept:
`route` takes one and returns the next; `finish_batch` is what happens once a global batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import (
    MoEConfig,
    Routed,
    RouteOutput,
    RouterLosses,
    RouterState,
    TopK,
    check_logits,
    check_padding_mask,
    check_route,
    check_state_tensors,
    check_topk_routing,
    require,
)
from moe_ref.rounding import accumulator_dtype, round_to
from moe_ref.router.balancing import (
    attach_loss,
    aux_loss_scores,
    load_balancing_loss,
    quantile_routing,
    sinkhorn_routing,
    update_expert_bias,
    update_quantile_bias,
    z_loss,
)
from moe_ref.router.capacity import drop_tokens, expert_capacity
from moe_ref.router.scores import SCORES, normalised
from moe_ref.router.selection import spread, topk_indices

Sum = Callable[[Tensor], Tensor]  # a tensor of this rank -> its sum over the ranks of a group


def alone(x: Tensor) -> Tensor:
    """The sum over a group of one rank."""
    return x


def new_state(config: MoEConfig, device: Any = None) -> RouterState:
    """Nothing learnt, nothing counted."""
    experts = config.num_moe_experts
    assert experts is not None
    zeros, counts = torch.zeros(experts, device=device), torch.zeros(experts, dtype=torch.int64, device=device)
    step = counts.new_zeros(())
    return RouterState(zeros, counts, counts, step, zeros, zeros, step, ())


def state_tensors(state: RouterState) -> dict[str, Tensor]:
    """The state as named tensors, to be saved."""
    named = state._asdict()
    queue = named.pop("replay_queue")
    return named | {f"replay_queue.{i}": indices for i, indices in enumerate(queue)}


def state_from(tensors: Mapping[str, Tensor]) -> RouterState:
    """The state that `state_tensors` made these of.

    Raises:
        ValueError: a tensor is missing, or expert_bias, beta or quantile_sum is not float32: a wrapper that casts every buffer to
            bf16 has been at them, and their small steps would be lost.
    """
    check_state_tensors(tensors)
    plain = [name for name in RouterState._fields if name != "replay_queue"]
    queued = len(tensors) - len(plain)
    return RouterState(
        **{name: tensors[name] for name in plain},
        replay_queue=tuple(tensors[f"replay_queue.{i}"] for i in range(queued)),
    )


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    *,
    state: RouterState,
    batch_size: int = 1,
    padding_mask: Tensor | None = None,
    training: bool = True,
    loss_scale: float = 1.0,
    replay: str = "none",
    replay_target: Tensor | None = None,
    sum_tp_cp: Sum = alone,
    sum_tp_dp_cp: Sum = alone,
) -> RouteOutput:
    """One forward of the router behind its matrix product.

    1. z-loss rides on the logits.
    2. The choice: `topk_indices`, `sinkhorn_routing` or `quantile_routing`; replayed indices take its place.
    3. Capacity: `drop_tokens`, if the configuration has a capacity factor.
    4. Balancing losses, from `aux_loss_scores` of the logits, ride on probs: aux, then seq, then global.
    5. Counts for the expert bias: rows of the map, padding rows left out.

    Steps 1, 4 and 5, and what quantiles learn, only where `training` is set and autograd records: an evaluation, and the first pass of a
    recomputed layer, leave no trace. (Megatron counts in evaluation too.)

    Losses, N counts, a scores, c the coefficient, each rank its share (see `load_balancing_loss`); B sequences of S tokens, t = s · B + b:

        aux      N = sum_tp_cp Σ_t map,                tokens T · |tp_cp|
        seq      the same with a column for each sequence and expert, tokens S · |tp_cp| (average valid length with a mask), / B
        global   N = running mean over the micro-batches of this global batch of sum_tp_dp_cp Σ_t map, tokens T · |tp_dp_cp|
        z        coeff / |tp_cp|

    With a padding mask the tokens are the valid ones: Σ N / K. With `calculate_per_token_loss`, where all gradients are later divided by
    the number of tokens, a balancing loss is attached times the valid tokens of all ranks that share the sequence, and the z-loss, a mean over
    one rank's tokens, times those and the ranks. (Megatron multiplies all by this rank's tokens and the ranks: the same where ranks have
    equally many.) A router of a repeated MTP layer divides all losses by `mtp_num_layers`.

    Args:
        logits_TE: floating point.
        state: from `new_state`, or from the step before; only the returned one is valid afterwards.
        batch_size: B, a divisor of T.
        padding_mask: [T], True for padding. Padding tokens are routed like others, but count in no loss and no count.
        loss_scale: what the training loss is multiplied by; the gradient of each loss.
        replay: "none" · "record", return the chosen indices · "forward", use `replay_target` and queue it · "backward", use
            the oldest queued one, and drop it from the queue.
        replay_target: [T,K] indices for "forward".
        sum_tp_cp, sum_tp_dp_cp: sums over the ranks that share a sequence, and over all that share the batch.

    Returns:
        `RouteOutput`: probs in the logits' dtype, bool map, losses detached, the recorded indices, the next state.

    Raises:
        ValueError: see `moe_ref.config.check_route`; also from the functions above.

    Source: TopKRouter.routing. A static replay buffer is a matter of implementation: here indices are values.
    """
    check_logits(logits_TE)
    check_route(logits_TE, config, batch_size, replay, replay_target, len(state.replay_queue))
    check_padding_mask(padding_mask, len(logits_TE))
    learns = training and torch.is_grad_enabled()
    ranks = int(sum_tp_cp(torch.ones(())))
    losses = {}
    scores_TE = logits_TE
    if learns and config.moe_z_loss_coeff:
        losses["z_loss"] = (
            z_loss(logits_TE, coeff=config.moe_z_loss_coeff / ranks, padding_mask=padding_mask) / config.router_repeats
        )
        tokens = (
            _valid_tokens(logits_TE, padding_mask) * ranks
        )  # of this rank, whose mean it is; it was divided by the ranks
        scores_TE = attach_loss(
            logits_TE,
            losses["z_loss"] * tokens if config.calculate_per_token_loss else losses["z_loss"],
            scale=loss_scale,
        )
    chosen, indices, state = _choose(scores_TE, config, state, replay, replay_target, learns)
    if config.moe_expert_capacity_factor is not None:
        capacity = expert_capacity(
            len(logits_TE),
            num_experts=logits_TE.shape[1],
            topk=config.moe_router_topk,
            capacity_factor=config.moe_expert_capacity_factor,
        )
        how: dict[str, Any] = {
            "drop_policy": config.moe_token_drop_policy,
            "pad_to_capacity": config.moe_pad_expert_input_to_capacity,
        }
        chosen = drop_tokens(*chosen, capacity=capacity, **how)
    probs = chosen.probs
    if learns:
        balancing, state = _balancing_losses(
            logits_TE, config, state, batch_size, padding_mask, sum_tp_cp, sum_tp_dp_cp
        )
        for name, (loss, attached) in balancing.items():
            losses[name] = loss
            probs = attach_loss(probs, attached, scale=loss_scale)
        if config.moe_router_enable_expert_bias:
            counted = chosen.routing_map if padding_mask is None else chosen.routing_map & (padding_mask == 0)[:, None]
            state = state._replace(tokens_per_expert=state.tokens_per_expert + counted.sum(0))
    told = RouterLosses(**{name: loss.detach() for name, loss in losses.items()})
    return RouteOutput(probs, chosen.routing_map, told, indices if replay == "record" else None, state)


def _choose(
    logits_TE: Tensor, config: MoEConfig, state: RouterState, replay: str, replay_target: Tensor | None, learns: bool
) -> tuple[Routed, Tensor | None, RouterState]:
    """The choice, its indices where there are such, and the state."""
    if config.moe_router_load_balancing_type == "sinkhorn":
        return sinkhorn_routing(logits_TE, topk=config.moe_router_topk, training=learns), None, state
    settings = config.router_settings
    if config.moe_router_load_balancing_type == "quantile_balancing":
        how = {name: settings[name] for name in ("topk", "score_function", "pre_softmax", "scaling_factor")}
        out = quantile_routing(logits_TE, state.beta, training=learns, **how)
        if out.quantile is not None:
            state = state._replace(
                quantile_sum=state.quantile_sum + out.quantile, quantile_count=state.quantile_count + 1
            )
        return Routed(out.probs, out.routing_map), None, state
    target = replay_target
    if replay == "forward":
        assert replay_target is not None
        state = state._replace(replay_queue=(*state.replay_queue, replay_target))
    if replay == "backward":
        target, *rest = state.replay_queue
        state = state._replace(replay_queue=tuple(rest))
    bias = state.expert_bias if config.moe_router_enable_expert_bias else None
    chosen = topk_indices(logits_TE, expert_bias=bias, precomputed_indices=target, **settings)
    return spread(chosen, logits_TE.shape[1]), chosen.indices, state


def _balancing_losses(
    logits_TE: Tensor,
    config: MoEConfig,
    state: RouterState,
    batch_size: int,
    padding_mask: Tensor | None,
    sum_tp_cp: Sum,
    sum_tp_dp_cp: Sum,
) -> tuple[dict[str, tuple[Tensor, Tensor]], RouterState]:
    """Each configured loss as it is told and as it is attached, and the state with the counts of the global one."""
    experts, topk = logits_TE.shape[1], config.moe_router_topk
    coefficients = config.load_balancing
    if not coefficients:
        return {}, state
    scores_TE, map_TE = aux_loss_scores(
        logits_TE, topk=topk, score_function=config.moe_router_score_function, padding_mask=padding_mask
    )
    ranks, all_ranks = (int(total(torch.ones(()))) for total in (sum_tp_cp, sum_tp_dp_cp))
    valid = sum_tp_cp(torch.as_tensor(_valid_tokens(logits_TE, padding_mask), device=logits_TE.device))
    how: dict[str, Any] = {"topk": topk, "num_experts": experts}
    losses: dict[str, Tensor] = {}
    if "aux_loss" in coefficients:
        count = sum_tp_cp(map_TE.sum(0))
        tokens = len(logits_TE) * ranks if padding_mask is None else count.sum() / topk
        losses["aux_loss"] = load_balancing_loss(
            scores_TE, count, total_num_tokens=tokens, coeff=coefficients["aux_loss"], **how
        )
    if "seq_aux_loss" in coefficients:
        by_sequence = [x.reshape(-1, batch_size * experts) for x in (scores_TE, map_TE)]  # row s, column b · E + e
        count = sum_tp_cp(by_sequence[1].sum(0))
        tokens = len(logits_TE) // batch_size * ranks if padding_mask is None else count.sum() / topk / batch_size
        losses["seq_aux_loss"] = (
            load_balancing_loss(
                by_sequence[0], count, total_num_tokens=tokens, coeff=coefficients["seq_aux_loss"], **how
            )
            / batch_size
        )
    if "global_aux_loss" in coefficients:
        now = sum_tp_dp_cp(map_TE.sum(0))
        state = state._replace(
            global_tokens_per_expert=state.global_tokens_per_expert + now, global_steps=state.global_steps + 1
        )
        count = state.global_tokens_per_expert.double() / state.global_steps
        tokens = len(logits_TE) * all_ranks if padding_mask is None else now.sum() / topk
        losses["global_aux_loss"] = load_balancing_loss(
            scores_TE, count, total_num_tokens=tokens, coeff=coefficients["global_aux_loss"], **how
        )
    losses = {name: loss / config.router_repeats for name, loss in losses.items()}
    return {
        name: (loss, loss * valid if config.calculate_per_token_loss else loss) for name, loss in losses.items()
    }, state


def _valid_tokens(logits_TE: Tensor, padding_mask: Tensor | None) -> int | Tensor:
    return len(logits_TE) if padding_mask is None else (padding_mask == 0).sum()


def finish_batch(
    state: RouterState, config: MoEConfig, *, frozen: bool = False, sum_tp_dp_cp: Sum = alone, mean_dp_cp: Sum = alone
) -> RouterState:
    """What happens once a global batch, when the gradients are final.

        expert bias   `update_expert_bias` by the counts of all ranks, unless it is frozen
        β             `update_quantile_bias` by the mean quantile, averaged over the data-parallel ranks
        counters      zero

    Source: finalize_model_grads; Megatron 0.16.1 also updates a frozen bias.
    """
    counts = state.tokens_per_expert
    if config.moe_router_enable_expert_bias and not frozen:
        bias = update_expert_bias(
            state.expert_bias, sum_tp_dp_cp(counts), update_rate=config.moe_router_bias_update_rate
        )
        state = state._replace(expert_bias=bias)
    if config.moe_router_load_balancing_type == "quantile_balancing" and not frozen:
        mean = mean_dp_cp(state.quantile_sum / state.quantile_count.clamp(min=1))
        state = state._replace(
            beta=update_quantile_bias(state.beta, mean, count=1, ema=config.moe_router_quantile_balancing_ema)
        )
    zero, step = torch.zeros_like(counts), torch.zeros_like(state.global_steps)
    return state._replace(
        tokens_per_expert=zero,
        global_tokens_per_expert=zero,
        global_steps=step,
        quantile_sum=torch.zeros_like(state.quantile_sum),
        quantile_count=step,
    )


def hash_routing(
    logits_TE: Tensor,
    token_ids: Tensor,
    table: Tensor,
    *,
    score_function: str = "softmax",
    scaling_factor: float | None = None,
) -> Routed:
    """Experts by a table of the token's id; weights by the logits.

        indices[t] = table[token_ids[t]]
        weights    = softmax(x) over E, or s / (Σ_{i∈S} s + 1e-20), also for K = 1; times scaling_factor

    The scores are rounded to the logits' dtype before they are gathered.

    Args:
        token_ids: [T] integers below the table's rows.
        table: [vocabulary, K] experts, all different in a row (not checked).

    Raises:
        ValueError: ids or a table of another shape or out of range; see also `moe_ref.config.check_topk_routing`.

    Source: the hash router of Megatron's dev branch.
    """
    require(
        table.dim() == 2 and not table.is_floating_point(),
        "table",
        f"of shape {tuple(table.shape)}, {table.dtype}",
        "[vocabulary, topk], integer",
    )
    shape = tuple(token_ids.shape)
    require(shape == (len(logits_TE),), "token_ids", f"of shape {shape}", f"of shape ({len(logits_TE)},), one a token")
    outside = (token_ids < 0) | (token_ids >= len(table))
    require(
        not bool(outside.any()),
        "token_ids",
        token_ids[outside].tolist()[:4],
        f"from 0 to {len(table) - 1}, the table's rows",
    )
    check_topk_routing(logits_TE, table.shape[1], score_function, None, None, scaling_factor, None, None)
    beyond = (table < 0) | (table >= logits_TE.shape[1])
    require(
        not bool(beyond.any()), "table", table[beyond].tolist()[:4], f"from 0 to {logits_TE.shape[1] - 1}, the experts"
    )
    index_TK = table[token_ids.long()].long()
    weights_TK = round_to(SCORES[score_function](logits_TE), logits_TE.dtype).gather(1, index_TK)
    weights_TK = round_to(weights_TK, accumulator_dtype(logits_TE.dtype))
    if score_function != "softmax":
        weights_TK = normalised(weights_TK)
    if scaling_factor is not None:
        weights_TK = weights_TK * scaling_factor
    return spread(TopK(round_to(weights_TK, logits_TE.dtype), index_TK), logits_TE.shape[1])


def unpack_sequences(x: Tensor, batch_size: int) -> Tensor:
    """[B·S, 1, …] sequences one behind the other -> [S, B, …], so that a sequence loss sees each by itself.

    Source: transformer_layer.py, packed sequences.
    """
    require(x.dim() >= 2 and x.shape[1] == 1, "x", f"of shape {tuple(x.shape)}", "[batch · sequence, 1, …]")
    require(batch_size >= 1 and len(x) % batch_size == 0, "batch_size", batch_size, f"a divisor of the {len(x)} rows")
    return x.reshape(batch_size, len(x) // batch_size, *x.shape[2:]).transpose(0, 1)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, forced: Tensor) -> Tensor:
        return forced.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


def force_balance(logits_TE: Tensor, noise_TE: Tensor, *, shared_bias: Tensor | None = None) -> Tensor:
    """Random logits for a benchmark: out = noise (+ one bias [E], the same on all ranks); dlogits = dout.

    Source: moe_utils.apply_random_logits; force_biased of Megatron main.
    """
    require(
        noise_TE.shape == logits_TE.shape,
        "noise",
        f"of shape {tuple(noise_TE.shape)}",
        f"of shape {tuple(logits_TE.shape)}, as logits",
    )
    forced = noise_TE if shared_bias is None else noise_TE + shared_bias
    return _StraightThrough.apply(logits_TE, forced.to(logits_TE.dtype))
