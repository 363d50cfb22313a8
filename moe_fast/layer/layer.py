"""The layer of one rank: gate, route, dispatch, experts, combine, with shared experts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.dispatch import symmetric
from moe_fast.dispatch.allgather import allgather_combine, allgather_dispatch
from moe_fast.dispatch.alltoall import alltoall_combine, alltoall_dispatch
from moe_fast.dispatch.budget import kept_copies
from moe_fast.dispatch.deepep import deepep_combine, deepep_dispatch
from moe_fast.dispatch.exchange import counts_of_all
from moe_fast.dispatch.hybridep import hybridep_combine, hybridep_dispatch
from moe_fast.dispatch.indices import flatten_experts
from moe_fast.dispatch.overlap import beside, in_backward
from moe_fast.experts.delayed import Waiting
from moe_fast.experts.mlp import grouped_mlp, latent_projection
from moe_fast.experts.shared import shared_experts
from moe_fast.launch.operators import traceable
from moe_fast.layer.room import in_room
from moe_fast.permutation.permute import permute, unpermute
from moe_fast.permutation.routing_map import indices_to_multihot, multihot_to_indices
from moe_fast.router.gating import gate, jitter
from moe_fast.router.route import route
from moe_ref.config import (
    SHARDING,
    IndexPolicy,
    LayerConfig,
    LayerOutput,
    LayerParameters,
    RankGroup,
    RouteOutput,
    RouterConfig,
    RouterRanks,
    RouterState,
    check_layer,
    require,
)
from moe_ref.config.router import expert_capacity

Combine = Callable[[Tensor], Tensor]
EARLY_TOPK = 4  # a token then goes to the other of two ranks with a probability of 1 - 2⁻⁴ or more
TRUSTED = IndexPolicy(values="trusted")  # of the router's own choice


@traceable
def moe_layer(
    x_TH: Tensor, parameters: LayerParameters, config: LayerConfig,
    *, state: RouterState, training: bool = True, batch_size: int = 1, group: Any = None,
    padding_mask: Tensor | None = None, noise: Tensor | None = None, recompute: str | None = None,
    wgrads: Waiting | None = None, overlap_shared: bool = False,
    in_dispatch_backward: Callable[[], None] | None = None, shared_memory: bool = False, rerun: bool = False,
) -> LayerOutput:  # fmt: skip
    """One forward of the layer on this rank, with its L = E/W experts, or its shard of more.

    Args:
        group: the process group whose ranks share the experts. None: this rank has all of them,
            `dispatcher` has no effect, no collective runs, and the host never waits. Otherwise the
            dispatcher's host waits for its counts.
        recompute: as in `grouped_mlp`, of the routed experts alone. The result holds every
            intermediate; `MoELayer` computes the whole layer again.
        wgrads: as in `grouped_mlp`, of the routed experts.
        overlap_shared: on a GPU the shared experts run on a stream beside the dispatch, and so do
            their gradients; see `overlap.beside`. dx then adds its parts in another order.
        in_dispatch_backward: launched beside the dispatch's backward; see `overlap.in_backward`.
        shared_memory: hybridep's rows travel over memory that the ranks share, see
            `moe_fast.dispatch.symmetric`.
        rerun: with `LayerConfig.num_rows` no row is dropped: if any rank has too little room, the
            layer runs again with room for all. The host waits once. See `within_budget`.

    Raises:
        ValueError: also for memory shared by another dispatcher, and as the functions of the
            stages.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    masks, noises = (None if given is None else [given] * ranks for given in (padding_mask, noise))
    check_layer([x_TH] * ranks, [parameters] * ranks, config, [state] * ranks, masks, noises)
    if rerun and group is not None and config.num_rows is not None:
        run = partial(moe_layer, x_TH, parameters, state=state, training=training, batch_size=batch_size, group=group)
        run = partial(run, padding_mask=padding_mask, noise=noise, recompute=recompute, wgrads=wgrads)
        run = partial(run, overlap_shared=overlap_shared, in_dispatch_backward=in_dispatch_backward)
        run, free = partial(run, shared_memory=shared_memory), replace(config, num_rows=None)
        over = attrgetter("dispatched.overflow")
        return in_room(lambda few: run(config=config if few else free), over, group, x_TH.device)
    p = parameters
    options = {"training": training, "batch_size": batch_size, "padding_mask": padding_mask}
    tokens = x_TH if p.latent_down is None else latent_projection(x_TH, p.latent_down)
    early = _started(tokens, config, group, shared_memory)
    logits, routed = _routed(x_TH, p, config, state, group, noise, options)
    dispatch = partial(_dispatched, tokens, routed, config, group, shared_memory, early)
    shared_part = partial(_shared, x_TH, p, config)
    if overlap_shared:
        shared, (dispatched, combine) = beside(shared_part, dispatch, x_TH.device)
    else:
        dispatched, combine = dispatch()
    sent = dispatched.rows if in_dispatch_backward is None else in_backward(dispatched.rows, in_dispatch_backward)
    given = {"fc1_bias": p.fc1_bias, "fc2_bias": p.fc2_bias, "probs": dispatched.probs, "wgrads": wgrads}
    settings = config.experts | given | {"recompute": recompute}
    rows = grouped_mlp(sent, dispatched.tokens_per_expert, p.fc1_weight, p.fc2_weight, **settings)
    combined = combine(rows)
    output = combined if p.latent_up is None else latent_projection(combined, p.latent_up)

    shared = shared if overlap_shared else shared_part()
    if shared is not None:
        output = output + shared
    return LayerOutput(logits, routed, dispatched, rows, combined, shared, output)


