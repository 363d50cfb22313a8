"""Hand-computed cases of dispatchers: two ranks, literal inputs and outputs of both.

Most have three tokens and two experts, one per rank:

               expert 0 (rank 0)   expert 1 (rank 1)
    rank 0  a          1                   1
            b          ·                   1
    rank 1  c          1                   ·            rank 0 gets a, c; rank 1 gets a, b
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Opaque, Problem
from conformance.core.literals import exactly, flag, floats, ints
from conformance.core.ranks import Worldwide
from conformance.families.dispatch.hybridep import with_recipe
from conformance.families.dispatch.low_latency import in_its_own_order
from conformance.judge import Exact, Expectation, Given
from moe_ref.config import Recipe

Golden = dict[str, Worldwide]
Both = tuple[dict[str, Any], dict[str, Any]]

A, B, C = [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]
TOKENS = (floats(A, B), floats(C))
MAPS = (torch.tensor([[1, 1], [0, 1]], dtype=torch.bool), torch.tensor([[1, 0]], dtype=torch.bool))
ALL_TO_ONE = (torch.tensor([[1, 0], [1, 0]], dtype=torch.bool), MAPS[1])  # all three to expert 0
ALL_TO_ONE_OF_FOUR = (
    torch.nn.functional.pad(ALL_TO_ONE[0], (0, 2)),
    torch.nn.functional.pad(ALL_TO_ONE[1], (0, 2)),
)  # two experts per rank
PROBS = (floats([0.5, 0.25], [9, 1]), floats([0.125, 9]))
INDICES = (torch.tensor([[1, 0], [-1, 1]]), torch.tensor([[0, -1]]))
SLOT_PROBS = (floats([0.25, 0.5], [9, 1]), floats([0.125, 9]))
ROWS = (floats(A, C), floats(A, B))


def _pair(function: str, required: Both, settings: Both) -> list[Problem]:
    return [
        Problem(function, inputs, dict(call_settings)) for inputs, call_settings in zip(required, settings, strict=True)
    ]


def _of_maps(
    dispatcher: str,
    maps: tuple[Tensor, Tensor] = MAPS,
    probs: tuple[Tensor, Tensor] | None = PROBS,
    **settings_of_both: Any,
) -> list[Problem]:
    """Both ranks' dispatch."""
    required = tuple(
        {"tokens": rank_tensor, "routing_map": chosen} for rank_tensor, chosen in zip(TOKENS, maps, strict=True)
    )
    settings = (
        tuple({"probs": rank_tensor} | settings_of_both for rank_tensor in probs)
        if probs
        else (settings_of_both, settings_of_both)
    )
    return _pair(f"{dispatcher}_dispatch", required, settings)  # type: ignore[arg-type]


def _of_indices(function: str = "deepep_dispatch", probs: bool = True, **settings_of_both: Any) -> list[Problem]:
    required = tuple(
        {"tokens": rank_tensor, "indices": chosen} for rank_tensor, chosen in zip(TOKENS, INDICES, strict=True)
    )
    settings = tuple(
        ({"probs": rank_tensor} if probs else {}) | {"num_experts": 2} | settings_of_both for rank_tensor in SLOT_PROBS
    )
    return _pair(function, required, settings)  # type: ignore[arg-type]


def _calls_on_handles(
    function: str, dispatch_calls: list[Problem], produced: tuple[Tensor, Tensor], inputs: Both
) -> list[Problem]:
    """Calls on the handles of a dispatch."""
    return [
        Problem(
            function,
            rank_inputs | {"handle": Opaque("handle")},
            producer=dispatch,
            produced=SimpleNamespace(rows=rows, row_map=None),
        )
        for rank_inputs, dispatch, rows in zip(inputs, dispatch_calls, produced, strict=True)
    ]


def _dispatched(
    rows: tuple[Tensor, Tensor],
    counts: tuple[Exact, Exact],
    probs: tuple[Tensor, Tensor],
    lost: tuple[bool, bool] = (False, False),
) -> Any:
    return [
        {"rows": Exact(rank_rows), "probs": Exact(p), "tokens_per_expert": count, "overflow": flag(full)}
        for rank_rows, p, count, full in zip(rows, probs, counts, lost, strict=True)
    ]


def _codes(*rows: list[int]) -> Exact:
    return Exact(torch.tensor(rows, dtype=torch.uint8), "integers")


