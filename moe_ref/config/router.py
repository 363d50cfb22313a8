"""The router: results, and the rules that make a call illegal."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ref.config.megatron.settings import MoEConfig
from moe_ref.config.permutation import check_map
from moe_ref.config.rules import MAX_EXPERTS, check_float, check_probs, is_count, is_number, require

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
DROP_POLICIES = ("probs", "position")


class TopK(NamedTuple):
    """What `topk_indices` returns. The order of a token's slots is the implementation's own."""

    probs: Tensor  # [T,K], the logits' dtype
    indices: Tensor  # [T,K] integers, K different experts a token


class Routed(NamedTuple):
    """What `topk_routing`, `drop_tokens`, `sinkhorn_routing` and `hash_routing` return."""

    probs: Tensor  # [T,E], 0 where not routed
    routing_map: Tensor  # [T,E] bool


class AuxScores(NamedTuple):
    """What `aux_loss_scores` returns."""

    scores: Tensor  # [T,E] float32 (float64 for float64 logits); rows of padding are 0
    routing_map: Tensor  # [T,E] bool; rows of padding are False


class QuantileRouted(NamedTuple):
    """What `quantile_routing` returns."""

    probs: Tensor  # [T,E]
    routing_map: Tensor  # [T,E] bool
    quantile: Tensor | None  # [E] float32, to be averaged into beta; None in evaluation


class RouterState(NamedTuple):
    """What a router remembers. The counters start at zero in each global batch; expert_bias and beta are learnt."""

    expert_bias: Tensor  # [E] float32
    tokens_per_expert: Tensor  # [E] int64, for the next update of expert_bias
    global_tokens_per_expert: Tensor  # [E] int64, summed over ranks and micro-batches, for the global loss
    global_steps: Tensor  # [] int64, micro-batches in it
    beta: Tensor  # [E] float32, thresholds of quantile balancing
    quantile_sum: Tensor  # [E] float32
    quantile_count: Tensor  # [] int64
    replay_queue: tuple[Tensor, ...]  # [T,K] indices that wait to be replayed


class RouterLosses(NamedTuple):
    """This rank's shares, detached, in float32 (float64 for float64 logits); None for a loss that is off.

    A share divided by its coefficient is what Megatron logs, summed over the ranks that share the loss.
    """

    z_loss: Tensor | None = None
    aux_loss: Tensor | None = None
    seq_aux_loss: Tensor | None = None
    global_aux_loss: Tensor | None = None


class RouteOutput(NamedTuple):
    """What `route` returns."""

    probs: Tensor  # [T,E], the logits' dtype, the losses riding on it
    routing_map: Tensor  # [T,E] bool
    losses: RouterLosses
    indices: Tensor | None  # [T,K] where replay is "record"
    state: RouterState


REPLAYS = ("none", "record", "forward", "backward")


def check_logits(logits: Tensor) -> None:
    """Logits are [T,E], floating point, with 1 to MAX_EXPERTS experts."""
    require(logits.dim() == 2, "logits", f"of shape {tuple(logits.shape)}", "[tokens, experts]")
    require(logits.is_floating_point(), "logits", f"of dtype {logits.dtype}", "floating point")
    require(
        1 <= logits.shape[1] <= MAX_EXPERTS,
        "logits",
        f"of shape {tuple(logits.shape)}",
        f"of 1 to {MAX_EXPERTS} experts",
    )


def check_topk(topk: int, num_experts: int) -> None:
    """A token goes to 1 to E experts."""
    require(
        is_count(topk) and 1 <= topk <= num_experts, "topk", topk, f"an integer from 1 to {num_experts}, the experts"
    )


def check_groups(topk: int, num_experts: int, num_groups: int | None, group_topk: int | None) -> None:
    """Group-limited selection: G groups of E/G experts, of which g are kept, each judged by its K // g best experts."""
    if num_groups is None and group_topk is None:
        return
    require(num_groups is not None, "num_groups", num_groups, f"given with group_topk {group_topk}")
    require(group_topk is not None, "group_topk", group_topk, f"given with num_groups {num_groups}")
    assert num_groups is not None and group_topk is not None
    divides = is_count(num_groups) and num_groups >= 1 and num_experts % num_groups == 0
    require(divides, "num_groups", num_groups, f"a positive divisor of the {num_experts} experts")
    most = min(num_groups, topk)
    require(
        is_count(group_topk) and 1 <= group_topk <= most,
        "group_topk",
        group_topk,
        f"an integer from 1 to {most}, the lesser of num_groups and topk",
    )
    group = num_experts // num_groups
    enough = group_topk * group >= topk
    require(
        enough,
        "group_topk",
        group_topk,
        f"at least {-(-topk // group)}: the kept groups have {group} experts each, and topk is {topk}",
    )
    # topk // group_topk experts of a group are summed; with enough experts in the kept groups there are as many in each


