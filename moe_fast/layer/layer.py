"""The layer of one rank: gate, route, dispatch, experts, combine, with shared experts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

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
from moe_fast.dispatch.symmetric import Early
from moe_fast.experts.delayed import Waiting
from moe_fast.experts.linear import latent_projection
from moe_fast.experts.mlp import first_tile, grouped_mlp, shared_experts
from moe_fast.experts.segments import plan_ready
from moe_fast.experts.token_linear import RowsOfTokens
from moe_fast.fused.token_mlp import mlp_of_tokens, rows_of_tokens
from moe_fast.launch.legal import CheckedOnce
from moe_fast.launch.operators import traceable
from moe_fast.layer.call import Call
from moe_fast.layer.token_rows import most_rows, stay_tokens
from moe_fast.permutation.permute import move_to_rows, permute, permute_in_tiles, unpermute
from moe_fast.permutation.routing_map import indices_to_multihot, multihot_to_indices
from moe_fast.permutation.row_map import RowMap
from moe_fast.router.gating import gate, jitter
from moe_fast.router.route import route
from moe_ref.config import (
    SHARDING,
    IndexPolicy,
    LayerConfig,
    LayerOutput,
    LayerParameters,
    LinearAmax,
    LinearState,
    RankGroup,
    RouteOutput,
    RouterRanks,
    RouterState,
    check_recompute,
    require,
)
from moe_ref.config.layer import ROWS_AGAIN

X = TypeVar("X")
Combine = Callable[[Tensor], Tensor]
EARLY_TOPK = 4  # with so many experts a token goes to the other of two ranks with a probability of 1 - 2⁻⁴ or more
TRUSTED = IndexPolicy(values="trusted")  # for the router's own choice


class ExpertRows(NamedTuple):
    """The rows of this rank's experts, and the function that brings results back to tokens."""

    dispatched: Any
    combine: Combine
    permuted: tuple[Tensor, RowMap] | None = None  # the tokens and the row map, if this rank has permuted them
    plan: Callable[[], AbstractContextManager[None]] = nullcontext  # a context in which the experts have their plan
    of_tokens: RowsOfTokens | None = None  # in place of rows that are not written


@traceable
def moe_layer(
    x_TH: Tensor, parameters: LayerParameters, config: LayerConfig,
    *, state: RouterState, training: bool = True, batch_size: int = 1, group: Any = None,
    padding_mask: Tensor | None = None, noise: Tensor | None = None, recompute: str | Sequence[str] | None = None,
    wgrads: Waiting | None = None, linear_states: tuple[LinearState, LinearState] | None = None,
    amaxes: tuple[LinearAmax, LinearAmax] | None = None, overlap_shared: bool = False,
    in_dispatch_backward: Callable[[], None] | None = None, shared_memory: bool = False, rerun: bool = False,
) -> LayerOutput:  # fmt: skip
    """One forward of the layer on this rank, with its L = E/W experts, or its shard of more.

    Args:
        group: the process group whose ranks share the experts. None: this rank has all of them,
            `dispatcher` has no effect, no collective runs, and the host never waits. Otherwise the
            dispatcher's host waits for its counts.
        recompute: of the routed experts alone, as in the reference. The result holds every
            intermediate; `MoELayer` drops it, and computes the whole layer again with "moe".
            On one Hopper experts may gather their rows: `dispatched.rows` is None then, see
            `stay_tokens`.
        wgrads, linear_states, amaxes: as wgrads, state and amaxes in `grouped_mlp`, of the routed
            experts.
        overlap_shared: on a GPU the shared experts run on a stream beside the dispatch, and so do
            their gradients; see `overlap.beside`. dx then adds its parts in another order.
        in_dispatch_backward: launched beside the dispatch's backward; see `overlap.in_backward`.
        shared_memory: hybridep's rows travel over memory that the ranks share, see
            `moe_fast.dispatch.symmetric`.
        rerun: with `LayerConfig.num_rows` no row is dropped: if any rank has too little room, the
            layer runs again with room for all. The host waits once. See `within_budget`.

    Raises:
        ValueError: also for memory shared by another dispatcher, for "permute" where the rows come
            from other ranks, and as the functions of the stages.
    """
    call = Call(
        parameters, config, state, training, batch_size, group, padding_mask, noise, recompute, wgrads, linear_states,
        amaxes, overlap_shared, in_dispatch_backward, shared_memory,
    )  # fmt: skip
    if not rerun or config.num_rows is None:
        return _layer(x_TH, call)
    unlimited, overflow = call._replace(config=replace(config, num_rows=None)), attrgetter("dispatched.overflow")
    return in_room(lambda has_budget: _layer(x_TH, call if has_budget else unlimited), overflow, group, x_TH.device)