def _as_codes() -> Worldwide:
    """448 / 2 = 224: a = [1, 2] scales by 128; 448 / 4 = 112, 448 / 6 = 74.67: b, c by 64; 0 by 1.

    128 = 0x70, 192 = 0x74, 256 = 0x78, 320 = 0x7A, 384 = 0x7C. Row sums: a is first on both ranks.
    """
    codes = {"a": [0x70, 0x78], "b": [0x74, 0x78], "c": [0x7A, 0x7C], "-": [0, 0]}
    values, scales = {"a": A, "b": B, "c": C, "-": [0.0, 0.0]}, {"a": 1 / 128, "b": 1 / 64, "c": 1 / 64, "-": 1.0}
    expectations: list[dict[str, Expectation]] = []
    for rows, probs, sums in (("ac-", [0.5, 0.125, 0], ([2], [2])), ("ab-", [0.25, 1, 0], ([2],))):
        rank_expectations: dict[str, Expectation] = {
            "codes": _codes(*(codes[row] for row in rows)),
            "scales": Exact(floats(*([scales[row]] for row in rows))),
        }
        rank_expectations |= {
            "values": Exact(floats(*(values[row] for row in rows))),
            "probs": Exact(floats(*probs)),
            "sums": Exact(floats(*sums)),
        }
        expectations.append(rank_expectations | {"tokens_per_expert": ints(3), "overflow": flag(False)})
    return [with_recipe(call, Recipe("block")) for call in _of_maps("hybridep", align=3)], expectations


ROW_PROBS = (floats(0.5, 0.125), floats(0.25, 1))
BY_EXPERT: Worldwide = (_of_maps("allgather"), _dispatched(ROWS, (ints(2), ints(2)), ROW_PROBS))
SUMS: list[dict[str, Expectation]] = [
    {"tokens": exactly(floats([10.0, 200.0], [2000.0, 2.0]))},
    {"tokens": exactly(floats([7.0, 8.0]))},
]
GIVEN = (
    {"rows": floats([3, 100], [7, 8])},
    {"rows": floats([7, 100], [2000, 2])},
)  # a: 3 + 7, 100 + 100 · b: 2000, 2 · c: 7, 8


def _gradients(dispatcher: str) -> Worldwide:
    """Token a has a row on both ranks, so its gradient is a sum of two rows."""
    calls = [
        Problem(
            call.function,
            call.required,
            call.settings,
            wanted=("tokens", "probs"),
            cotangents={"rows": d_rows, "probs": d_probs},
        )
        for call, d_rows, d_probs in zip(
            _of_maps(dispatcher),
            (floats([1, 2], [10, 20]), floats([100, 200], [1000, 2000])),
            (floats(1, 2), floats(3, 4)),
            strict=True,
        )
    ]
    expectations = _dispatched(ROWS, (ints(2), ints(2)), ROW_PROBS)
    expectations[0] |= {
        "d_tokens": exactly(floats([101, 202], [1000, 2000])),
        "d_probs": Exact(floats([1, 3], [0, 4]), "values"),
    }
    expectations[1] |= {"d_tokens": exactly(floats([10, 20])), "d_probs": Exact(floats([2, 0]), "values")}
    return calls, expectations


def _sums_of_rows(dispatcher: str) -> Worldwide:
    return _calls_on_handles(f"{dispatcher}_combine", _of_maps(dispatcher), ROWS, GIVEN), SUMS


def _room_for_one_row(dispatcher: str) -> Worldwide:
    """There is room for one row.

    Of the two rows for each rank the first one stays, which token a sent.
    """
    expectations = _dispatched((floats(A), floats(A)), (ints(1), ints(1)), (floats(0.5), floats(0.25)), (True, True))
    return _of_maps(dispatcher, num_rows=1), expectations


def _before_an_empty_expert(dispatcher: str) -> Worldwide:
    """Expert 1 would begin at row 3, past the end."""
    expectations: list[dict[str, Expectation]] = [
        {"rows": Exact(floats(A, B)), "tokens_per_expert": ints(2, 0), "overflow": flag(True)},
        {"tokens_per_expert": ints(0, 0), "overflow": flag(False)},
    ]
    return _of_maps(dispatcher, ALL_TO_ONE_OF_FOUR, None, num_rows=2), expectations


