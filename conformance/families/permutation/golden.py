"""Cases computed by hand: literal inputs, literal outputs.

The map of most cases, one row per token, one column per expert:

        e0 e1 e2
    t0   ·  1  ·      expert 0: token 2       rows, expert by expert: 2 | 0 1 | (none)
    t1   ·  1  ·
    t2   1  ·  ·
"""

from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Opaque, Problem
from conformance.core.literals import Golden, exactly, flag, floats, ints
from conformance.judge import Exact
from moe_ref.permutation.permute import permute

MAP = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
TOKENS = floats([1, 2], [3, 4], [5, 6])
PROBS = floats([9, 0.5, 9], [9, 0.25, 9], [0.125, 9, 9])
BOTH = torch.tensor([[1, 1], [1, 1]], dtype=torch.bool)  # two tokens, each to both experts

PERMUTE: Golden = {
    "by_expert": (
        Problem("permute", {"tokens": TOKENS, "routing_map": MAP}, {"probs": PROBS}),
        {
            "rows": Exact(floats([5, 6], [1, 2], [3, 4])),
            "probs": Exact(floats(0.125, 0.5, 0.25)),
            "tokens_per_expert": ints(1, 2, 0),
            "overflow": flag(False),
        },
    ),
    "padded_to_two": (
        Problem("permute", {"tokens": TOKENS, "routing_map": MAP}, {"align": 2, "probs": PROBS}),
        {
            "rows": Exact(floats([5, 6], [0, 0], [1, 2], [3, 4])),
            "probs": Exact(floats(0.125, 0, 0.5, 0.25)),
            "tokens_per_expert": ints(2, 2, 0),
            "pad_offsets": ints(0, 1, 1),
            "overflow": flag(False),
        },
    ),
    "cut_at_two_rows": (
        Problem("permute", {"tokens": TOKENS, "routing_map": MAP}, {"num_rows": 2}),
        {"rows": Exact(floats([5, 6], [1, 2])), "tokens_per_expert": ints(1, 1, 0), "overflow": flag(True)},
    ),
    "room_for_five_rows": (
        Problem("permute", {"tokens": TOKENS, "routing_map": MAP}, {"num_rows": 5}),
        {
            "rows": Exact(floats([5, 6], [1, 2], [3, 4], [0, 0], [0, 0])),
            "tokens_per_expert": ints(1, 2, 0),
            "overflow": flag(False),
        },
    ),
    "capacity_one": (  # expert 1 drops token 1; expert 2, empty, takes the first unrouted token
        Problem("permute", {"tokens": TOKENS, "routing_map": MAP}, {"capacity": 1}),
        {"rows": Exact(floats([5, 6], [1, 2], [1, 2])), "tokens_per_expert": ints(1, 1, 1), "overflow": flag(True)},
    ),
    "both_gradients": (  # each token has two rows, so its gradient is their sum
        Problem(
            "permute",
            {"tokens": floats([1], [2]), "routing_map": BOTH},
            {"probs": floats([0.5, 0.25], [1, 2])},
            wanted=("tokens", "probs"),
            cotangents={"rows": floats([1], [10], [100], [1000]), "probs": floats(1, 2, 3, 4)},
        ),
        {
            "rows": Exact(floats([1], [2], [1], [2])),
            "probs": Exact(floats(0.5, 1, 0.25, 2)),
            "tokens_per_expert": ints(2, 2),
            "overflow": flag(False),
            "d_tokens": exactly(floats([101], [1010])),
            "d_probs": Exact(floats([1, 3], [2, 4]), "values"),
        },
    ),
    "no_tokens": (
        Problem("permute", {"tokens": torch.zeros(0, 2), "routing_map": torch.zeros(0, 3, dtype=torch.bool)}),
        {"rows": Exact(torch.zeros(0, 2)), "tokens_per_expert": ints(0, 0, 0), "overflow": flag(False)},
    ),
}


def _unpermute(
    rows: Tensor, chosen: Tensor, shape: tuple[int, int], probs: Tensor | None = None, **settings: Any
) -> Problem:
    numbers = torch.arange(1, len(chosen) + 1, dtype=torch.float32)[:, None]
    producer = Problem("permute", {"tokens": numbers, "routing_map": chosen}, settings)
    merge = {} if probs is None else {"probs": probs}
    required = {"rows": rows, "row_map": Opaque("row_map")}
    return Problem(
        "unpermute",
        required,
        {"restore_shape": shape, **merge},
        producer=producer,
        produced=permute(numbers, chosen, **settings),
    )


