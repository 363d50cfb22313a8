"""Rows straight into other ranks' memory: the kernels over as many slabs in one process, and over
processes that share memory.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.dispatch.cases import DispatchCase
from conformance.judge.exact import bits
from moe_fast.dispatch.slabs import Room, offsets, slab_of
from moe_fast.dispatch.steps import Programs, Transfer
from moe_fast.dispatch.symmetric import Handle, advance, collect, resend, send
from moe_fast.launch.backend import INTERPRETED
from tests.honest import direct

DEVICE = "cpu" if INTERPRETED else "cuda"


def in_step(every_rank: list) -> list:
    """What each rank's steps return, when no rank goes on before all have come as far."""
    ended: dict[int, object] = {}
    while len(ended) < len(every_rank):
        for rank, steps in enumerate(every_rank):
            try:
                next(steps)
            except StopIteration as end:
                ended[rank] = end.value
    return [ended[rank] for rank in range(len(every_rank))]


class World:
    """Ranks with tokens of their own, in one process."""

    def __init__(
        self, seed: int, ranks: int, dtype: torch.dtype, local: int = 3, hidden: int = 5, density: float = 0.4
    ) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.tokens = [
            torch.randn(int(torch.randint(0, 7, (1,), generator=noise)), hidden, generator=noise).to(dtype)
            for _ in range(ranks)
        ]
        self.maps = [torch.rand(len(x), ranks * local, generator=noise) < density for x in self.tokens]
        self.probs = [torch.rand(x.shape, generator=noise) for x in self.maps]
        self.ranks, self.experts, self.hidden = ranks, ranks * local, hidden

    def slabs(self, num_rows: int) -> list:
        room = Room(self.ranks, self.experts, num_rows, self.hidden * 8)
        memory = [torch.full((offsets(room)[""],), 0x7F, dtype=torch.uint8, device=DEVICE) for _ in range(self.ranks)]
        addresses, extras = [x.data_ptr() for x in memory], (lambda: None, (), "", tuple(memory))
        return [slab_of(room, x, addresses, *extras) for x in memory]


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def same(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and got.dtype == expected.dtype and not (bits(got.cpu()) != bits(expected)).any()


FEW = Programs(num_sms=1, num_blocks=3)
SETTINGS = [  # ranks, align, num_rows, dtype: with room, and without
    (1, None, 64, torch.float32),
    (2, 4, 64, torch.bfloat16),
    (3, 2, 8, torch.bfloat16),
    (3, 1, 0, torch.float32),
]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("ranks", "align", "num_rows", "dtype"), SETTINGS)
def test_dispatch_combine_and_their_transposes_are_the_references(ranks, align, num_rows, dtype, once):
    world = World(ranks + num_rows, ranks, dtype)
    slabs = world.slabs(num_rows)
    reference = moe_ref.hybridep_dispatch(world.tokens, world.maps, probs=world.probs, align=align, num_rows=num_rows)
    steps = [
        send(
            there(world.tokens[r]),
            there(world.maps[r]),
            there(world.probs[r]),
            Transfer(num_rows, align or 1, once, FEW if once else Programs()),
            slabs[r],
            r,
        )
        for r in range(ranks)
    ]
    got = in_step(steps)
    handles: list[Handle] = [handle for *_, handle in got]
    for rank, (rows, probs, counts, handle) in enumerate(got):
        num_used = int(counts.sum())
        assert same(counts, reference[rank].tokens_per_expert)
        assert same(rows[:num_used], reference[rank].rows[:num_used])
        assert same(probs[:num_used], reference[rank].probs[:num_used])
        assert handle.overflow_W.tolist() == [bool(x.overflow) for x in reference]

    expert_rows = [torch.randn(num_rows, world.hidden).to(dtype) for _ in range(ranks)]
    combined = moe_ref.hybridep_combine(expert_rows, [x.handle for x in reference], probs=[x.probs for x in reference])
    pulled = in_step(
        [collect(there(expert_rows[r]), there(reference[r].probs), handles[r], slabs[r], FEW) for r in range(ranks)]
    )
    for (tokens, probs), expected in zip(pulled, combined, strict=True):
        assert same(tokens, expected.tokens)
        assert same(probs, expected.probs)

    cached = moe_ref.hybridep_cached_dispatch(world.tokens, [x.handle for x in reference])
    resent = in_step(
        [resend(there(world.tokens[r]), there(world.probs[r]), handles[r], slabs[r]) for r in range(ranks)]
    )
    for rank, (rows, probs) in enumerate(resent):
        num_used = int(got[rank][2].sum())
        assert same(rows[:num_used], cached[rank][:num_used])
        assert same(probs[:num_used], reference[rank].probs[:num_used])


def sent_early(world: World, slabs: list, num_rows: int, travelled: bool = True) -> list:
    """What each rank's dispatch returns after its tokens have travelled, or not."""
    arguments = [(there(world.tokens[r]), num_rows, slabs[r], r) for r in range(2)]
    if travelled:
        in_step([advance(*local) for local in arguments])
    local = [(tokens, there(world.maps[r]), None, Transfer(rows), slab, r) for tokens, rows, slab, r in arguments]
    return in_step([send(*x, advanced=lambda: None) for x in local])


