"""The router: results, and the rules that make a call illegal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config.permutation import check_map
from moe_ref.config.rules import (
    MAX_EXPERTS,
    check_choice,
    check_count,
    check_float,
    check_probs,
    is_count,
    is_number,
    require,
    require_dtype,
    require_shape,
)

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
DROP_POLICIES = ("probs", "position")


class TopK(NamedTuple):
    """What `topk_indices` returns. The order of a token's slots is unspecified."""

    probs: Tensor  # [T,K], the logits' dtype
    indices: Tensor  # [T,K] integers, K different experts per token


class Routed(NamedTuple):
    """What `topk_routing`, `drop_tokens` and `sinkhorn_routing` return."""

    probs: Tensor  # [T,E], 0 where not routed
    routing_map: Tensor  # [T,E] bool


class AuxScores(NamedTuple):
    """What `aux_loss_scores` returns."""

    scores: Tensor  # [T,E] float32 (float64 for float64 logits); rows of padding are 0
    routing_map: Tensor  # [T,E] bool; rows of padding are False


class RouterState(NamedTuple):
    """What a router remembers between steps. `finish_batch` learns from the counters and sets them
    to 0.

    Three experts, K = 1, two micro-batches of four tokens, 3 1 0 of them routed to the experts each
    time, on each of two ranks:

        tokens_per_expert = 6 2 0     global_tokens_per_expert = 12 4 0     global_steps = 2

    The mean over experts of the summed tokens_per_expert, 12 4 0, is 16/3: with update_rate 0.25,
    `finish_batch` moves the expert bias from 0 0 0 to -0.25 0.25 0.25.
    """

    expert_bias: Tensor  # [E] float32
    tokens_per_expert: Tensor  # [E] int64, this rank's, for the next update of expert_bias
    global_tokens_per_expert: Tensor  # [E] int64, summed over ranks and micro-batches, for the global loss
    global_steps: Tensor  # [] int64, micro-batches in it
    replay_queue: tuple[Tensor, ...]  # [T,K] indices that wait to be replayed


class RankGroup(NamedTuple):
    """A group of ranks, this one among them."""

    size: int = 1
    sum: Callable[[Tensor], Tensor] = lambda x: x  # of every rank's tensor


class RouterRanks(NamedTuple):
    """The groups over which a router counts; by default this rank alone."""

    tp_cp: RankGroup = RankGroup()  # the ranks that share a sequence
    tp_dp_cp: RankGroup = RankGroup()  # the ranks that share the batch


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The settings of a router; `router_config` makes one of Megatron's options.

    Raises:
        ValueError: see `check_topk`, `check_score_function`, `check_groups`; also a combination
            without a meaning.
    """

    num_experts: int
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None
    expert_bias: bool = False  # a learnt bias per expert has part in the choice
    bias_update_rate: float = 1e-3
    sinkhorn: bool = False  # choose by `sinkhorn_routing`, not by `topk_indices`
    capacity_factor: float | None = None  # None: no token is dropped
    drop_policy: str = "probs"
    pad_to_capacity: bool = False
    aux_loss_coeff: float = 0.0
    seq_aux_loss_coeff: float = 0.0
    global_aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    loss_per_token: bool = False  # gradients are divided by the number of tokens later
    loss_divisor: int = 1  # calls of this router per step: of a repeated MTP layer

    def __post_init__(self) -> None:
        check_topk(self.topk, self.num_experts)
        check_score_function(self.score_function)
        check_groups(self.topk, self.num_experts, self.num_groups, self.group_topk)
        biased = self.expert_bias and self.score_function == "softmax"
        require(not biased, "expert_bias", "True with score_function softmax", "False, or the score function another")
        filled = self.pad_to_capacity and self.capacity_factor is None
        require(not filled, "pad_to_capacity", "True without capacity_factor", "False, or a capacity factor be given")
        balanced = self.sinkhorn and (self.capacity_factor is not None or bool(self.balancing_coeffs))
        require(not balanced, "sinkhorn", "True with a capacity factor or a balancing loss", "False, or neither given")

    @property
    def selection(self) -> dict[str, Any]:
        """The settings of `topk_indices` and `topk_routing`."""
        names = ("topk", "score_function", "pre_softmax", "num_groups", "group_topk", "scaling_factor")
        return {name: getattr(self, name) for name in names}

    @property
    def balancing_coeffs(self) -> dict[str, float]:
        """The coefficient of each balancing loss that is on, in the order in which they ride on the
        probs.
        """
        names = ("aux_loss", "seq_aux_loss", "global_aux_loss")
        return {name: coeff for name in names if (coeff := getattr(self, f"{name}_coeff"))}


class RouterLosses(NamedTuple):
    """This rank's shares, detached, in float32 (float64 for float64 logits); None for a loss that
    is off.

    A share divided by its coefficient is what Megatron logs, summed over the ranks that share the
    loss.
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
    require_shape(logits.dim() == 2, "logits", logits, "[tokens, experts]")
    require_dtype(logits.is_floating_point(), "logits", logits, "floating point")
    require_shape(1 <= logits.shape[1] <= MAX_EXPERTS, "logits", logits, f"of 1 to {MAX_EXPERTS} experts")