def check_score_function(score_function: str) -> None:
    """One of SCORE_FUNCTIONS."""
    require(
        score_function in SCORE_FUNCTIONS,
        "score_function",
        repr(score_function),
        f"one of {', '.join(SCORE_FUNCTIONS)}",
    )


def check_topk_routing(
    logits: Tensor,
    topk: int,
    score_function: str,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: Tensor | None,
    precomputed_indices: Tensor | None,
) -> None:
    """The rules of `topk_indices` and `topk_routing` that can be seen without reading the device."""
    check_logits(logits)
    check_topk(topk, logits.shape[1])
    check_score_function(score_function)
    check_groups(topk, logits.shape[1], num_groups, group_topk)
    scaled = scaling_factor is None or (is_number(scaling_factor) and scaling_factor > 0)
    require(scaled, "scaling_factor", scaling_factor, "None or a positive number")
    if expert_bias is not None:
        require(
            score_function != "softmax",
            "expert_bias",
            "given with score_function softmax",
            "None: a bias goes with sigmoid or sqrtsoftplus",
        )
        check_float("expert_bias", expert_bias, (logits.shape[1],), logits)
    if precomputed_indices is not None:
        shape, right = tuple(precomputed_indices.shape), (logits.shape[0], topk)
        require(shape == right, "precomputed_indices", f"of shape {shape}", f"of shape {right}")
        require(
            not precomputed_indices.is_floating_point(),
            "precomputed_indices",
            f"of dtype {precomputed_indices.dtype}",
            "integer",
        )


def check_padding_mask(padding_mask: Tensor | None, tokens: int) -> None:
    """True marks padding; one entry a token."""
    if padding_mask is not None:
        require(
            tuple(padding_mask.shape) == (tokens,),
            "padding_mask",
            f"of shape {tuple(padding_mask.shape)}",
            f"of shape ({tokens},)",
        )
        require(not padding_mask.is_floating_point(), "padding_mask", f"of dtype {padding_mask.dtype}", "bool")


def check_drop_tokens(probs: Tensor, routing_map: Tensor, capacity: int, drop_policy: str) -> None:
    """The rules of `drop_tokens`."""
    check_map(routing_map)
    check_probs(probs, tuple(routing_map.shape), routing_map)
    require(is_count(capacity) and capacity >= 0, "capacity", capacity, "an integer ≥ 0")
    require(drop_policy in DROP_POLICIES, "drop_policy", repr(drop_policy), f"one of {', '.join(DROP_POLICIES)}")


def check_coeff(coeff: float) -> None:
    """A loss coefficient is a plain number ≥ 0."""
    require(is_number(coeff) and coeff >= 0, "coeff", coeff, "a number ≥ 0")


def check_load_balancing_loss(
    scores: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int, num_experts: int, coeff: float
) -> None:
    """The rules of `load_balancing_loss`."""
    require(
        scores.dim() == 2 and scores.is_floating_point(),
        "scores",
        f"of shape {tuple(scores.shape)}, {scores.dtype}",
        "[rows, columns], floating point",
    )
    require(is_count(num_experts) and num_experts >= 1, "num_experts", num_experts, "a positive integer")
    whole = scores.shape[1] % num_experts == 0 and scores.shape[1] > 0
    require(
        whole,
        "scores",
        f"of shape {tuple(scores.shape)}",
        f"with a positive multiple of num_experts {num_experts} columns",
    )
    shape = tuple(tokens_per_expert.shape)
    require(
        shape == (scores.shape[1],),
        "tokens_per_expert",
        f"of shape {shape}",
        f"of shape ({scores.shape[1]},), a count for each column of scores",
    )
    check_topk(topk, num_experts)
    if not isinstance(total_num_tokens, Tensor):
        require(
            is_count(total_num_tokens) and total_num_tokens >= 0,
            "total_num_tokens",
            total_num_tokens,
            "an integer ≥ 0 or a tensor of one",
        )
    check_coeff(coeff)


