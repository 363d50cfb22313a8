"""Router cases computed by hand: literal inputs and outputs."""

import math
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.judge import Bounded, Chosen, Exact, Expectation

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]
NONE = float("-inf")


def _floats(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def _within_roundings(*rows: Any, bound_of_zeros: float = 0.0) -> Bounded:
    """Within 2^-20 relative error; zeros within `bound_of_zeros`."""
    value = torch.tensor(rows, dtype=torch.float64)
    return Bounded(value, value.abs() * 2.0**-20 + (value == 0) * bound_of_zeros, torch.float32, torch.float32)


def _number(x: float) -> Bounded:
    value = torch.tensor(x, dtype=torch.float64)
    return Bounded(value, value.abs() * 2.0**-20, torch.float32, torch.float32)


def _map(*rows: list[int], dim: int = 1) -> Chosen:
    """Exactly this map."""
    value = torch.tensor(rows, dtype=torch.bool)
    keys = (value if dim else value.T).double()
    return Chosen(value, keys, torch.zeros_like(keys), keys.sum(1).long(), dim=dim)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


THREE = _floats([0, 1, 3])
GROUPS = _floats([9, 1, 0, 0, 5, 4.5, 4.4, 4.3])  # group 0: the best expert; group 1: the best four
OF_GROUP_TWO = [math.exp(x) / sum(math.exp(y) for y in (5, 4.5, 4.4, 4.3)) for x in (5, 4.5, 4.4, 4.3)]
BOTH = math.e**1 + math.e**3

TOPK_ROUTING: Golden = {
    "softmax_of_the_chosen": (
        Problem("topk_routing", {"logits": THREE}, {"topk": 2}),
        {"routing_map": _map([0, 1, 1]), "probs": _within_roundings([0, math.e / BOTH, math.e**3 / BOTH])},
    ),
    "softmax_of_all": (
        Problem("topk_routing", {"logits": THREE}, {"topk": 2, "pre_softmax": True}),
        {"routing_map": _map([0, 1, 1]), "probs": _within_roundings([0, math.e / (1 + BOTH), math.e**3 / (1 + BOTH)])},
    ),
    "sigmoid_normalised_and_scaled": (
        Problem(
            "topk_routing",
            {"logits": _floats([0, 0, -1])},
            {"topk": 2, "score_function": "sigmoid", "scaling_factor": 2.5},
        ),
        {"routing_map": _map([1, 1, 0]), "probs": _within_roundings([1.25, 1.25, 0])},
    ),
    "one_slot_is_not_normalised": (
        Problem("topk_routing", {"logits": _floats([0, -1])}, {"topk": 1, "score_function": "sigmoid"}),
        {"routing_map": _map([1, 0]), "probs": _within_roundings([0.5, 0])},
    ),
    "sqrtsoftplus": (
        Problem("topk_routing", {"logits": _floats([0, -1])}, {"topk": 1, "score_function": "sqrtsoftplus"}),
        {"routing_map": _map([1, 0]), "probs": _within_roundings([math.sqrt(math.log(2)), 0])},
    ),
    "bias_chooses_but_does_not_weigh": (
        Problem(
            "topk_routing",
            {"logits": _floats([0, 1, 2])},
            {"topk": 2, "score_function": "sigmoid", "expert_bias": torch.tensor([3.0, -3.0, 0.0])},
        ),
        {
            "routing_map": _map([1, 0, 1]),
            "probs": _within_roundings([0.5 / (0.5 + _sigmoid(2)), 0, _sigmoid(2) / (0.5 + _sigmoid(2))]),
        },
    ),
    "a_group_counts_its_best_four": (  # 18.2 > 10; with the best two 9.5 < 10
        Problem("topk_routing", {"logits": GROUPS}, {"topk": 4, "num_groups": 2, "group_topk": 1}),
        {"routing_map": _map([0, 0, 0, 0, 1, 1, 1, 1]), "probs": _within_roundings([0, 0, 0, 0, *OF_GROUP_TWO])},
    ),
    "groups_nearer_than_bf16_can_tell": (  # 2 < 2.001953125
        Problem(
            "topk_routing",
            {"logits": _floats([1.5, 0.5, 1.5, 0.501953125])},
            {"topk": 2, "num_groups": 2, "group_topk": 1},
        ),
        {"routing_map": _map([0, 0, 1, 1])},
    ),
    "bests_nearer_than_bf16_can_tell": (  # 2.001953125 > 2.0009765625
        Problem(
            "topk_routing",
            {"logits": _floats([1.501953125, 0.5, 1.5, 0.5009765625])},
            {"topk": 2, "num_groups": 2, "group_topk": 1},
        ),
        {"routing_map": _map([1, 1, 0, 0])},
    ),
    "minus_infinity_weighs_nothing": (
        Problem("topk_routing", {"logits": _floats([NONE, 2, NONE])}, {"topk": 2}),
        {"probs": _within_roundings([0, 1, 0])},
    ),
    # p (g - Σ g p) with p = 1/2, 1/2 and g = 1, 3; the third, of softmax 0.16, gets 0.16 of the
    # rounding of Σ g p = 2, if the softmax is over all
    "the_gradient_of_a_softmax": (
        Problem(
            "topk_routing",
            {"logits": _floats([1, 1, 0])},
            {"topk": 2},
            wanted=("logits",),
            cotangents={"probs": _floats([1, 3, 100])},
        ),
        {
            "routing_map": _map([1, 1, 0]),
            "probs": _within_roundings([0.5, 0.5, 0]),
            "d_logits": _within_roundings([-0.5, 0.5, 0], bound_of_zeros=2.0**-22),
        },
    ),
}


def _indices(*slots: list[int], experts: int) -> Chosen:
    value = torch.tensor(slots)
    keys = torch.zeros(len(slots), experts, dtype=torch.float64).scatter(1, value, 1.0)
    return Chosen(value, keys, torch.zeros_like(keys), torch.full((len(slots),), value.shape[1]), indices=True)


TOPK_INDICES: Golden = {
    "negative_logits": (  # a taken slot marked by -1 - x would be taken again
        Problem("topk_indices", {"logits": _floats([-8, -6, -7, -9])}, {"topk": 3}),
        {"indices": _indices([1, 2, 0], experts=4)},
    ),
    "two_of_one_weight": (
        Problem("topk_indices", {"logits": _floats([3, -2, 3])}, {"topk": 2}),
        {"indices": _indices([0, 2], experts=3), "probs": _within_roundings([0.5, 0.5])},
    ),
}

AUX_LOSS_SCORES: Golden = {
    "one_slot_is_normalised_too": (
        Problem("aux_loss_scores", {"logits": _floats([0, 0, 0, 0])}, {"topk": 1, "score_function": "sigmoid"}),
        {"scores": _within_roundings([0.25, 0.25, 0.25, 0.25])},
    ),
    "padding_is_left_out": (
        Problem(
            "aux_loss_scores",
            {"logits": _floats([1, 1], [1, 1])},
            {"topk": 2, "padding_mask": torch.tensor([False, True])},
        ),
        {"scores": _within_roundings([0.5, 0.5], [0, 0]), "routing_map": _map([1, 1], [0, 0])},
    ),
}

LOAD_BALANCING_LOSS: Golden = {
    "uniform_makes_the_coefficient": (  # T = 4, E = 2, K = 1: two tokens per expert, scores 1/2
        Problem(
            "load_balancing_loss",
            {"scores": torch.full((4, 2), 0.5), "tokens_per_expert": torch.tensor([2, 2])},
            {"total_num_tokens": 4, "topk": 1, "num_experts": 2, "coeff": 0.75},
        ),
        {"loss": _number(0.75)},
    ),
    "no_tokens_no_loss": (
        Problem(
            "load_balancing_loss",
            {"scores": torch.zeros(0, 2), "tokens_per_expert": torch.tensor([0, 0])},
            {"total_num_tokens": 0, "topk": 1, "num_experts": 2, "coeff": 1.0},
        ),
        {"loss": _number(0.0)},
    ),
    "less_than_a_token_a_sequence": (  # mean length of mostly padded sequences
        Problem(
            "load_balancing_loss",
            {"scores": _floats([1, 0, 0, 0]), "tokens_per_expert": torch.tensor([1, 0, 0, 0])},
            {"total_num_tokens": torch.tensor(0.5), "topk": 1, "num_experts": 2, "coeff": 1.0},
        ),
        {"loss": _number(2 / 0.25)},
    ),
    "two_sequences": (  # columns (b, e): E stays 2
        Problem(
            "load_balancing_loss",
            {"scores": _floats([1, 0, 0.5, 0.5], [1, 0, 0.5, 0.5]), "tokens_per_expert": torch.tensor([2, 0, 1, 1])},
            {"total_num_tokens": 2, "topk": 1, "num_experts": 2, "coeff": 1.0},
            wanted=("scores",),
            cotangents={"loss": torch.tensor(1.0)},
        ),
        {
            "loss": _number(2 / 4 * (2 * 2 + 1 * 1 + 1 * 1)),
            "d_scores": _within_roundings([1, 0, 0.5, 0.5], [1, 0, 0.5, 0.5]),
        },
    ),
}

Z_LOSS: Golden = {
    "two_tokens": (  # mean of (ln 2)² and (ln 4)²
        Problem("z_loss", {"logits": torch.log(_floats([1, 1], [2, 2]))}, {"coeff": 0.5}),
        {"loss": _number(0.25 * (math.log(2) ** 2 + math.log(4) ** 2))},
    ),
    "nothing_but_padding": (
        Problem("z_loss", {"logits": _floats([1, 1])}, {"coeff": 0.5, "padding_mask": torch.tensor([True])}),
        {"loss": _number(0.0)},
    ),
}

SINKHORN_ROUTING: Golden = {
    "the_plan_spreads_what_top_one_would_not": (  # both tokens prefer expert 0, token 1 by less
        Problem("sinkhorn_routing", {"logits": _floats([4, 0], [1, 0])}, {"topk": 1}),
        {"routing_map": _map([1, 0], [0, 1]), "probs": _within_roundings([_sigmoid(4), 0], [0, 0.5])},
    ),
    "evaluation_does_not": (
        Problem("sinkhorn_routing", {"logits": _floats([4, 0], [1, 0])}, {"topk": 1, "training": False}),
        {"routing_map": _map([1, 0], [1, 0]), "probs": _within_roundings([_sigmoid(4), 0], [_sigmoid(1), 0])},
    ),
}

DROP_TOKENS: Golden = {
    "the_largest_stay": (
        Problem(
            "drop_tokens",
            {
                "probs": _floats([0.25, 0], [0.5, 0.75], [0.125, 0]),
                "routing_map": torch.tensor([[1, 0], [1, 1], [1, 0]]).bool(),
            },
            {"capacity": 2},
        ),
        {
            "probs": Exact(_floats([0.25, 0], [0.5, 0.75], [0, 0]), "values"),
            "routing_map": _map([1, 0], [1, 1], [0, 0], dim=0),
        },
    ),
    "the_first_stay": (
        Problem(
            "drop_tokens",
            {"probs": _floats([0.125], [0.25], [0.5]), "routing_map": torch.ones(3, 1, dtype=torch.bool)},
            {"capacity": 2, "drop_policy": "position"},
        ),
        {"probs": Exact(_floats([0.125], [0.25], [0]), "values"), "routing_map": _map([1], [1], [0], dim=0)},
    ),
    "a_routed_prob_of_zero_goes_before_the_unrouted": (
        Problem(
            "drop_tokens",
            {"probs": _floats([0], [0], [0]), "routing_map": _bools([0], [0], [1])},
            {"capacity": 1, "pad_to_capacity": True},
        ),
        {"probs": Exact(_floats([0], [0], [0]), "values"), "routing_map": _map([0], [0], [1], dim=0)},
    ),
}

GATE: Golden = {
    "product_and_bias": (
        Problem(
            "gate",
            {"x": _floats([1, 2]), "weight": _floats([3, 4], [0.5, 0])},
            {"bias": torch.tensor([1.0, -1.0])},
            wanted=("x", "weight", "bias"),
            cotangents={"logits": _floats([1, 10])},
        ),
        {
            "logits": _within_roundings([12, -0.5]),
            "d_x": _within_roundings([8, 4]),
            "d_weight": _within_roundings([1, 2], [10, 20]),
            "d_bias": _within_roundings(1, 10),
        },
    ),
}
JITTER: Golden = {
    "without": (Problem("jitter", {"x": _floats([1, -2])}, {"eps": 0.0}), {"x": _within_roundings([1, -2])})
}
ATTACH_LOSS: Golden = {
    "the_loss_has_its_own_gradient": (
        Problem(
            "attach_loss",
            {"x": _floats([1, 2]), "loss": torch.tensor(7.0)},
            {"scale": 3.0},
            wanted=("x", "loss"),
            cotangents={"x": _floats([5, 6])},
        ),
        {
            "x": Exact(_floats([1, 2])),
            "d_x": Exact(_floats([5, 6]), "values"),
            "d_loss": Exact(torch.tensor(3.0), "values"),
        },
    ),
}
UPDATE_EXPERT_BIAS: Golden = {
    "towards_the_mean": (
        Problem(
            "update_expert_bias",
            {"expert_bias": torch.tensor([0.5, 0.5, 0.5]), "tokens_per_expert": torch.tensor([1, 2, 3])},
            {"update_rate": 0.25},
        ),
        {"expert_bias": _within_roundings(0.75, 0.5, 0.25)},
    ),
}
ROUTE: Golden = {}  # several calls: judged step by step by the contract
