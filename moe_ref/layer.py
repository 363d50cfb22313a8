"""The layer: the whole pipeline on one screen, with every intermediate.

    x ── jitter ── gate ── route ────┐ probs, map
    x ── latent down ── dispatch ────┴── grouped_mlp ── combine ── latent up ── + ── output
    x ── shared_experts ─────────────────────────────────────────────────────────┘

All ranks are played in one process; each is a data-parallel rank with sequences of its own, and
holds E/W experts, or its shard of the width of more.

Mirrors `MoELayer` of megatron.core.transformer.moe.moe_layer. Differs: docs/differences.md#layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from moe_ref.config import (
    SHARDING,
    LayerConfig,
    LayerOutput,
    LayerParameters,
    LinearAmax,
    LinearState,
    PerRank,
    RankGroup,
    RouteOutput,
    RouterRanks,
    RouterState,
    check_layer,
    check_recompute,
)
from moe_ref.dispatch.allgather import allgather_combine, allgather_dispatch
from moe_ref.dispatch.alltoall import alltoall_combine, alltoall_dispatch
from moe_ref.dispatch.deepep import deepep_combine, deepep_dispatch
from moe_ref.dispatch.hybridep import hybridep_combine, hybridep_dispatch
from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.ranks import play
from moe_ref.experts.mlp import grouped_mlp, latent_projection
from moe_ref.experts.shared import shared_experts
from moe_ref.permutation.permute import permute, unpermute
from moe_ref.permutation.routing_map import indices_to_multihot, multihot_to_indices
from moe_ref.router.gating import gate, jitter
from moe_ref.router.route import route


def moe_layer(
    x: PerRank[Tensor], parameters: PerRank[LayerParameters], config: LayerConfig,
    *, states: PerRank[RouterState], training: bool = True, batch_size: int = 1,
    padding_mask: PerRank[Tensor] | None = None, noise: PerRank[Tensor] | None = None,
    recompute: str | Sequence[str] | None = None, wgrads: PerRank[list[Callable[..., Tensor]]] | None = None,
    linear_states: PerRank[tuple[LinearState, LinearState]] | None = None,
    amaxes: PerRank[tuple[LinearAmax, LinearAmax]] | None = None,
    rerun: bool = False,
) -> LayerOutput:  # fmt: skip
    """One forward of the layer on all ranks.

        y[t] = up(Σ_{e routed} p[t, e] · mlp_e(down(x[t]))) + shared(x[t])

    Args:
        x: [T_r,H] of each rank, floating point.
        parameters: each rank's, with its own experts; `split_experts` cuts those of a whole layer.
        states: each rank's router state, from `new_state` or the step before.
        training, batch_size: as in `route`.
        padding_mask: [T_r] of each rank, True for padding, which goes to no expert and counts
            nowhere; but it competes for a capacity. Its output is the shared experts'.
        noise: [T_r,H] of each rank, from 0 to 1, in the dtype of x: the jitter's factor is
            1 - eps + 2 · eps · noise. None: drawn.
        recompute: "moe_act" or "moe" as in `grouped_mlp`, of the routed experts; "permute": their
            rows are not saved, and the backward dispatches the tokens again; or ("permute",
            "moe_act"). The same results.
        wgrads, linear_states, amaxes: for each rank wgrads, state and amaxes of `grouped_mlp`.
        rerun: no row is dropped for want of room, see `within_budget`.

    Rounding: by the functions of the stages; the last sum to the dtype of x.

    Raises:
        ValueError: see `moe_ref.config`: check_layer, check_recompute; also from the stages.
    """
    check_layer(x, parameters, config, states, padding_mask, noise, linear_states)
    if rerun:
        layer = partial(moe_layer, x, parameters, states=states, training=training, batch_size=batch_size)
        layer = partial(layer, padding_mask=padding_mask, noise=noise, recompute=recompute, wgrads=wgrads)
        layer = partial(layer, linear_states=linear_states, amaxes=amaxes)
        return within_budget(lambda run_config: layer(config=run_config), config, x)
    ranks = [*zip(x, parameters, strict=True)]
    inputs = [jittered(x_TH, config, None if noise is None else noise[rank]) for rank, x_TH in enumerate(x)]

    gates = [(x_TH, p.router_weight, p.router_bias) for x_TH, p in zip(inputs, parameters, strict=True)]
    logits = [gate(x_TH, weight, bias=bias, router_dtype=config.router_dtype) for x_TH, weight, bias in gates]
    settings = {"training": training, "batch_size": batch_size}
    routed = route_together(logits, config, states, padding_mask=padding_mask, **settings)

    tokens = [_projected(x_TH, p.latent_down) for x_TH, p in ranks]
    dispatched, combine = DISPATCH[config.dispatcher](tokens, for_shards(routed, config), config)
    per_rank_settings = {"wgrads": wgrads, "state": linear_states, "amaxes": amaxes}
    copied = partial(_dispatched_again, tokens, routed, config)
    expert_rows = _routed_experts(dispatched, parameters, config, per_rank_settings, recompute, copied)
    combined = combine(expert_rows)
    output = [_projected(y_TN, p.latent_up) for y_TN, p in zip(combined, parameters, strict=True)]

    shared = None
    if parameters[0].shared_fc1_weight is not None:
        shared = [_shared(x_TH, p, config) for x_TH, p in ranks]
        output = [y_TH + shared_TH for y_TH, shared_TH in zip(output, shared, strict=True)]
    return LayerOutput(logits, routed, dispatched, expert_rows, combined, shared, output)


def within_budget(run: Callable[[LayerConfig], LayerOutput], config: LayerConfig, x: PerRank[Tensor]) -> LayerOutput:
    """run(config); and once more, with room for all rows, if any rank has dropped some.

        out = run(config)        ∨_ranks out.dispatched.overflow → run(config with num_rows = None)

    The second run is the step, as if the first had not been: it has the states of before, because
    `run` returns its own, and the numbers that torch's generators had before.

    Mirrors the rerun of megatron.core.transformer.moe.paged_stash.PagedStashRunner.
    """
    if config.num_rows is None:
        return run(config)
    generator, device_states = torch.get_rng_state(), get_device_states(*x)
    out = run(config)
    if not any(bool(rank_rows.overflow) for rank_rows in out.dispatched):
        return out
    torch.set_rng_state(generator)
    set_device_states(*device_states)
    return run(replace(config, num_rows=None))


def jittered(x_TH: Tensor, config: LayerConfig, noise_TH: Tensor | None) -> Tensor:
    """The router's input: `jitter` of x, by the given noise or one that it draws; x without eps."""
    eps = config.jitter_eps
    if eps is None:
        return x_TH
    return jitter(x_TH, eps=eps) if noise_TH is None else x_TH * (1 - eps + 2 * eps * noise_TH)