@pytest.mark.parametrize("num_rows", [64, 8, 3])
def test_tokens_that_travel_before_their_routing_arrive_in_the_same_rows(num_rows):
    """With fewer rows than tokens, those without a slot travel with their routing."""
    world = World(11, 2, torch.bfloat16, density=0.7)
    assert [len(local) for local in world.tokens] == [4, 2]
    reference = moe_ref.hybridep_dispatch(world.tokens, world.maps, num_rows=num_rows)

    def are_right(got: list) -> list[bool]:
        insides = [int(x.tokens_per_expert.sum()) for x in reference]
        return [same(rows[:n], x.rows[:n]) for (rows, *_), x, n in zip(got, reference, insides, strict=True)]

    slabs = world.slabs(num_rows)
    got = sent_early(world, slabs, num_rows)
    assert are_right(got) == [True, True]
    expert_rows = [torch.randn(num_rows, world.hidden).bfloat16() for _ in range(2)]
    combined = moe_ref.hybridep_combine(expert_rows, [x.handle for x in reference])
    pulled = in_step([collect(there(expert_rows[r]), None, got[r][-1], slabs[r]) for r in range(2)])
    assert all(same(tokens, expected.tokens) for (tokens, _), expected in zip(pulled, combined, strict=True))
    assert are_right(sent_early(world, world.slabs(num_rows), num_rows, travelled=False)) != [True, True]  # the twin


def test_a_rank_that_copies_to_the_wrong_rows_is_noticed():
    """The twin: links of another rank lead elsewhere."""
    world = World(3, 2, torch.float32, density=0.8)
    slabs = world.slabs(64)
    reference = moe_ref.hybridep_dispatch(world.tokens, world.maps, num_rows=64)
    start = partial(send, transfer=Transfer(64), probs=None)

    def is_right(ranks: tuple[int, int]) -> bool:
        got = in_step(
            [
                start(there(world.tokens[r]), there(world.maps[r]), slab=slabs[r], rank=rank)
                for r, rank in enumerate(ranks)
            ]
        )
        insides = [int(x.tokens_per_expert.sum()) for x in reference]
        return all(
            same(rows[:num_used], x.rows[:num_used])
            for (rows, *_), x, num_used in zip(got, reference, insides, strict=True)
        )

    assert is_right((0, 1))
    assert not is_right((1, 0))


# ---- among real ranks


def of_ranks(function: str, counts: tuple[int, ...], **fields) -> DispatchCase:
    return DispatchCase(
        **{
            "function": function,
            "counts": counts,
            "local_experts": 2,
            "hidden": 5,
            "topk": 3,
            "probs": "float32",
            "seed": 2,
        }
        | fields
    )


AMONG_RANKS = [  # later cases need more room; several experts of a token are on the same rank
    of_ranks("hybridep_dispatch", (1, 2), slack=0),
    of_ranks("hybridep_dispatch", (3, 0, 2), align=4, slack=-1, grads="tokens+probs"),
    of_ranks("hybridep_cached_dispatch", (2, 3), slack=1, probs=""),
    of_ranks("hybridep_combine", (4, 0, 5), align=2, slack=1, grads="rows"),
    of_ranks("hybridep_combine", (4, 5), values="wide", dtype="bfloat16"),
    of_ranks("hybridep_dispatch", (6, 1, 5), spread="one_rank", dtype="bfloat16", fp8="fp8", hidden=129),
    of_ranks("hybridep_dispatch", (9, 7), spread="one_rank", law="history"),
]


def among_ranks(namespace: str) -> list[tuple[str, str, object]]:
    with Pool(ChildOptions(namespace, "cpu")) as pool:
        pool.start()
        return [(outcome.status, outcome.reason, outcome.finding) for _, outcome in pool.run(AMONG_RANKS)]


@pytest.mark.parametrize("namespace", ["moe_fast.dispatch.symmetric", "tests.honest.direct", "tests.honest.early"])
def test_ranks_that_share_memory_are_accepted(namespace):
    assert among_ranks(namespace) == [("PASS", "", None)] * len(AMONG_RANKS)


def sent_directly_and_marked_otherwise(*arguments: Any, **settings: Any) -> Any:
    out = direct.hybridep_dispatch(*arguments, **settings)
    return out._replace(handle=replace(out.handle, once=True))


MIXED = SimpleNamespace(hybridep_dispatch=sent_directly_and_marked_otherwise, hybridep_combine=direct.hybridep_combine)


def test_a_combine_that_takes_one_row_of_a_rank_where_several_were_sent_is_found():
    """The twin."""
    statuses = {
        case.function: status
        for case, (status, *_) in zip(AMONG_RANKS, among_ranks("tests.dispatch.test_symmetric:MIXED"), strict=True)
    }
    assert statuses == {
        "hybridep_dispatch": "PASS",
        "hybridep_cached_dispatch": "NOT_OFFERED",
        "hybridep_combine": "FAIL",
    }
