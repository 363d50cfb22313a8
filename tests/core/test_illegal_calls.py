"""Every illegal call raises a ValueError that begins with the argument and its value."""

import pytest
import torch

import moe_ref
from moe_ref.config import MAX_EXPERTS, RouterConfig

MAP = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
INDICES = torch.tensor([[2, -1], [0, 2], [1, 1]])
TOKENS, PROBS, ROWS = torch.zeros(4, 2), torch.zeros(4, 4), torch.zeros(6, 2)
SIZES, ORDER = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])


def permute(tokens=TOKENS, routing_map=MAP, **settings):
    return moe_ref.permute(tokens, routing_map, **settings)


def unpermute(rows=ROWS, **settings):
    return moe_ref.unpermute(rows, permute().row_map, **settings)


def sort_chunks(rows=ROWS, sizes=SIZES, order=ORDER, **settings):
    return moe_ref.sort_chunks(rows, sizes, order, **settings)


def multihot(indices=INDICES, probs=PROBS[:3, :2], num_experts=3):
    return moe_ref.indices_to_multihot(indices, probs, num_experts=num_experts)


def listed(routing_map=MAP, probs=PROBS, topk=2):
    return moe_ref.multihot_to_indices(routing_map, probs, topk=topk)


LOGITS, SCORES, COUNTS, ROUTED = (
    torch.zeros(4, 6),
    torch.zeros(4, 6),
    torch.ones(6),
    torch.zeros(4, 6, dtype=torch.bool),
)
WEIGHT = torch.zeros(6, 2)
CONFIG = {"num_experts": 6, "topk": 2, "score_function": "sigmoid"}
STATE = moe_ref.new_state(RouterConfig(**CONFIG))


def chosen(logits=LOGITS, topk=2, **settings):
    return moe_ref.topk_indices(logits, topk=topk, **settings)


def dropped(probs=SCORES, routing_map=ROUTED, capacity=2, **settings):
    return moe_ref.drop_tokens(probs, routing_map, capacity=capacity, **settings)


def scored(logits=LOGITS, topk=2, **settings):
    return moe_ref.aux_loss_scores(logits, topk=topk, **settings)


def balanced(scores=SCORES, tokens_per_expert=COUNTS, total_num_tokens=4, topk=2, num_experts=6, coeff=1.0):
    return moe_ref.load_balancing_loss(
        scores, tokens_per_expert, total_num_tokens=total_num_tokens, topk=topk, num_experts=num_experts, coeff=coeff
    )


def z_loss(logits=LOGITS, coeff=1.0, **settings):
    return moe_ref.z_loss(logits, coeff=coeff, **settings)


def updated(expert_bias=COUNTS, tokens_per_expert=COUNTS, update_rate=0.1):
    return moe_ref.update_expert_bias(expert_bias, tokens_per_expert, update_rate=update_rate)


def capacity(num_tokens=4, num_experts=6, topk=2, capacity_factor=1.0):
    return moe_ref.expert_capacity(num_tokens, num_experts=num_experts, topk=topk, capacity_factor=capacity_factor)


def gate(x=TOKENS, weight=WEIGHT, **settings):
    return moe_ref.gate(x, weight, **settings)


def route(logits=LOGITS, config=CONFIG, **settings):
    return moe_ref.route(logits, RouterConfig(**CONFIG | config), state=STATE, **settings)


def loaded(**changed):
    return moe_ref.state_from(
        {name: x for name, x in (moe_ref.state_tensors(STATE) | changed).items() if x is not None}
    )


