"""Every illegal call raises a ValueError that begins with the argument and its value."""

import inspect
import re

import pytest
import torch

import moe_ref
from moe_ref.config import MAX_EXPERTS, RouterConfig

MAP = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
INDICES = torch.tensor([[2, -1], [0, 2], [1, 1]])
TOKENS, PROBS, ROWS = torch.zeros(4, 2), torch.zeros(4, 4), torch.zeros(6, 2)
SIZES, ORDER = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
LOGITS, SCORES, COUNTS = torch.zeros(4, 6), torch.zeros(4, 6), torch.ones(6)
ROUTED = torch.zeros(4, 6, dtype=torch.bool)
CONFIG = {"num_experts": 6, "topk": 2, "score_function": "sigmoid"}
STATE = moe_ref.new_state(RouterConfig(**CONFIG))
LEGAL = {  # the arguments of a legal call
    "permute": {"tokens": TOKENS, "routing_map": MAP},
    "unpermute": {"rows": ROWS, "row_map": moe_ref.permute(TOKENS, MAP).row_map},
    "sort_chunks": {"rows": ROWS, "chunk_sizes": SIZES, "order": ORDER},
    "pad_routing_map": {"routing_map": MAP, "align": 2},
    "indices_to_multihot": {"indices": INDICES, "probs": PROBS[:3, :2], "num_experts": 3},
    "multihot_to_indices": {"routing_map": MAP, "probs": PROBS, "topk": 2},
    "topk_indices": {"logits": LOGITS, "topk": 2},
    "sinkhorn_routing": {"logits": LOGITS, "topk": 2},
    "drop_tokens": {"probs": SCORES, "routing_map": ROUTED, "capacity": 2},
    "aux_loss_scores": {"logits": LOGITS, "topk": 2},
    "load_balancing_loss": {
        "scores": SCORES, "tokens_per_expert": COUNTS, "total_num_tokens": 4, "topk": 2, "num_experts": 6, "coeff": 1.0
    },
    "z_loss": {"logits": LOGITS, "coeff": 1.0},
    "attach_loss": {"x": LOGITS, "loss": COUNTS[0]},
    "update_expert_bias": {"expert_bias": COUNTS, "tokens_per_expert": COUNTS, "update_rate": 0.1},
    "expert_capacity": {"num_tokens": 4, "num_experts": 6, "topk": 2, "capacity_factor": 1.0},
    "gate": {"x": TOKENS, "weight": torch.zeros(6, 2)},
    "jitter": {"x": TOKENS, "eps": 0.5},
    "route": {"logits": LOGITS, "config": CONFIG, "state": STATE},
    "state_from": {"tensors": moe_ref.state_tensors(STATE)},
}  # fmt: skip


def called(function, changes):
    """The legal call with changed arguments, or changed fields of its configuration or state."""
    arguments = LEGAL[function] | changes
    if function == "route":
        arguments["config"] = RouterConfig(**CONFIG | changes.get("config", {}))
    if function == "state_from":
        tensors = LEGAL[function]["tensors"] | changes
        arguments = {"tensors": {name: x for name, x in tensors.items() if x is not None}}
    parameters = inspect.signature(getattr(moe_ref, function)).parameters
    names = {re.sub("_[A-Z]+$", "", name): name for name in parameters}
    return getattr(moe_ref, function)(**{names[name]: x for name, x in arguments.items()})