def check_topk(topk: int, num_experts: int) -> None:
    """A token goes to 1 to E experts."""
    requirement = f"an integer from 1 to {num_experts}, the experts"
    require(is_count(topk) and 1 <= topk <= num_experts, "topk", topk, requirement)


def check_groups(topk: int, num_experts: int, num_groups: int | None, group_topk: int | None) -> None:
    """Group-limited selection: of G groups of E/G experts g are kept, by the sums of their K // g
    best experts.
    """
    if num_groups is None and group_topk is None:
        return
    require(num_groups is not None, "num_groups", num_groups, f"given with group_topk {group_topk}")
    require(group_topk is not None, "group_topk", group_topk, f"given with num_groups {num_groups}")
    assert num_groups is not None and group_topk is not None
    divides = is_count(num_groups) and num_groups >= 1 and num_experts % num_groups == 0
    require(divides, "num_groups", num_groups, f"a positive divisor of the {num_experts} experts")
    most = min(num_groups, topk)
    requirement = f"an integer from 1 to {most}, the lesser of num_groups and topk"
    require(is_count(group_topk) and 1 <= group_topk <= most, "group_topk", group_topk, requirement)
    group = num_experts // num_groups
    enough = group_topk * group >= topk
    requirement = f"at least {-(-topk // group)}: the kept groups have {group} experts each, and topk is {topk}"
    require(enough, "group_topk", group_topk, requirement)
    # a group sums its topk // group_topk best experts; with `enough` there are as many in each


def check_score_function(score_function: str) -> None:
    """One of SCORE_FUNCTIONS."""
    check_choice("score_function", score_function, SCORE_FUNCTIONS)


def check_topk_routing(
    logits: Tensor, topk: int, score_function: str, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, expert_bias: Tensor | None, precomputed_indices: Tensor | None,
) -> None:  # fmt: skip
    """The rules of `topk_indices` and `topk_routing` that do not read the device."""
    check_logits(logits)
    check_topk(topk, logits.shape[1])
    check_score_function(score_function)
    check_groups(topk, logits.shape[1], num_groups, group_topk)
    scaled = scaling_factor is None or (is_number(scaling_factor) and scaling_factor > 0)
    require(scaled, "scaling_factor", scaling_factor, "None or a positive number")
    if expert_bias is not None:
        requirement = "None: a bias goes with sigmoid or sqrtsoftplus"
        require(score_function != "softmax", "expert_bias", "given with score_function softmax", requirement)
        check_float("expert_bias", expert_bias, (logits.shape[1],), logits)
    if precomputed_indices is not None:
        shape, index_shape = tuple(precomputed_indices.shape), (logits.shape[0], topk)
        require(shape == index_shape, "precomputed_indices", f"of shape {shape}", f"of shape {index_shape}")
        legal = not precomputed_indices.is_floating_point()
        require_dtype(legal, "precomputed_indices", precomputed_indices, "integer")


def check_padding_mask(padding_mask: Tensor | None, tokens: int) -> None:
    """A bool for each token, True for padding."""
    if padding_mask is not None:
        require_shape(tuple(padding_mask.shape) == (tokens,), "padding_mask", padding_mask, f"of shape ({tokens},)")
        require_dtype(padding_mask.dtype == torch.bool, "padding_mask", padding_mask, "torch.bool")


def check_drop_tokens(probs: Tensor, routing_map: Tensor, capacity: int, drop_policy: str) -> None:
    """The rules of `drop_tokens`."""
    check_map(routing_map)
    check_probs(probs, tuple(routing_map.shape), routing_map)
    require(is_count(capacity) and capacity >= 0, "capacity", capacity, "an integer ≥ 0")
    check_choice("drop_policy", drop_policy, DROP_POLICIES)


def check_coeff(coeff: float) -> None:
    """A loss coefficient is a plain number ≥ 0."""
    require(is_number(coeff) and coeff >= 0, "coeff", coeff, "a number ≥ 0")


def check_load_balancing_loss(
    scores: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int, num_experts: int, coeff: float
) -> None:
    """The rules of `load_balancing_loss`."""
    legal = scores.dim() == 2 and scores.is_floating_point()
    require(legal, "scores", f"of shape {tuple(scores.shape)}, {scores.dtype}", "[rows, columns], floating point")
    check_count("num_experts", num_experts)
    divides = scores.shape[1] % num_experts == 0 and scores.shape[1] > 0
    require_shape(divides, "scores", scores, f"with a positive multiple of num_experts {num_experts} columns")
    shape = tuple(tokens_per_expert.shape)
    requirement = f"of shape ({scores.shape[1]},), a count per column of scores"
    require(shape == (scores.shape[1],), "tokens_per_expert", f"of shape {shape}", requirement)
    check_topk(topk, num_experts)
    if not isinstance(total_num_tokens, Tensor):
        requirement = "an integer ≥ 0 or a tensor of one"
        require(is_count(total_num_tokens) and total_num_tokens >= 0, "total_num_tokens", total_num_tokens, requirement)
    check_coeff(coeff)