def _layer(x_TH: Tensor, call: Call) -> LayerOutput:
    """`moe_layer` without `rerun`."""
    with CheckedOnce(call.key(x_TH), call.config):
        call.check(x_TH)
        early = _early_copy(x_TH, call)
        logits, routed = routed_by(x_TH, call)
        return LayerOutput(logits, routed, *after_router(x_TH, routed, call, early))


def after_router(
    x_TH: Tensor, routed: RouteOutput, call: Call, early: Early | None = None
) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor]:
    """(dispatched, the experts' rows, their sums by token, shared experts' output, output) of
    tokens that are routed, and that may be on their way to the other rank already.
    """
    tokens = _narrowed(x_TH, call.parameters) if early is None else early.tokens
    dispatch = partial(_dispatched, tokens, routed, call, early)
    if call.overlap_shared:
        shared, expert_rows = beside(partial(_shared, x_TH, call), dispatch, x_TH.device)
    else:
        expert_rows = dispatch()
    rows, combined = _through_experts(expert_rows, call)
    latent_up = call.parameters.latent_up
    output = combined if latent_up is None else latent_projection(combined, latent_up)

    shared = shared if call.overlap_shared else _shared(x_TH, call)
    if shared is not None:
        output = output + shared
    return expert_rows.dispatched, rows, combined, shared, output


def _through_experts(expert_rows: ExpertRows, call: Call) -> tuple[Tensor, Tensor]:
    """(the experts' rows, their sums by token)."""
    p, dispatched, config = call.parameters, expert_rows.dispatched, call.config
    counts, probs = dispatched.tokens_per_expert, dispatched.probs
    with expert_rows.plan():
        if expert_rows.of_tokens is not None:
            return mlp_of_tokens(expert_rows.of_tokens, counts, p, config, probs=probs, recompute=call.recompute)
        permutes_again, recompute = check_recompute(call.recompute)
        rows_again = _permuted_again(expert_rows.permuted, call) if permutes_again else None
        rows, beside_backward = dispatched.rows, call.in_dispatch_backward
        rows = rows if beside_backward is None else in_backward(rows, beside_backward)
        rows = grouped_mlp(
            rows, counts, p.fc1_weight, p.fc2_weight, probs=probs, rows_again=rows_again, fc1_bias=p.fc1_bias,
            fc2_bias=p.fc2_bias, recompute=recompute, wgrads=call.wgrads, state=call.linear_states, amaxes=call.amaxes,
            **config.experts,
        )  # fmt: skip
    return rows, expert_rows.combine(rows)


def routed_by(x_TH: Tensor, call: Call) -> tuple[Tensor, RouteOutput]:
    """(logits, routing of this rank's tokens). Padding is routed, and then taken out of the map."""
    p, config = call.parameters, call.config
    jittered_TH = jittered(x_TH, config, call.noise)
    logits = gate(jittered_TH, p.router_weight, bias=p.router_bias, router_dtype=config.router_dtype)
    routed = route(
        logits, config.router, state=call.state, ranks=ranks_of(call.group), training=call.training,
        batch_size=call.batch_size, padding_mask=call.padding_mask,
    )  # fmt: skip
    return logits, without_padding(routed, call.padding_mask)


def jittered(x_TH: Tensor, config: LayerConfig, noise_TH: Tensor | None) -> Tensor:
    """x times the factors of the noise, which is drawn if it is None; x if there is no jitter."""
    if config.jitter_eps is None:
        return x_TH
    if noise_TH is None:
        return jitter(x_TH, eps=config.jitter_eps)
    return x_TH * (1 - config.jitter_eps + 2 * config.jitter_eps * noise_TH)


def without_padding(routed: RouteOutput, padding_mask: Tensor | None) -> RouteOutput:
    """The routing, with no expert and probs of 0 for padding."""
    if padding_mask is None:
        return routed
    token_T1 = (padding_mask == 0)[:, None]
    probs_TE = torch.where(token_T1, routed.probs, 0)
    return routed._replace(probs=probs_TE, routing_map=routed.routing_map & token_T1)