ALLGATHER_DISPATCH: Golden = {
    "by_expert": BY_EXPERT,
    "both_gradients": _gradients("allgather"),
    "room_for_one_row": _room_for_one_row("allgather"),
    "overflow_before_an_expert_without_tokens": _before_an_empty_expert("allgather"),
}
ALLGATHER_COMBINE: Golden = {"sums": _sums_of_rows("allgather")}
ALLTOALL_DISPATCH: Golden = {
    "by_expert": (_of_maps("alltoall"), BY_EXPERT[1]),
    "both_gradients": _gradients("alltoall"),
    "room_for_one_row": _room_for_one_row("alltoall"),
    "overflow_before_an_expert_without_tokens": _before_an_empty_expert("alltoall"),
    # one row per source and expert: a, a from rank 0; c and c (not routed) from rank 1
    "capacity_one": (
        _of_maps("alltoall", capacity=1),
        _dispatched(
            (floats(A, C), floats(A, C)), (ints(2), ints(2)), (floats(0.5, 0.125), floats(0.25, 9)), (False, True)
        ),
    ),
}
ALLTOALL_COMBINE: Golden = {"sums": _sums_of_rows("alltoall")}
HYBRIDEP_DISPATCH: Golden = {
    "by_expert": (_of_maps("hybridep"), BY_EXPERT[1]),
    "both_gradients": _gradients("hybridep"),
    "padded_to_four": (
        _of_maps("hybridep", align=4),
        _dispatched(
            (floats(A, C, [0, 0], [0, 0]), floats(A, B, [0, 0], [0, 0])),
            (ints(4), ints(4)),
            (floats(0.5, 0.125, 0, 0), floats(0.25, 1, 0, 0)),
        ),
    ),
    "as_codes_padded_to_three": _as_codes(),
    "room_for_one_row": _room_for_one_row("hybridep"),
    "only_rank_0_overflows": (
        _of_maps("hybridep", ALL_TO_ONE, num_rows=2),
        [
            {
                "rows": Exact(floats(A, B)),
                "probs": Exact(floats(0.5, 9)),
                "tokens_per_expert": ints(2),
                "overflow": flag(True),
            },
            {"tokens_per_expert": ints(0), "overflow": flag(False)},
        ],
    ),
    "overflow_before_an_expert_without_tokens": _before_an_empty_expert("hybridep"),
}
HYBRIDEP_COMBINE: Golden = {"sums": _sums_of_rows("hybridep")}
HYBRIDEP_CACHED_DISPATCH: Golden = {
    "other_tokens": (
        _calls_on_handles(
            "hybridep_cached_dispatch",
            _of_maps("hybridep"),
            ROWS,
            ({"tokens": floats([1, 1], [2, 2])}, {"tokens": floats([3, 3])}),
        ),
        [{"rows": Exact(floats([1, 1], [3, 3]))}, {"rows": Exact(floats([1, 1], [2, 2]))}],
    ),
}

_RECEIVED: list[dict[str, Expectation]] = [
    {
        "rows": Exact(floats(A, C)),
        "indices": Exact(torch.tensor([[-1, 0], [0, -1]]), "integers"),
        "probs": Exact(floats([0, 0.5], [0.125, 0])),
        "tokens_per_expert": ints(2),
    },
    {
        "rows": Exact(floats(A, B)),
        "indices": Exact(torch.tensor([[0, -1], [-1, 0]]), "integers"),
        "probs": Exact(floats([0.25, 0], [0, 1])),
        "tokens_per_expert": ints(2),
    },
]
DEEPEP_DISPATCH: Golden = {
    "slots": (_of_indices(), _RECEIVED),
    "counts_of_four": (_of_indices(expert_alignment=4), [own | {"tokens_per_expert": ints(4)} for own in _RECEIVED]),
}
DEEPEP_CACHED_DISPATCH: Golden = {
    "other_tokens": (
        _calls_on_handles(
            "deepep_cached_dispatch",
            _of_indices(),
            ROWS,
            ({"tokens": floats([1, 1], [2, 2])}, {"tokens": floats([3, 3])}),
        ),
        [{"rows": Exact(floats([1, 1], [3, 3]))}, {"rows": Exact(floats([1, 1], [2, 2]))}],
    ),
}
DEEPEP_COMBINE: Golden = {
    "sums": (_calls_on_handles("deepep_combine", _of_indices(), ROWS, GIVEN), SUMS),
}


