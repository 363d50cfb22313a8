"""Every call that the reference's rules forbid raises a ValueError that begins with the argument and its value."""

import pytest
import torch

import moe_ref
from moe_ref.config import MAX_EXPERTS

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


ILLEGAL = [
    (permute, {"tokens": torch.zeros(4)}, "tokens is of shape (4,)"),
    (permute, {"tokens": torch.zeros(5, 2)}, "routing_map is of shape (4, 4)"),
    (permute, {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
    (permute, {"routing_map": MAP.float()}, "routing_map is of dtype torch.float32"),
    (permute, {"routing_map": MAP[:, :0]}, "routing_map is of shape (4, 0)"),
    (permute, {"routing_map": torch.zeros(4, MAX_EXPERTS + 1, dtype=torch.bool)}, f"routing_map is of shape (4, {MAX_EXPERTS + 1})"),
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
    *((lambda align: moe_ref.pad_routing_map(MAP, align=align), {"align": value}, f"align is {value}") for value in (0, -1, None, 2.0)),
    (lambda routing_map: moe_ref.pad_routing_map(routing_map, align=2), {"routing_map": MAP[0]}, "routing_map is of shape (4,)"),
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