UNPERMUTE: Golden = {
    "back_in_order": (_unpermute(floats([5, 6], [1, 2], [3, 4]), MAP, (3, 2)), {"tokens": exactly(TOKENS)}),
    "weighted_sum": (
        _unpermute(floats([1], [2], [10], [20]), BOTH, (2, 1), floats([0.5, 0.25], [1, 2])),
        {"tokens": exactly(floats([0.5 * 1 + 0.25 * 10], [1 * 2 + 2 * 20]))},
    ),
    # in bfloat16 numbers from 256 on are even: 257 is halfway, and so is 259
    "halfway_to_even": (
        _unpermute(floats([256], [258], [1], [1]).bfloat16(), BOTH, (2, 1)),
        {"tokens": Exact(floats([256], [260]).bfloat16(), "values")},
    ),
    "nan_of_all_bits": (  # a carry would make it another number
        _unpermute(
            floats([1], [2]).bfloat16(),
            BOTH[:1],
            (1, 1),
            torch.tensor([[0x7FFFFFFF, 0]], dtype=torch.int32).view(torch.float32),
        ),
        {"tokens": Exact(floats([torch.nan]).bfloat16(), "values")},
    ),
    "padding_is_not_read": (
        _unpermute(floats([5], [torch.nan], [1], [3]), MAP, (3, 1), align=2),
        {"tokens": exactly(floats([1], [3], [5]))},
    ),
    "nothing_routed": (
        _unpermute(torch.zeros(0, 2), torch.zeros(3, 2, dtype=torch.bool), (3, 2)),
        {"tokens": exactly(torch.zeros(3, 2))},
    ),
}

SORT_CHUNKS: Golden = {
    "last_first": (
        Problem(
            "sort_chunks",
            {
                "rows": floats([1], [2], [3], [4]),
                "chunk_sizes": torch.tensor([1, 0, 2]),
                "order": torch.tensor([2, 0, 1]),
            },
        ),
        {"rows": Exact(floats([2], [3], [1], [4]))},
    ),
}

PAD_ROUTING_MAP: Golden = {
    "to_two": (  # expert 0 has one token and gets token 0; expert 1 has two; expert 2 has none
        Problem("pad_routing_map", {"routing_map": MAP}, {"align": 2}),
        {
            "routing_map": Exact(torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0]]), "integers"),
            "unreached": ints(0, 0, 0),
        },
    ),
    "out_of_reach": (  # three tokens cannot fill four rows
        Problem("pad_routing_map", {"routing_map": MAP}, {"align": 4}),
        {
            "routing_map": Exact(torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0]]), "integers"),
            "unreached": ints(1, 1, 0),
        },
    ),
}

INDICES_TO_MULTIHOT: Golden = {
    "empty_slot_and_repeat": (  # token 1 lists expert 2 twice: the last slot counts
        Problem(
            "indices_to_multihot",
            {"indices": torch.tensor([[2, -1], [2, 2]]), "probs": floats([0.5, 7], [0.25, 0.75])},
            {"num_experts": 3},
        ),
        {
            "routing_map": Exact(torch.tensor([[0, 0, 1], [0, 0, 1]]), "integers"),
            "probs": Exact(floats([0, 0, 0.5], [0, 0, 0.75])),
        },
    ),
}

MULTIHOT_TO_INDICES: Golden = {
    "two_slots": (  # token 0 has one expert; token 1 has three and loses the last
        Problem(
            "multihot_to_indices",
            {
                "routing_map": torch.tensor([[0, 1, 0], [1, 1, 1]], dtype=torch.bool),
                "probs": floats([9, 0.5, 9], [1, 2, 3]),
            },
            {"topk": 2},
        ),
        {
            "indices": Exact(torch.tensor([[1, -1], [0, 1]]), "integers"),
            "probs": Exact(floats([0.5, 0], [1, 2])),
            "overflow": flag(True),
        },
    ),
}