def ranks_of(group: Any) -> RouterRanks:
    """The ranks whose tokens count in the global loss and for the expert bias."""
    if group is None:
        return RouterRanks()
    return RouterRanks(tp_dp_cp=RankGroup(dist.get_world_size(group), lambda x_N: sum_over(x_N, group)))


def sum_over(x_N: Tensor, group: Any) -> Tensor:
    """The sum of integers over the ranks; every rank gets it."""
    return counts_of_all(x_N, group).sum(0)


def _shared(x_TH: Tensor, call: Call) -> Tensor | None:
    """The output of the shared experts; None without them."""
    p = call.parameters
    if p.shared_fc1_weight is None or p.shared_fc2_weight is None:
        return None
    weights = (p.shared_fc1_weight, p.shared_fc2_weight)
    return shared_experts(x_TH, *weights, gate_weight=p.shared_gate_weight, **call.config.shared_experts)


def in_room(run: Callable[[bool], X], dropped: Callable[[X], Tensor], group: Any, device: torch.device) -> X:
    """run(True), which has a budget of rows; and run(False), which has none, if any rank has
    dropped rows.

    All ranks call it together and decide alike. Before the second run torch's generators of the CPU
    and of the device are set back, so that it draws the same numbers. The host waits once.

    Args:
        group: None: this process alone.
        dropped: of the first result, [] bool or integer: whether this rank has dropped rows.
    """
    random_states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    result = run(True)
    overflow = dropped(result).to(torch.int32)
    if group is not None:
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
    if not bool(overflow):
        return result
    torch.set_rng_state(random_states[0])
    if random_states[1] is not None:
        torch.cuda.set_rng_state(random_states[1], device)
    return run(False)


# --- dispatch: from tokens to rows of experts, and back


def _narrowed(x_TH: Tensor, p: LayerParameters) -> Tensor:
    """The tokens in the width in which they travel."""
    return x_TH if p.latent_down is None else latent_projection(x_TH, p.latent_down)


def _early_copy(x_TH: Tensor, call: Call) -> Early | None:
    """Start to copy the tokens to the other rank before they are routed, if that is faster."""
    config, group, num_rows = call.config, call.group, call.config.num_rows
    if not call.shared_memory or num_rows is None or config.dispatcher != "hybridep":
        return None
    if config.router.topk < EARLY_TOPK or group is None or dist.get_world_size(group) != 2:
        return None
    tokens, num_experts = _narrowed(x_TH, call.parameters), config.router.num_experts
    return symmetric.start_early(tokens, num_experts=num_experts, num_rows=num_rows, group=group)


def _dispatched(tokens: Tensor, routed: RouteOutput, call: Call, early: Early | None) -> ExpertRows:
    """The rows of this rank's experts, and the function that brings them back."""
    if call.group is None:
        return _on_one_rank(tokens, routed, call)
    config, shared_memory = call.config, call.shared_memory
    expected = f"False with {config.dispatcher}: hybridep alone has it"
    require(config.dispatcher == "hybridep" or not shared_memory, "shared_memory", shared_memory, expected)
    dispatcher, shards = "symmetric" if shared_memory else config.dispatcher, config.expert_tensor_parallel
    if shards > 1 and config.dispatcher not in SHARDING:
        groups = dist.get_world_size(call.group) // shards
        flat = partial(flatten_experts, expert_parallel=groups, expert_tensor_parallel=shards)
        routed = routed._replace(probs=flat(routed.probs), routing_map=flat(routed.routing_map))
    settings = {} if early is None else {"early": early}
    expert_rows: ExpertRows = DISPATCH[dispatcher](tokens, routed, config, call.group, **settings)
    return expert_rows