SIGMOID = {"score_function": "sigmoid"}
IN_GROUPS = {"num_groups": 3, "group_topk": 1}
PLAIN_NUMBERS = (float("nan"), float("inf"), True, "1")
INDEX = torch.tensor([[0, 1]] * 4)
ILLEGAL = [
    ("topk_indices", {"logits": LOGITS[0]}, "logits is of shape (6,)"),
    ("topk_indices", {"logits": LOGITS.long()}, "logits is of dtype torch.int64"),
    ("topk_indices", {"logits": LOGITS[:, :0]}, "logits is of shape (4, 0)"),
    ("topk_indices", {"logits": torch.zeros(1, MAX_EXPERTS + 1)}, f"logits is of shape (1, {MAX_EXPERTS + 1})"),
    *(("topk_indices", {"topk": value}, f"topk is {value}") for value in (0, 7, -1, 2.0, True, None)),
    ("topk_indices", {"score_function": "relu"}, "score_function is 'relu'"),
    ("topk_indices", {"num_groups": 2}, "group_topk is None"),
    ("topk_indices", {"group_topk": 2}, "num_groups is None"),
    *(("topk_indices", IN_GROUPS | {"num_groups": value}, f"num_groups is {value}") for value in (0, 4, 7, -1, 3.0)),
    *(("topk_indices", IN_GROUPS | {"group_topk": value}, f"group_topk is {value}") for value in (0, 3, 4, -1, 1.0)),
    ("topk_indices", IN_GROUPS | {"topk": 3}, "group_topk is 1"),
    *(
        ("topk_indices", {"scaling_factor": value}, f"scaling_factor is {value}")
        for value in (0, 0.0, -1.0, *PLAIN_NUMBERS)
    ),
    ("topk_indices", {"expert_bias": COUNTS}, "expert_bias is given with score_function softmax"),
    ("topk_indices", SIGMOID | {"expert_bias": COUNTS[1:]}, "expert_bias is of shape (5,)"),
    ("topk_indices", SIGMOID | {"expert_bias": COUNTS.long()}, "expert_bias is of dtype torch.int64"),
    ("topk_indices", SIGMOID | {"expert_bias": COUNTS.to("meta")}, "expert_bias is on meta"),
    ("topk_indices", {"precomputed_indices": INDEX[:3]}, "precomputed_indices is of shape (3, 2)"),
    ("topk_indices", {"precomputed_indices": INDEX, "topk": 1}, "precomputed_indices is of shape (4, 2)"),
    ("topk_indices", {"precomputed_indices": INDEX.float()}, "precomputed_indices is of dtype torch.float32"),
    ("topk_indices", {"precomputed_indices": INDEX - 1}, "precomputed_indices is [-1"),
    ("topk_indices", {"precomputed_indices": INDEX + 5}, "precomputed_indices is [6"),
    ("drop_tokens", {"routing_map": ROUTED[1:]}, "probs is of shape (4, 6)"),
    ("drop_tokens", {"probs": SCORES.long()}, "probs is of dtype torch.int64"),
    ("drop_tokens", {"routing_map": ROUTED.float()}, "routing_map is of dtype torch.float32"),
    *(("drop_tokens", {"capacity": value}, f"capacity is {value}") for value in (-1, 2.0, True, None)),
    ("drop_tokens", {"drop_policy": "random"}, "drop_policy is 'random'"),
    ("aux_loss_scores", {"logits": LOGITS[0]}, "logits is of shape (6,)"),
    ("aux_loss_scores", {"topk": 7}, "topk is 7"),
    ("aux_loss_scores", {"score_function": "tanh"}, "score_function is 'tanh'"),
    ("aux_loss_scores", {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    ("aux_loss_scores", {"padding_mask": ROUTED}, "padding_mask is of shape (4, 6)"),
    ("aux_loss_scores", {"padding_mask": SCORES[:, 0]}, "padding_mask is of dtype torch.float32"),
    (
        "aux_loss_scores",
        {"padding_mask": SCORES[:, 0].int()},
        "padding_mask is of dtype torch.int32; it must be torch.bool",
    ),
    ("load_balancing_loss", {"scores": SCORES[0]}, "scores is of shape (6,)"),
    ("load_balancing_loss", {"num_experts": 4}, "scores is of shape (4, 6)"),
    ("load_balancing_loss", {"num_experts": 0}, "num_experts is 0"),
    ("load_balancing_loss", {"tokens_per_expert": COUNTS[1:]}, "tokens_per_expert is of shape (5,)"),
    *(
        ("load_balancing_loss", {"total_num_tokens": value}, f"total_num_tokens is {value}")
        for value in (-1, 2.0, True)
    ),
    *(("load_balancing_loss", {"topk": value}, f"topk is {value}") for value in (0, 7)),
    *(("load_balancing_loss", {"coeff": value}, f"coeff is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    *(("z_loss", {"coeff": value}, f"coeff is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    ("z_loss", {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    *(("attach_loss", {"scale": value}, f"scale is {value}") for value in PLAIN_NUMBERS),
    ("update_expert_bias", {"expert_bias": COUNTS.bfloat16()}, "expert_bias is of dtype torch.bfloat16"),
    ("update_expert_bias", {"expert_bias": COUNTS[None]}, "expert_bias is of shape (1, 6)"),
    ("update_expert_bias", {"tokens_per_expert": COUNTS[1:]}, "tokens_per_expert is of shape (5,)"),
    *(("update_expert_bias", {"update_rate": value}, f"update_rate is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    *(("expert_capacity", {"num_tokens": value}, f"num_tokens is {value}") for value in (-1, 2.0)),
    *(("expert_capacity", {"num_experts": value}, f"num_experts is {value}") for value in (0, 2.0)),
    *(("expert_capacity", {"topk": value}, f"topk is {value}") for value in (0, 2.0)),
    *(
        ("expert_capacity", {"capacity_factor": value}, f"capacity_factor is {value}")
        for value in (0, -1.0, *PLAIN_NUMBERS)
    ),
    ("gate", {"x": TOKENS[0]}, "x is of shape (2,)"),
    ("gate", {"x": TOKENS.long()}, "x is of shape (4, 2), torch.int64"),
    ("gate", {"weight": torch.zeros(6, 3)}, "weight is of shape (6, 3)"),
    ("gate", {"weight": torch.zeros(6)}, "weight is of shape (6,)"),
    ("gate", {"bias": COUNTS[1:]}, "bias is of shape (5,)"),
    ("gate", {"router_dtype": "fp8"}, "router_dtype is 'fp8'"),
    *(("jitter", {"eps": value}, f"eps is {value}") for value in (-0.5, 1.0, *PLAIN_NUMBERS)),
    ("sinkhorn_routing", {"topk": 7}, "topk is 7"),
    ("route", {"logits": LOGITS[:, 1:]}, "logits is of shape (4, 5)"),
    *(("route", {"batch_size": value}, f"batch_size is {value}") for value in (0, 3, 2.0)),
    ("route", {"replay": "rewind"}, "replay is 'rewind'"),
    ("route", {"replay": "forward"}, "replay_target is missing"),
    ("route", {"replay_target": INDEX}, "replay_target is missing or not wanted"),
    ("route", {"replay": "backward"}, "replay is backward with an empty queue"),
    ("route", {"replay": "record", "config": {"sinkhorn": True}}, "replay is 'record'"),
    ("route", {"config": {"topk": 7}}, "topk is 7"),
    ("route", {"config": {"score_function": "relu"}}, "score_function is 'relu'"),
    ("route", {"config": {"num_groups": 4}}, "group_topk is None"),
    ("route", {"config": {"score_function": "softmax", "expert_bias": True}}, "expert_bias is True"),
    ("route", {"config": {"pad_to_capacity": True}}, "pad_to_capacity is True"),
    ("route", {"config": {"sinkhorn": True, "capacity_factor": 1.0}}, "sinkhorn is True"),
    ("route", {"config": {"sinkhorn": True, "aux_loss_coeff": 0.5}}, "sinkhorn is True"),
    ("route", {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    ("state_from", {"expert_bias": torch.zeros(6).long()}, "expert_bias is of dtype torch.int64"),
    ("state_from", {"expert_bias": None}, "tensors is without expert_bias"),
    ("permute", {"tokens": torch.zeros(4)}, "tokens is of shape (4,)"),
    ("permute", {"tokens": torch.zeros(5, 2)}, "routing_map is of shape (4, 4)"),
    ("permute", {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    ("permute", {"routing_map": MAP.float()}, "routing_map is of dtype torch.float32"),
    ("permute", {"routing_map": MAP[:, :0]}, "routing_map is of shape (4, 0)"),
    (
        "permute",
        {"routing_map": torch.zeros(4, MAX_EXPERTS + 1, dtype=torch.bool)},
        f"routing_map is of shape (4, {MAX_EXPERTS + 1})",
    ),
    ("permute", {"routing_map": MAP.to("meta")}, "routing_map is on meta"),
    ("permute", {"probs": PROBS[:3]}, "probs is of shape (3, 4)"),
    ("permute", {"probs": PROBS.long()}, "probs is of dtype torch.int64"),
    ("permute", {"probs": PROBS.to("meta")}, "probs is on meta"),
    *(("permute", {"align": value}, f"align is {value}") for value in (0, -16, 1.5, True)),
    *(("permute", {"capacity": value}, f"capacity is {value}") for value in (0, -4, 2.0, False)),
    *(("permute", {"num_rows": value}, f"num_rows is {value}") for value in (-1, 4.0, True)),
    ("permute", {"align": 2, "capacity": 4}, "capacity is 4 with align 2"),
    ("permute", {"capacity": 4, "num_rows": 16}, "num_rows is 16 with capacity 4"),
    ("permute", {"align": 4, "num_rows": 6}, "num_rows is 6"),
    ("unpermute", {"rows": torch.zeros(6)}, "rows is of shape (6,)"),
    ("unpermute", {"rows": torch.zeros(7, 2)}, "rows is of shape (7, 2)"),
    ("unpermute", {"restore_shape": (5, 2)}, "restore_shape is (5, 2)"),
    ("unpermute", {"restore_shape": (4, 3)}, "restore_shape is (4, 3)"),
    ("unpermute", {"probs": PROBS[:, :3]}, "probs is of shape (4, 3)"),
    ("unpermute", {"probs": PROBS.int()}, "probs is of dtype torch.int32"),
    ("sort_chunks", {"rows": torch.zeros(6)}, "rows is of shape (6,)"),
    ("sort_chunks", {"chunk_sizes": SIZES[None]}, "chunk_sizes is of shape (1, 3)"),
    ("sort_chunks", {"chunk_sizes": SIZES.float()}, "chunk_sizes is of dtype torch.float32"),
    ("sort_chunks", {"chunk_sizes": torch.tensor([1, -1, 2])}, "chunk_sizes is [1, -1, 2]"),
    ("sort_chunks", {"chunk_sizes": torch.tensor([1, 2, 4])}, "chunk_sizes is [1, 2, 4], together 7"),
    ("sort_chunks", {"order": ORDER.double()}, "order is of dtype torch.float64"),
    ("sort_chunks", {"order": ORDER[:2]}, "order is of shape (2,)"),
    ("sort_chunks", {"order": torch.tensor([0, 0, 1])}, "order is [0, 0, 1]"),
    ("sort_chunks", {"order": torch.tensor([1, 2, 3])}, "order is [1, 2, 3]"),
    ("sort_chunks", {"probs": torch.zeros(5)}, "probs is of shape (5,)"),
    *(("pad_routing_map", {"align": value}, f"align is {value}") for value in (0, -1, None, 2.0)),
    ("pad_routing_map", {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    ("indices_to_multihot", {"indices": INDICES[0]}, "indices is of shape (2,)"),
    ("indices_to_multihot", {"indices": INDICES.float()}, "indices is of dtype torch.float32"),
    ("indices_to_multihot", {"indices": INDICES - 1}, "indices is [-2]"),
    ("indices_to_multihot", {"indices": INDICES + 1}, "indices is [3, 3]"),
    ("indices_to_multihot", {"probs": PROBS[:3]}, "probs is of shape (3, 4)"),
    *(
        ("indices_to_multihot", {"num_experts": value}, f"num_experts is {value}")
        for value in (0, -1, 3.0, MAX_EXPERTS + 1)
    ),
    ("multihot_to_indices", {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    ("multihot_to_indices", {"probs": PROBS[:, :2]}, "probs is of shape (4, 2)"),
    *(("multihot_to_indices", {"topk": value}, f"topk is {value}") for value in (0, -1, 2.0, True)),
]


LEGAL_CHANGES = [
    *((function, {}) for function in LEGAL),
    ("topk_indices", IN_GROUPS),
    ("topk_indices", SIGMOID | {"expert_bias": COUNTS}),
    ("topk_indices", {"precomputed_indices": INDEX}),
]


@pytest.mark.parametrize(("function", "changes", "message"), ILLEGAL, ids=[x[2] for x in ILLEGAL])
def test_an_illegal_call_names_the_argument_and_its_value(function, changes, message):
    with pytest.raises(ValueError, match="must be") as raised:
        called(function, changes)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(("function", "changes"), LEGAL_CHANGES)
def test_the_calls_that_are_varied_above_are_legal(function, changes):
    assert called(function, changes) is not None