def _routed(
    x_TH: Tensor, p: LayerParameters, config: LayerConfig, state: RouterState, group: Any, noise: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, RouteOutput]:  # fmt: skip
    """The logits, and the routing of this rank's tokens; padding then leaves the map."""
    logits = gate(jittered(x_TH, config, noise), p.router_weight, bias=p.router_bias, router_dtype=config.router_dtype)
    batch = RouterRanks()
    if group is not None:
        batch = RouterRanks(tp_dp_cp=RankGroup(dist.get_world_size(group), lambda x: sum_over(x, group)))
    routed = route(logits, config.router, state=state, ranks=batch, **options)
    return logits, without_padding(routed, options["padding_mask"])


def jittered(x_TH: Tensor, config: LayerConfig, noise_TH: Tensor | None) -> Tensor:
    """x times the factors of the noise, given or drawn; x without jitter."""
    if config.jitter_eps is None:
        return x_TH
    if noise_TH is None:
        return jitter(x_TH, eps=config.jitter_eps)
    return x_TH * (1 - config.jitter_eps + 2 * config.jitter_eps * noise_TH)


def without_padding(routed: RouteOutput, padding_mask: Tensor | None) -> RouteOutput:
    """No expert and probs of 0 for padding."""
    if padding_mask is None:
        return routed
    token_T1 = (padding_mask == 0)[:, None]
    probs_TE = torch.where(token_T1, routed.probs, 0)
    return routed._replace(probs=probs_TE, routing_map=routed.routing_map & token_T1)


def sum_over(x_N: Tensor, group: Any) -> Tensor:
    """The sum of integers over the ranks, the same on all."""
    return counts_of_all(x_N, group).sum(0)


def _shared(x_TH: Tensor, p: LayerParameters, config: LayerConfig) -> Tensor | None:
    """The shared experts' output; None without them."""
    if p.shared_fc1_weight is None or p.shared_fc2_weight is None:
        return None
    weights = (p.shared_fc1_weight, p.shared_fc2_weight)
    return shared_experts(x_TH, *weights, gate_weight=p.shared_gate_weight, **config.shared_experts)


# ---- dispatch: tokens to rows of experts, and the function that brings rows back


def _started(tokens: Tensor, config: LayerConfig, group: Any, shared_memory: bool) -> dict[str, Any]:
    """Tokens on their way before the router, as a setting of their dispatch, where it pays."""
    possible = shared_memory and config.num_rows is not None and config.dispatcher == "hybridep"
    if not possible or config.router.topk < EARLY_TOPK or group is None or dist.get_world_size(group) != 2:
        return {}
    sizes: dict[str, Any] = {"num_experts": config.router.num_experts, "num_rows": config.num_rows}
    return {"early": symmetric.start_early(tokens, group=group, **sizes)}