def _projected(x_TN: Tensor, weight_MN: Tensor | None) -> Tensor:
    """Into the latent space or out of it; x without one."""
    return x_TN if weight_MN is None else latent_projection(x_TN, weight_MN)


def _dispatched_again(tokens: PerRank[Tensor], routed: PerRank[RouteOutput], config: LayerConfig, rank: int) -> Tensor:
    """The rows of a rank once more, without gradients."""
    with torch.no_grad():
        dispatched, _ = DISPATCH[config.dispatcher](tokens, for_shards(routed, config), config)
    rows_PH: Tensor = dispatched[rank].rows
    return rows_PH


def _routed_experts(
    dispatched: Sequence[Any], parameters: PerRank[LayerParameters], config: LayerConfig,
    per_rank_settings: dict[str, Any], recompute: str | Sequence[str] | None, rows_again: Callable[[int], Tensor],
) -> list[Tensor]:  # fmt: skip
    """The experts of each rank, over its dispatched rows, with its entry of each of the
    `per_rank_settings`; rows_again(rank) are its rows once more."""
    permutes_again, of_experts = check_recompute(recompute)
    rows = []
    for rank, (rank_rows, p) in enumerate(zip(dispatched, parameters, strict=True)):
        settings: dict[str, Any] = {"probs": rank_rows.probs, "fc1_bias": p.fc1_bias, "fc2_bias": p.fc2_bias}
        settings |= {"recompute": of_experts}
        settings |= {"rows_again": partial(rows_again, rank)} if permutes_again else {}
        settings |= {name: per_rank[rank] for name, per_rank in per_rank_settings.items() if per_rank is not None}
        settings |= config.experts
        rows.append(grouped_mlp(rank_rows.rows, rank_rows.tokens_per_expert, p.fc1_weight, p.fc2_weight, **settings))
    return rows