def _with_a_nan() -> list[Problem]:
    """One token per rank, for both experts: both rows of each slab have the same scale."""
    block = torch.nn.functional.pad(floats([448 * 2.0**-5, torch.nan]), (0, 126))
    inputs = {"tokens": block, "indices": torch.tensor([[0, 1]])}
    settings = {"num_experts": 2, "max_tokens_per_rank": 1, "use_fp8": True, "round_scale": True}
    return _pair("deepep_low_latency_dispatch", (inputs, inputs), (settings, settings))


DEEPEP_LOW_LATENCY_DISPATCH: Golden = {
    "counts": (
        _of_indices("deepep_low_latency_dispatch", probs=False, max_tokens_per_rank=2),
        [{"tokens_per_expert": ints(2)}, {"tokens_per_expert": ints(2)}],
    ),
    "a_nan_is_lost_alone": (  # 448 · 2⁻⁵ in the same block: the scale is 2⁻⁵ all the same
        _with_a_nan(),
        [{"scales": Exact(torch.full((1, 2, 1), 2.0**-5))}] * 2,
    ),
}
# rank 0: a and c, each its source's first; rank 1: a and b of rank 0; two free rows per slab
_SLABS = (
    SimpleNamespace(source_tokens=torch.tensor([[0, 0, -1, -1]]), layout_range=torch.tensor([[1, 2**32 + 1]])),
    SimpleNamespace(source_tokens=torch.tensor([[0, 1, -1, -1]]), layout_range=torch.tensor([[2, 2 * 2**32]])),
)


def _weighted() -> Worldwide:
    calls = []
    dispatch_calls = _of_indices("deepep_low_latency_dispatch", probs=False, max_tokens_per_rank=2)
    for inputs, dispatch, dispatched, indices, probs in zip(
        GIVEN, dispatch_calls, _SLABS, INDICES, SLOT_PROBS, strict=True
    ):
        slab = torch.cat([inputs["rows"], torch.full((2, 2), torch.nan)])[None]
        required = {"rows": slab, "indices": indices, "probs": probs}
        produced = SimpleNamespace(rows=_anything(slab), row_map=None)
        script = in_its_own_order(dispatched)
        calls.append(
            Problem(
                "deepep_low_latency_combine",
                required,
                producer=dispatch,
                produced=produced,
                script=script,
                first=required,
            )
        )
    return calls, [
        {"tokens": exactly(floats([0.25 * 7 + 0.5 * 3, 75], [2000, 2]))},
        {"tokens": exactly(floats([0.125 * 7, 1]))},
    ]


def _anything(slab: Tensor) -> Given:
    """Rows in unspecified order, which another golden case checks."""
    return Given(slab, lambda outputs: Exact(outputs["rows"]))


DEEPEP_LOW_LATENCY_COMBINE: Golden = {"weighted": _weighted()}

FLATTEN_EXPERTS = {
    # experts 0 and 1 of the first two ranks, 2 and 3 of the last two; the gradient adds both shards
    "two_groups_of_two": (
        Problem(
            "flatten_experts",
            {"x": floats([1, 2, 3, 4])},
            {"expert_parallel": 2, "expert_tensor_parallel": 2},
            wanted=("x",),
            cotangents={"x": floats([1, 2, 10, 20, 3, 4, 30, 40])},
        ),
        {"x": Exact(floats([1, 2, 1, 2, 3, 4, 3, 4])), "d_x": exactly(floats([11, 22, 33, 44]))},
    ),
}
DEEPEP_LAYOUT = {
    # two ranks with two experts each: token 0 goes to both, token 1 once to rank 1, token 2 nowhere
    "empty_slot_and_repeat": (
        Problem(
            "deepep_layout",
            {"indices": torch.tensor([[3, -1, 0], [2, 3, 2], [-1, -1, -1]])},
            {"num_experts": 4, "ranks": 2},
        ),
        {
            "num_tokens_per_rank": ints(1, 2),
            "num_tokens_per_expert": ints(1, 0, 2, 2),  # both slots that name expert 2 count
            "is_token_in_rank": Exact(torch.tensor([[1, 1], [0, 1], [0, 0]]), "integers"),
        },
    ),
    "no_tokens": (
        Problem("deepep_layout", {"indices": torch.zeros((0, 2), dtype=torch.int32)}, {"num_experts": 3, "ranks": 3}),
        {
            "num_tokens_per_rank": ints(0, 0, 0),
            "num_tokens_per_expert": ints(0, 0, 0),
            "is_token_in_rank": Exact(torch.zeros(0, 3), "integers"),
        },
    ),
}
