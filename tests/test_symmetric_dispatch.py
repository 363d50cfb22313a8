"""Rows straight into other ranks' memory: the kernels over as many slabs in one process, and over processes that share memory."""

from functools import partial

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.judge.exact import bits
from moe_fast.backend import INTERPRETED
from moe_fast.dispatch.slabs import Room, offsets, slab_of
from moe_fast.dispatch.symmetric import Handle, collect, resend, send

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

    def __init__(self, seed: int, ranks: int, dtype: torch.dtype, local: int = 3, hidden: int = 5, density: float = 0.4) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randn(int(torch.randint(0, 7, (1,), generator=noise)), hidden, generator=noise).to(dtype) for _ in range(ranks)]
        self.maps = [torch.rand(len(own), ranks * local, generator=noise) < density for own in self.tokens]
        self.probs = [torch.rand(own.shape, generator=noise) for own in self.maps]
        self.ranks, self.experts, self.hidden = ranks, ranks * local, hidden

    def slabs(self, num_rows: int) -> list:
        room = Room(self.ranks, self.experts, num_rows, self.hidden * 8)
        memory = [torch.full((offsets(room)[""],), 0x7F, dtype=torch.uint8, device=DEVICE) for _ in range(self.ranks)]
        return [slab_of(room, own, [x.data_ptr() for x in memory], lambda: None) for own in memory]


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def same(got: Tensor, right: Tensor) -> bool:
    return got.shape == right.shape and got.dtype == right.dtype and not (bits(got.cpu()) != bits(right)).any()


SETTINGS = [(None, 64), (4, 64), (2, 8), (1, 0)]  # align, num_rows: with room, and without


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("align", "num_rows"), SETTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dispatch_combine_and_their_transposes_are_the_references(ranks, align, num_rows, dtype, once):
    world = World(ranks + num_rows, ranks, dtype)
    slabs = world.slabs(num_rows)
    right = moe_ref.hybridep_dispatch(world.tokens, world.maps, probs=world.probs, align=align, num_rows=num_rows)
    steps = [send(there(world.tokens[r]), there(world.maps[r]), there(world.probs[r]), align or 1, num_rows, slabs[r], r, once=once) for r in range(ranks)]
    got = in_step(steps)
    handles: list[Handle] = [handle for *_, handle in got]
    for rank, (rows, probs, counts, handle) in enumerate(got):
        inside = int(counts.sum())
        assert same(counts, right[rank].tokens_per_expert)
        assert same(rows[:inside], right[rank].rows[:inside])
        assert same(probs[:inside], right[rank].probs[:inside])
        assert handle.overflow_W.tolist() == [bool(other.overflow) for other in right]

    made = [torch.randn(num_rows, world.hidden).to(dtype) for _ in range(ranks)]
    back = moe_ref.hybridep_combine(made, [each.handle for each in right], probs=[each.probs for each in right])
    pulled = in_step([collect(there(made[r]), there(right[r].probs), handles[r], slabs[r]) for r in range(ranks)])
    for (tokens, probs), expected in zip(pulled, back, strict=True):
        assert same(tokens, expected.tokens)
        assert same(probs, expected.probs)

    again = moe_ref.hybridep_cached_dispatch(world.tokens, [each.handle for each in right])
    resent = in_step([resend(there(world.tokens[r]), there(world.probs[r]), handles[r], slabs[r]) for r in range(ranks)])
    for rank, (rows, probs) in enumerate(resent):
        inside = int(got[rank][2].sum())
        assert same(rows[:inside], again[rank][:inside])
        assert same(probs[:inside], right[rank].probs[:inside])


def test_a_rank_that_copies_to_the_wrong_rows_is_noticed():
    """The twin: links of another rank lead elsewhere."""
    world = World(3, 2, torch.float32, density=0.8)
    slabs = world.slabs(64)
    right = moe_ref.hybridep_dispatch(world.tokens, world.maps, probs=world.probs, num_rows=64)
    start = partial(send, align=1, num_rows=64, probs=None)
    got = in_step([start(there(world.tokens[r]), there(world.maps[r]), slab=slabs[r], rank=1 - r) for r in range(2)])
    assert not all(same(rows, each.rows) for (rows, *_), each in zip(got, right, strict=True))