def check_gate(x: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: str | None) -> None:
    """The rules of `gate`."""
    require(
        x.dim() == 2 and x.is_floating_point(),
        "x",
        f"of shape {tuple(x.shape)}, {x.dtype}",
        "[tokens, hidden], floating point",
    )
    require(weight.dim() == 2, "weight", f"of shape {tuple(weight.shape)}", "[experts, hidden]")
    check_float("weight", weight, (weight.shape[0], x.shape[1]), x)
    if bias is not None:
        check_float("bias", bias, (weight.shape[0],), x)
    require(router_dtype in (None, "fp32", "fp64"), "router_dtype", repr(router_dtype), "None, 'fp32' or 'fp64'")


def check_route(
    logits: Tensor, config: MoEConfig, batch_size: int, replay: str, replay_target: Tensor | None, queued: int
) -> None:
    """The rules of `route`."""
    right = f"[tokens, {config.num_moe_experts}], the experts of the configuration"
    require(logits.shape[1] == config.num_moe_experts, "logits", f"of shape {tuple(logits.shape)}", right)
    whole = is_count(batch_size) and batch_size >= 1 and logits.shape[0] % batch_size == 0
    require(whole, "batch_size", batch_size, f"a positive divisor of the {logits.shape[0]} tokens")
    require(replay in REPLAYS, "replay", repr(replay), f"one of {', '.join(REPLAYS)}")
    plain = config.moe_router_load_balancing_type not in ("sinkhorn", "quantile_balancing")
    require(
        replay == "none" or plain,
        "replay",
        repr(replay),
        f"none with {config.moe_router_load_balancing_type}, which has no indices to replay",
    )
    require(
        (replay_target is not None) == (replay == "forward"),
        "replay_target",
        "missing or not wanted",
        "given with replay='forward', and only then",
    )
    require(
        replay != "backward" or queued > 0,
        "replay",
        "backward with an empty queue",
        "preceded by as many forward replays",
    )


def check_jitter(eps: float) -> None:
    """`eps` is a number from 0 to 1, 1 excluded."""
    require(is_number(eps) and 0 <= eps < 1, "eps", eps, "a number from 0 to 1, 1 excluded")


def check_loss_scale(scale: float) -> None:
    """`scale` is a plain finite number."""
    require(is_number(scale), "scale", scale, "a number")


def check_expert_capacity(num_tokens: int, num_experts: int, topk: int, capacity_factor: float) -> None:
    """The rules of `expert_capacity`."""
    require(is_count(num_tokens) and num_tokens >= 0, "num_tokens", num_tokens, "an integer ≥ 0")
    require(is_count(num_experts) and num_experts >= 1, "num_experts", num_experts, "a positive integer")
    require(is_count(topk) and topk >= 1, "topk", topk, "a positive integer")
    require(is_number(capacity_factor) and capacity_factor > 0, "capacity_factor", capacity_factor, "a positive number")


def check_update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, update_rate: float) -> None:
    """The rules of `update_expert_bias`."""
    require(
        expert_bias.dtype in (torch.float32, torch.float64),
        "expert_bias",
        f"of dtype {expert_bias.dtype}",
        "float32: a lower precision loses the steps",
    )
    require(expert_bias.dim() == 1, "expert_bias", f"of shape {tuple(expert_bias.shape)}", "[experts]")
    shape = tuple(tokens_per_expert.shape)
    require(
        shape == tuple(expert_bias.shape),
        "tokens_per_expert",
        f"of shape {shape}",
        f"of shape {tuple(expert_bias.shape)}, as expert_bias",
    )
    require(is_number(update_rate) and update_rate >= 0, "update_rate", update_rate, "a number ≥ 0")


def check_state_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Every tensor of a `RouterState` is there, and what is learnt in small steps is float32."""
    names = [name for name in RouterState._fields if name != "replay_queue"]
    for name in names:
        require(name in tensors, "tensors", f"without {name}", f"with {', '.join(names)}")
        if tensors[name].is_floating_point():
            require(tensors[name].dtype == torch.float32, name, f"of dtype {tensors[name].dtype}", "float32")
