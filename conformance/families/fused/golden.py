"""Hand-computed cases of permute_and_quantize.

448 / 7 = 64: codes 7 = 0x7E, 3½ = 0x76, 1¾ = 0x6E.
"""

from typing import Any

import torch

from conformance.core.contract import Problem
from conformance.families.fused.permute_and_quantize import problem_of
from conformance.judge import Bounded, Exact, Expectation
from moe_ref.config import Recipe

# expert 0 has token 2, expert 1 tokens 0 and 1, expert 2 none; no row has token 3
MAP = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
TOKENS = torch.tensor([[7.0, 0], [3.5, 1], [-14, 7], [torch.inf, torch.nan]])
BOTH = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
INF = torch.inf


def _of(
    recipe: Recipe,
    tokens: torch.Tensor = TOKENS,
    routing_map: torch.Tensor = MAP,
    extra_inputs: dict[str, Any] | None = None,
    **settings: Any,
) -> Problem:
    return problem_of({"tokens": tokens, "routing_map": routing_map, "recipe": recipe} | (extra_inputs or {}), settings)


def _bytes(*rows: Any) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.uint8))


def _floats(*rows: Any) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.float32))


def _ints(*values: int) -> Exact:
    return Exact(torch.tensor(values), "integers")


PERMUTE_AND_QUANTIZE: dict[str, tuple[Problem, dict[str, Expectation]]] = {
    "a_scale_for_each_expert": (  # 14 · 32, 7 · 64, 1 for no row; no infinity of token 3
        _of(Recipe("current"), align=2, probs=torch.tensor([[9, 0.5, 9], [9, 0.25, 9], [0.125, 9, 9], [9, 9, 9]])),
        {
            "amax": _floats(14, 7, 0),
            "scales": _floats(1 / 32, 1 / 64, 1),
            "codes": _bytes([0xFE, 0x76], [0, 0], [0x7E, 0], [0x76, 0x68]),
            "values": _floats([-14, 7], [0, 0], [7, 0], [3.5, 1]),
            "row_sums": _floats([3], [4], [1], [0]),
            "probs": _floats(0.125, 0, 0.5, 0.25),
            "tokens_per_expert": _ints(2, 2, 0),
            "pad_offsets": _ints(0, 1, 1),
        },
    ),
    "blocks_begin_with_each_expert": (  # by columns: 14 and 7 alone, then 7 with 3½, and 0 with 1
        _of(Recipe("block"), columnwise=True, num_rows=4),
        {
            "scales": _floats([1 / 32], [1 / 64], [1 / 128]),
            "codes": _bytes([0xFE, 0x76], [0x7E, 0], [0x7E, 0x70], [0, 0]),
            "scales.columnwise": _floats([1 / 32, 1 / 64], [1 / 64, 1 / 256]),
            "codes.columnwise": _bytes([0xFE, 0x7E], [0x7E, 0], [0x76, 0x78], [0, 0]),
            "tokens_per_expert": _ints(1, 2, 0),
        },
    ),
    "what_is_dropped_has_no_amax": (  # token 1 is past the buffer
        _of(Recipe("current"), TOKENS[:2].flip(0), torch.ones(2, 1, dtype=torch.bool), num_rows=1),
        {
            "amax": _floats(3.5),
            "codes": _bytes([0x7E, 0x70]),
            "overflow": Exact(torch.tensor(True), "integers", flag=True),
        },
    ),
    "a_scale_of_earlier_steps": (  # 14 · 2, and 7 · 64 of the second expert
        _of(
            Recipe("delayed", amax_history_len=2),
            extra_inputs={
                "amax_history": torch.tensor([[20.0, 1], [1, 2], [3, 4]]),
                "scale": torch.tensor([2.0, 64, 1]),
            },
        ),
        {
            "scales": _floats(0.5, 1 / 64, 1),
            "codes": _bytes([0xDE, 0x56], [0x7E, 0], [0x76, 0x68]),
            "state.amax_history": _floats([20, 1], [7, 2], [3, 4]),
        },
    ),
    "both_gradients": (
        problem_of(
            {"tokens": torch.tensor([[1.0], [2]]), "routing_map": BOTH, "recipe": Recipe("current")},
            {"probs": torch.tensor([[0.5, 0.25], [1, 9]])},
            wanted=("tokens", "probs"),
            cotangents={"dequantized": torch.tensor([[10.0], [20], [30]]), "probs": torch.tensor([1.0, 2, 3])},
        ),
        {
            "d_tokens": Bounded(
                torch.tensor([[40.0], [20]]).double(), torch.zeros(2, 1).double(), torch.float32, torch.float32
            ),
            "d_probs": _floats([1, 3], [2, 0]),
        },
    ),
}