def _shared(x_TH: Tensor, p: LayerParameters, config: LayerConfig) -> Tensor:
    assert p.shared_fc1_weight is not None and p.shared_fc2_weight is not None
    weights = (p.shared_fc1_weight, p.shared_fc2_weight)
    return shared_experts(x_TH, *weights, gate_weight=p.shared_gate_weight, **config.shared_experts)


def route_together(
    logits: PerRank[Tensor],
    config: LayerConfig,
    states: PerRank[RouterState],
    *,
    padding_mask: PerRank[Tensor] | None = None,
    **settings: Any,
) -> list[RouteOutput]:
    """`route` on all ranks at once, which share the batch; padding then leaves the map."""
    masks = [None] * len(logits) if padding_mask is None else padding_mask
    records, world = torch.is_grad_enabled(), range(len(logits))

    def run(rank: int, sum_over: Callable[[Sequence[int]], Callable[[Tensor], Tensor]]) -> RouteOutput:
        ranks = RouterRanks(tp_dp_cp=RankGroup(len(world), sum_over(world)))
        with torch.set_grad_enabled(records):
            options = settings | {"padding_mask": masks[rank]}
            routed = route(logits[rank], config.router, state=states[rank], ranks=ranks, **options)
            return without_padding(routed, masks[rank])

    return play(len(world), run)


def without_padding(routed: RouteOutput, padding_mask: Tensor | None) -> RouteOutput:
    """No expert and probs of 0 for padding."""
    if padding_mask is None:
        return routed
    token_T1 = (padding_mask == 0)[:, None]
    probs_TE = torch.where(token_T1, routed.probs, 0)
    return routed._replace(probs=probs_TE, routing_map=routed.routing_map & token_T1)


# ---- dispatch: tokens to rows of experts, and the function that brings rows back


def for_shards(routed: PerRank[RouteOutput], config: LayerConfig) -> PerRank[RouteOutput]:
    """The routing with a column per expert of each rank, if the dispatcher knows no shards."""
    shards = config.expert_tensor_parallel
    if shards == 1 or config.dispatcher in SHARDING:
        return routed
    flat = partial(flatten_experts, expert_parallel=len(routed) // shards, expert_tensor_parallel=shards)
    return [out._replace(probs=flat(out.probs), routing_map=flat(out.routing_map)) for out in routed]


Combine = Callable[[list[Tensor]], list[Tensor]]


def _by_map(dispatch: Callable[..., list[Any]], combine: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A dispatcher that reads the routing map."""

    def run(tokens: PerRank[Tensor], routed: PerRank[RouteOutput], config: LayerConfig) -> tuple[list[Any], Combine]:
        maps, probs = [out.routing_map for out in routed], [out.probs for out in routed]
        dispatched = dispatch(tokens, maps, probs=probs, **config.dispatch)
        handles = [received.handle for received in dispatched]
        combine_rows = partial(combine, **config.combine)
        return dispatched, lambda rows: [getattr(result, "tokens", result) for result in combine_rows(rows, handles)]

    return run


def _by_index(tokens: PerRank[Tensor], routed: PerRank[RouteOutput], config: LayerConfig) -> tuple[list[Any], Combine]:
    """DeepEP: tokens travel in index form, and each rank permutes the tokens it received, in its
    budget.
    """
    experts = routed[0].probs.shape[1]
    slots = [multihot_to_indices(out.routing_map, out.probs, topk=experts) for out in routed]
    indices, probs = [slot.indices for slot in slots], [slot.probs for slot in slots]
    dispatched = deepep_dispatch(tokens, indices, num_experts=experts, probs=probs)
    permuted = []
    for received in dispatched:
        assert received.probs is not None
        local_map, local_probs = indices_to_multihot(
            received.indices, received.probs, num_experts=experts // len(tokens)
        )
        permuted.append(permute(received.rows, local_map, probs=local_probs, **config.dispatch))

    def combine(rows: list[Tensor]) -> list[Tensor]:
        sums = [unpermute(rows_PH, permutation.row_map) for rows_PH, permutation in zip(rows, permuted, strict=True)]
        return [result.tokens for result in deepep_combine(sums, [received.handle for received in dispatched])]

    return permuted, combine


DISPATCH = {
    "allgather": _by_map(allgather_dispatch, allgather_combine),
    "alltoall": _by_map(alltoall_dispatch, alltoall_combine),
    "hybridep": _by_map(hybridep_dispatch, hybridep_combine),
    "deepep": _by_index,
}