def _on_one_rank(tokens: Tensor, routed: RouteOutput, call: Call) -> ExpertRows:
    """The rows of all experts, which are on this rank. No row travels, so that the dispatchers do
    not differ.
    """
    config = call.config
    most = most_rows(tokens.shape[0], config)
    tile = first_tile(tokens, most, config.router.num_experts, config.align, config.recipe)
    rows = None if tile is None else tile.rows
    sizes: dict[str, Any] = {"probs": routed.probs, "num_rows": most, "tile_rows": rows}
    options = (call.wgrads, call.linear_states, call.amaxes, call.in_dispatch_backward)
    needs_rows = any(option is not None for option in options)
    of_tokens = None
    if not needs_rows and stay_tokens(tokens, routed.probs, call.parameters, config, call.recompute):
        of_tokens, permuted, tiles = rows_of_tokens(tokens, routed.routing_map, config.recipe, **sizes)
    else:
        permuted, tiles = permute_in_tiles(tokens, routed.routing_map, **sizes)
    shape = (tokens.shape[0], tokens.shape[1])
    combine = partial(unpermute, row_map=permuted.row_map, restore_shape=shape)
    plan: Any = nullcontext
    if tile is not None and tiles is not None:
        plan = partial(plan_ready, permuted.tokens_per_expert, tile, tiles, most)
    return ExpertRows(permuted, combine, (tokens, permuted.row_map), plan, of_tokens)


def _permuted_again(permuted: tuple[Tensor, RowMap] | None, call: Call) -> Callable[[], Tensor]:
    """A function that computes the rows of `permute` again.

    Raises:
        RuntimeError: from that function, if the tokens have changed by an operation that torch
            counts.
    """
    expected = f"without {ROWS_AGAIN!r} with {call.config.dispatcher}: the rows come from other ranks"
    require(permuted is not None, "recompute", repr(call.recompute), expected)
    assert permuted is not None
    tokens, row_map = permuted[0].detach(), permuted[1]  # shares the count of changes with the caller's tensor
    version = None if tokens.is_inference() else tokens._version

    def again() -> Tensor:
        if version is not None and version != tokens._version:
            raise RuntimeError(f"tokens have changed since the forward: recompute {ROWS_AGAIN!r} copies them again")
        return move_to_rows(tokens, None, row_map)[0]

    return again


def _by_map(dispatch: Callable[..., Any], combine: Callable[..., Any]) -> Callable[..., ExpertRows]:
    """A dispatcher that reads the routing map."""

    def run(tokens: Tensor, routed: RouteOutput, config: LayerConfig, group: Any, **started: Any) -> ExpertRows:
        dispatched = dispatch(tokens, routed.routing_map, probs=routed.probs, group=group, **config.dispatch, **started)

        def back(rows: Tensor) -> Tensor:
            result = combine(rows, dispatched.handle, group=group, **config.combine)
            tokens_TN: Tensor = getattr(result, "tokens", result)
            return tokens_TN

        return ExpertRows(dispatched, back)

    return run


def _by_index(tokens: Tensor, routed: RouteOutput, config: LayerConfig, group: Any) -> ExpertRows:
    """The dispatch by DeepEP: tokens travel with the indices of their experts, and each rank
    permutes the tokens that it has received. With a budget only copies that have a row travel, so
    that no rank receives more tokens than rows.
    """
    experts, room = routed.probs.shape[1], config.num_rows
    slots = experts if config.router.pad_to_capacity else config.router.topk * config.expert_tensor_parallel
    copies = None if room is None else kept_copies(routed.routing_map, room, group)
    listed = multihot_to_indices(routed.routing_map if copies is None else copies.map_TE, routed.probs, topk=slots)
    settings = {"num_experts": experts, "probs": listed.probs, "policy": TRUSTED, "group": group}
    dispatched = deepep_dispatch(tokens, listed.indices, num_worst_tokens=room, **settings)  # type: ignore[arg-type]
    assert dispatched.probs is not None
    local = experts // dist.get_world_size(group)
    local_map = indices_to_multihot(dispatched.indices, dispatched.probs, num_experts=local)
    permuted = permute(dispatched.rows, local_map.routing_map, probs=local_map.probs, num_rows=room)
    permuted = permuted if copies is None else permuted._replace(overflow=copies.overflow)

    def combine(rows: Tensor) -> Tensor:
        sums = unpermute(rows, permuted.row_map, restore_shape=(len(dispatched.rows), dispatched.rows.shape[1]))
        return deepep_combine(sums, dispatched.handle, group=group).tokens

    return ExpertRows(permuted, combine, (dispatched.rows, permuted.row_map))


DISPATCH = {
    "allgather": _by_map(allgather_dispatch, allgather_combine),
    "alltoall": _by_map(alltoall_dispatch, alltoall_combine),
    "hybridep": _by_map(hybridep_dispatch, hybridep_combine),
    "symmetric": _by_map(symmetric.hybridep_dispatch, symmetric.hybridep_combine),
    "deepep": _by_index,
}