def check_gate(x: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: str | None) -> None:
    """The rules of `gate`."""
    requirement = "[tokens, hidden], floating point"
    require(x.dim() == 2 and x.is_floating_point(), "x", f"of shape {tuple(x.shape)}, {x.dtype}", requirement)
    require_shape(weight.dim() == 2, "weight", weight, "[experts, hidden]")
    check_float("weight", weight, (weight.shape[0], x.shape[1]), x)
    if bias is not None:
        check_float("bias", bias, (weight.shape[0],), x)
    require(router_dtype in (None, "fp32", "fp64"), "router_dtype", repr(router_dtype), "None, 'fp32' or 'fp64'")


def check_route(
    logits: Tensor, config: RouterConfig, batch_size: int, replay: str, replay_target: Tensor | None, queued: int
) -> None:
    """The rules of `route`."""
    requirement = f"[tokens, {config.num_experts}], the experts of the configuration"
    require_shape(logits.shape[1] == config.num_experts, "logits", logits, requirement)
    divides = is_count(batch_size) and batch_size >= 1 and logits.shape[0] % batch_size == 0
    require(divides, "batch_size", batch_size, f"a positive divisor of the {logits.shape[0]} tokens")
    check_choice("replay", replay, REPLAYS)
    requirement = "none with sinkhorn, which has no indices to replay"
    require(replay == "none" or not config.sinkhorn, "replay", repr(replay), requirement)
    consistent = (replay_target is not None) == (replay == "forward")
    require(consistent, "replay_target", "missing or not wanted", "given with replay='forward', and only then")
    requirement = "preceded by as many forward replays"
    require(replay != "backward" or queued > 0, "replay", "backward with an empty queue", requirement)


def check_jitter(eps: float) -> None:
    """`eps` is a number from 0 to 1, 1 excluded."""
    require(is_number(eps) and 0 <= eps < 1, "eps", eps, "a number from 0 to 1, 1 excluded")


def check_loss_scale(scale: float) -> None:
    """`scale` is a plain finite number."""
    require(is_number(scale), "scale", scale, "a number")


def check_expert_capacity(num_tokens: int, num_experts: int, topk: int, capacity_factor: float) -> None:
    """The rules of `expert_capacity`."""
    require(is_count(num_tokens) and num_tokens >= 0, "num_tokens", num_tokens, "an integer ≥ 0")
    check_count("num_experts", num_experts)
    check_count("topk", topk)
    require(is_number(capacity_factor) and capacity_factor > 0, "capacity_factor", capacity_factor, "a positive number")


def expert_capacity(num_tokens: int, *, num_experts: int, topk: int, capacity_factor: float) -> int:
    """Rows per expert: min(⌈T · K / E · cf⌉, T), cf taken as the decimal it is written as.

    So no rounding adds a row: T=31, K=1, E=60, cf=60 makes 31.

    Raises:
        ValueError: num_tokens, num_experts, topk or capacity_factor is no number of its kind.
    """
    check_expert_capacity(num_tokens, num_experts, topk, capacity_factor)
    factor = Fraction(str(capacity_factor))
    return min(-(-num_tokens * topk * factor.numerator // (num_experts * factor.denominator)), num_tokens)


def check_update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, update_rate: float) -> None:
    """The rules of `update_expert_bias`."""
    requirement = "float32: a lower precision loses the steps"
    require_dtype(expert_bias.dtype in (torch.float32, torch.float64), "expert_bias", expert_bias, requirement)
    require_shape(expert_bias.dim() == 1, "expert_bias", expert_bias, "[experts]")
    shape = tuple(tokens_per_expert.shape)
    requirement = f"of shape {tuple(expert_bias.shape)}, as expert_bias"
    require(shape == tuple(expert_bias.shape), "tokens_per_expert", f"of shape {shape}", requirement)
    require(is_number(update_rate) and update_rate >= 0, "update_rate", update_rate, "a number ≥ 0")


def check_state_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Every tensor of a `RouterState` is there, and the expert bias is floating point."""
    names = [name for name in RouterState._fields if name != "replay_queue"]
    for name in names:
        require(name in tensors, "tensors", f"without {name}", f"with {', '.join(names)}")
    bias = tensors["expert_bias"]
    require_dtype(bias.is_floating_point(), "expert_bias", bias, "floating point")