def _dispatched(
    tokens: Tensor, routed: RouteOutput, config: LayerConfig, group: Any, shared_memory: bool, early: dict[str, Any]
) -> tuple[Any, Combine]:
    """The rows of this rank's experts, and the way back."""
    if group is None:
        return _on_one_rank(tokens, routed, config.router)
    right = f"False with {config.dispatcher}: hybridep alone has it"
    require(config.dispatcher == "hybridep" or not shared_memory, "shared_memory", shared_memory, right)
    way, shards = "symmetric" if shared_memory else config.dispatcher, config.expert_tensor_parallel
    if shards > 1 and config.dispatcher not in SHARDING:
        groups = dist.get_world_size(group) // shards
        flat = partial(flatten_experts, expert_parallel=groups, expert_tensor_parallel=shards)
        routed = routed._replace(probs=flat(routed.probs), routing_map=flat(routed.routing_map))
    sent: tuple[Any, Combine] = DISPATCH[way](tokens, routed, config, group, **early)
    return sent


def _on_one_rank(tokens: Tensor, routed: RouteOutput, router: RouterConfig) -> tuple[Any, Combine]:
    """All experts are here: the dispatchers move no row, and have one sum."""
    most = _most_rows(tokens.shape[0], router)
    permuted = permute(tokens, routed.routing_map, probs=routed.probs, num_rows=most)
    return permuted, lambda rows: unpermute(rows, permuted.row_map, restore_shape=(tokens.shape[0], tokens.shape[1]))


def _most_rows(tokens: int, router: RouterConfig) -> int:
    """A bound on the routed copies that needs no counts; exact without a capacity."""
    copies = tokens * router.topk
    if router.capacity_factor is None:
        return copies
    sizes = {"num_experts": router.num_experts, "topk": router.topk}
    room = min(expert_capacity(tokens, capacity_factor=router.capacity_factor, **sizes), tokens) * router.num_experts
    return room if router.pad_to_capacity else min(copies, room)


def _by_map(dispatch: Callable[..., Any], combine: Callable[..., Any]) -> Callable[..., tuple[Any, Combine]]:
    """A dispatcher that reads the routing map."""

    def run(tokens: Tensor, routed: RouteOutput, config: LayerConfig, group: Any, **early: Any) -> tuple[Any, Combine]:
        sent = dispatch(tokens, routed.routing_map, probs=routed.probs, group=group, **config.dispatch, **early)

        def back(rows: Tensor) -> Tensor:
            result = combine(rows, sent.handle, group=group)
            tokens_TN: Tensor = getattr(result, "tokens", result)
            return tokens_TN

        return sent, back

    return run


def _by_index(tokens: Tensor, routed: RouteOutput, config: LayerConfig, group: Any) -> tuple[Any, Combine]:
    """DeepEP: tokens travel in index form, and each rank permutes the tokens it received. With a
    budget only copies that have a row travel, so that no rank receives more tokens than rows.
    """
    experts, room = routed.probs.shape[1], config.num_rows
    slots = experts if config.router.pad_to_capacity else config.router.topk * config.expert_tensor_parallel
    kept = None if room is None else kept_copies(routed.routing_map, room, group)
    listed = multihot_to_indices(routed.routing_map if kept is None else kept.map_TE, routed.probs, topk=slots)
    settings = {"num_experts": experts, "probs": listed.probs, "policy": TRUSTED, "group": group}
    sent = deepep_dispatch(tokens, listed.indices, num_worst_tokens=room, **settings)  # type: ignore[arg-type]
    assert sent.probs is not None
    local = experts // dist.get_world_size(group)
    own = indices_to_multihot(sent.indices, sent.probs, num_experts=local)
    permuted = permute(sent.rows, own.routing_map, probs=own.probs, num_rows=room)
    permuted = permuted if kept is None else permuted._replace(overflow=kept.overflow)

    def combine(rows: Tensor) -> Tensor:
        sums = unpermute(rows, permuted.row_map, restore_shape=(len(sent.rows), sent.rows.shape[1]))
        return deepep_combine(sums, sent.handle, group=group).tokens

    return permuted, combine


DISPATCH = {
    "allgather": _by_map(allgather_dispatch, allgather_combine),
    "alltoall": _by_map(alltoall_dispatch, alltoall_combine),
    "hybridep": _by_map(hybridep_dispatch, hybridep_combine),
    "symmetric": _by_map(symmetric.hybridep_dispatch, symmetric.hybridep_combine),
    "deepep": _by_index,
}