SIGMOID = {"score_function": "sigmoid"}
IN_GROUPS = {"num_groups": 3, "group_topk": 1}
PLAIN_NUMBERS = (float("nan"), float("inf"), True, "1")
INDEX = torch.tensor([[0, 1]] * 4)
ILLEGAL = [
    (chosen, {"logits": LOGITS[0]}, "logits is of shape (6,)"),
    (chosen, {"logits": LOGITS.long()}, "logits is of dtype torch.int64"),
    (chosen, {"logits": LOGITS[:, :0]}, "logits is of shape (4, 0)"),
    (chosen, {"logits": torch.zeros(1, MAX_EXPERTS + 1)}, f"logits is of shape (1, {MAX_EXPERTS + 1})"),
    *((chosen, {"topk": value}, f"topk is {value}") for value in (0, 7, -1, 2.0, True, None)),
    (chosen, {"score_function": "relu"}, "score_function is 'relu'"),
    (chosen, {"num_groups": 2}, "group_topk is None"),
    (chosen, {"group_topk": 2}, "num_groups is None"),
    *((chosen, IN_GROUPS | {"num_groups": value}, f"num_groups is {value}") for value in (0, 4, 7, -1, 3.0)),
    *((chosen, IN_GROUPS | {"group_topk": value}, f"group_topk is {value}") for value in (0, 3, 4, -1, 1.0)),
    (chosen, IN_GROUPS | {"topk": 3}, "group_topk is 1"),
    *((chosen, {"scaling_factor": value}, f"scaling_factor is {value}") for value in (0, 0.0, -1.0, *PLAIN_NUMBERS)),
    (chosen, {"expert_bias": COUNTS}, "expert_bias is given with score_function softmax"),
    (chosen, SIGMOID | {"expert_bias": COUNTS[1:]}, "expert_bias is of shape (5,)"),
    (chosen, SIGMOID | {"expert_bias": COUNTS.long()}, "expert_bias is of dtype torch.int64"),
    (chosen, SIGMOID | {"expert_bias": COUNTS.to("meta")}, "expert_bias is on meta"),
    (chosen, {"precomputed_indices": INDEX[:3]}, "precomputed_indices is of shape (3, 2)"),
    (chosen, {"precomputed_indices": INDEX, "topk": 1}, "precomputed_indices is of shape (4, 2)"),
    (chosen, {"precomputed_indices": INDEX.float()}, "precomputed_indices is of dtype torch.float32"),
    (chosen, {"precomputed_indices": INDEX - 1}, "precomputed_indices is [-1"),
    (chosen, {"precomputed_indices": INDEX + 5}, "precomputed_indices is [6"),
    (dropped, {"routing_map": ROUTED[1:]}, "probs is of shape (4, 6)"),
    (dropped, {"probs": SCORES.long()}, "probs is of dtype torch.int64"),
    (dropped, {"routing_map": ROUTED.float()}, "routing_map is of dtype torch.float32"),
    *((dropped, {"capacity": value}, f"capacity is {value}") for value in (-1, 2.0, True, None)),
    (dropped, {"drop_policy": "random"}, "drop_policy is 'random'"),
    (scored, {"logits": LOGITS[0]}, "logits is of shape (6,)"),
    (scored, {"topk": 7}, "topk is 7"),
    (scored, {"score_function": "tanh"}, "score_function is 'tanh'"),
    (scored, {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    (scored, {"padding_mask": ROUTED}, "padding_mask is of shape (4, 6)"),
    (scored, {"padding_mask": SCORES[:, 0]}, "padding_mask is of dtype torch.float32"),
    (scored, {"padding_mask": SCORES[:, 0].int()}, "padding_mask is of dtype torch.int32; it must be torch.bool"),
    (balanced, {"scores": SCORES[0]}, "scores is of shape (6,)"),
    (balanced, {"num_experts": 4}, "scores is of shape (4, 6)"),
    (balanced, {"num_experts": 0}, "num_experts is 0"),
    (balanced, {"tokens_per_expert": COUNTS[1:]}, "tokens_per_expert is of shape (5,)"),
    *((balanced, {"total_num_tokens": value}, f"total_num_tokens is {value}") for value in (-1, 2.0, True)),
    *((balanced, {"topk": value}, f"topk is {value}") for value in (0, 7)),
    *((balanced, {"coeff": value}, f"coeff is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    *((z_loss, {"coeff": value}, f"coeff is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    (z_loss, {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    *(
        (lambda scale: moe_ref.attach_loss(LOGITS, COUNTS[0], scale=scale), {"scale": value}, f"scale is {value}")
        for value in PLAIN_NUMBERS
    ),
    (updated, {"expert_bias": COUNTS.bfloat16()}, "expert_bias is of dtype torch.bfloat16"),
    (updated, {"expert_bias": COUNTS[None]}, "expert_bias is of shape (1, 6)"),
    (updated, {"tokens_per_expert": COUNTS[1:]}, "tokens_per_expert is of shape (5,)"),
    *((updated, {"update_rate": value}, f"update_rate is {value}") for value in (-1.0, *PLAIN_NUMBERS)),
    *((capacity, {"num_tokens": value}, f"num_tokens is {value}") for value in (-1, 2.0)),
    *((capacity, {"num_experts": value}, f"num_experts is {value}") for value in (0, 2.0)),
    *((capacity, {"topk": value}, f"topk is {value}") for value in (0, 2.0)),
    *((capacity, {"capacity_factor": value}, f"capacity_factor is {value}") for value in (0, -1.0, *PLAIN_NUMBERS)),
    (gate, {"x": TOKENS[0]}, "x is of shape (2,)"),
    (gate, {"x": TOKENS.long()}, "x is of shape (4, 2), torch.int64"),
    (gate, {"weight": torch.zeros(6, 3)}, "weight is of shape (6, 3)"),
    (gate, {"weight": torch.zeros(6)}, "weight is of shape (6,)"),
    (gate, {"bias": COUNTS[1:]}, "bias is of shape (5,)"),
    (gate, {"router_dtype": "fp8"}, "router_dtype is 'fp8'"),
    *(
        (lambda eps: moe_ref.jitter(TOKENS, eps=eps), {"eps": value}, f"eps is {value}")
        for value in (-0.5, 1.0, *PLAIN_NUMBERS)
    ),
    (lambda topk: moe_ref.sinkhorn_routing(LOGITS, topk=topk), {"topk": 7}, "topk is 7"),
    (route, {"logits": LOGITS[:, 1:]}, "logits is of shape (4, 5)"),
    *((route, {"batch_size": value}, f"batch_size is {value}") for value in (0, 3, 2.0)),
    (route, {"replay": "rewind"}, "replay is 'rewind'"),
    (route, {"replay": "forward"}, "replay_target is missing"),
    (route, {"replay_target": INDEX}, "replay_target is missing or not wanted"),
    (route, {"replay": "backward"}, "replay is backward with an empty queue"),
    (route, {"replay": "record", "config": {"sinkhorn": True}}, "replay is 'record'"),
    (route, {"config": {"topk": 7}}, "topk is 7"),
    (route, {"config": {"score_function": "relu"}}, "score_function is 'relu'"),
    (route, {"config": {"num_groups": 4}}, "group_topk is None"),
    (route, {"config": {"score_function": "softmax", "expert_bias": True}}, "expert_bias is True"),
    (route, {"config": {"pad_to_capacity": True}}, "pad_to_capacity is True"),
    (route, {"config": {"sinkhorn": True, "capacity_factor": 1.0}}, "sinkhorn is True"),
    (route, {"config": {"sinkhorn": True, "aux_loss_coeff": 0.5}}, "sinkhorn is True"),
    (route, {"padding_mask": ROUTED[:3, 0]}, "padding_mask is of shape (3,)"),
    (loaded, {"expert_bias": torch.zeros(6).long()}, "expert_bias is of dtype torch.int64"),
    (loaded, {"expert_bias": None}, "tensors is without expert_bias"),
    (permute, {"tokens": torch.zeros(4)}, "tokens is of shape (4,)"),
    (permute, {"tokens": torch.zeros(5, 2)}, "routing_map is of shape (4, 4)"),
    (permute, {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    (permute, {"routing_map": MAP.float()}, "routing_map is of dtype torch.float32"),
    (permute, {"routing_map": MAP[:, :0]}, "routing_map is of shape (4, 0)"),
    (
        permute,
        {"routing_map": torch.zeros(4, MAX_EXPERTS + 1, dtype=torch.bool)},
        f"routing_map is of shape (4, {MAX_EXPERTS + 1})",
    ),
    (permute, {"routing_map": MAP.to("meta")}, "routing_map is on meta"),
    (permute, {"probs": PROBS[:3]}, "probs is of shape (3, 4)"),
    (permute, {"probs": PROBS.long()}, "probs is of dtype torch.int64"),
    (permute, {"probs": PROBS.to("meta")}, "probs is on meta"),
    *((permute, {"align": value}, f"align is {value}") for value in (0, -16, 1.5, True)),
    *((permute, {"capacity": value}, f"capacity is {value}") for value in (0, -4, 2.0, False)),
    *((permute, {"num_rows": value}, f"num_rows is {value}") for value in (-1, 4.0, True)),
    (permute, {"align": 2, "capacity": 4}, "capacity is 4 with align 2"),
    (permute, {"capacity": 4, "num_rows": 16}, "num_rows is 16 with capacity 4"),
    (permute, {"align": 4, "num_rows": 6}, "num_rows is 6"),
    (unpermute, {"rows": torch.zeros(6)}, "rows is of shape (6,)"),
    (unpermute, {"rows": torch.zeros(7, 2)}, "rows is of shape (7, 2)"),
    (unpermute, {"restore_shape": (5, 2)}, "restore_shape is (5, 2)"),
    (unpermute, {"restore_shape": (4, 3)}, "restore_shape is (4, 3)"),
    (unpermute, {"probs": PROBS[:, :3]}, "probs is of shape (4, 3)"),
    (unpermute, {"probs": PROBS.int()}, "probs is of dtype torch.int32"),
    (sort_chunks, {"rows": torch.zeros(6)}, "rows is of shape (6,)"),
    (sort_chunks, {"sizes": SIZES[None]}, "chunk_sizes is of shape (1, 3)"),
    (sort_chunks, {"sizes": SIZES.float()}, "chunk_sizes is of dtype torch.float32"),
    (sort_chunks, {"sizes": torch.tensor([1, -1, 2])}, "chunk_sizes is [1, -1, 2]"),
    (sort_chunks, {"sizes": torch.tensor([1, 2, 4])}, "chunk_sizes is [1, 2, 4], together 7"),
    (sort_chunks, {"order": ORDER.double()}, "order is of dtype torch.float64"),
    (sort_chunks, {"order": ORDER[:2]}, "order is of shape (2,)"),
    (sort_chunks, {"order": torch.tensor([0, 0, 1])}, "order is [0, 0, 1]"),
    (sort_chunks, {"order": torch.tensor([1, 2, 3])}, "order is [1, 2, 3]"),
    (sort_chunks, {"probs": torch.zeros(5)}, "probs is of shape (5,)"),
    *(
        (lambda align: moe_ref.pad_routing_map(MAP, align=align), {"align": value}, f"align is {value}")
        for value in (0, -1, None, 2.0)
    ),
    (
        lambda routing_map: moe_ref.pad_routing_map(routing_map, align=2),
        {"routing_map": MAP[0]},
        "routing_map is of shape (4,)",
    ),
    (multihot, {"indices": INDICES[0]}, "indices is of shape (2,)"),
    (multihot, {"indices": INDICES.float()}, "indices is of dtype torch.float32"),
    (multihot, {"indices": INDICES - 1}, "indices is [-2]"),
    (multihot, {"indices": INDICES + 1}, "indices is [3, 3]"),
    (multihot, {"probs": PROBS[:3]}, "probs is of shape (3, 4)"),
    *((multihot, {"num_experts": value}, f"num_experts is {value}") for value in (0, -1, 3.0, MAX_EXPERTS + 1)),
    (listed, {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    (listed, {"probs": PROBS[:, :2]}, "probs is of shape (4, 2)"),
    *((listed, {"topk": value}, f"topk is {value}") for value in (0, -1, 2.0, True)),
]


@pytest.mark.parametrize(("call", "arguments", "message"), ILLEGAL, ids=[x[2] for x in ILLEGAL])
def test_an_illegal_call_names_the_argument_and_its_value(call, arguments, message):
    with pytest.raises(ValueError, match="must be") as raised:
        call(**arguments)
    assert str(raised.value).startswith(message)


def test_the_calls_that_are_varied_above_are_legal():
    assert permute() and unpermute() is not None and sort_chunks() and multihot() and listed()


def test_the_router_calls_that_are_varied_above_are_legal():
    assert (
        chosen()
        and chosen(**IN_GROUPS)
        and chosen(**SIGMOID, expert_bias=COUNTS)
        and chosen(precomputed_indices=INDEX)
        and dropped()
        and scored()
    )
    assert all(isinstance(x, torch.Tensor) for x in (balanced(), z_loss(), updated(), gate()))
    assert capacity() and route() and loaded()
