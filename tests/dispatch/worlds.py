"""Small worlds of several ranks, and what their tokens and probs are."""

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.judge.exact import bits


class World(NamedTuple):
    maps: list[Tensor]  # bool [T_r,E] of each rank
    indices: list[Tensor]  # [T_r,K] of each rank: the same experts in any order, -1 between them
    shards: int  # expert tensor parallelism of the dispatchers that know it
    align: int
    num_rows: int | None  # a multiple of align
    seed: int

    @property
    def ranks(self) -> int:
        return len(self.maps)

    @property
    def experts(self) -> int:
        return self.maps[0].shape[1]

    @property
    def tokens(self) -> list[int]:
        return [len(own) for own in self.maps]


def world(
    tokens: list[int],
    local: int,
    density: float,
    seed: int,
    *,
    shards: int = 1,
    align: int = 1,
    blocks: int | None = None,
) -> World:
    """`density` of the cells are routed; above 1, everything goes to one expert."""
    noise = torch.Generator().manual_seed(seed)
    experts = len(tokens) * local
    maps = [torch.rand(count, experts, generator=noise) < density for count in tokens]
    if density > 1:
        hot = int(torch.randint(experts, (), generator=noise))
        maps = [(torch.arange(experts) == hot).expand(count, -1).clone() for count in tokens]
    slots = max([int(own.sum(1).max()) for own in maps if len(own)], default=0) + 1
    indices = [slot_form(own, slots, noise) for own in maps]
    return World(maps, indices, shards, align, None if blocks is None else align * blocks, seed)


def slot_form(routing_map: Tensor, slots: int, noise: torch.Generator) -> Tensor:
    rows = []
    for row in routing_map:
        chosen = row.nonzero().flatten()
        padded = torch.cat([chosen, torch.full((slots - len(chosen),), -1)])
        rows.append(padded[torch.randperm(slots, generator=noise)])
    return torch.stack(rows) if rows else torch.zeros((0, slots), dtype=torch.int64)


@st.composite
def worlds(draw) -> World:
    """One to four ranks, some without tokens; experts that nobody wants, tokens that want all, one
    expert that all want; budgets that are too small.
    """
    ranks = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=ranks, max_size=ranks))
    shards = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
    density, blocks = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0, 2.0])), draw(st.one_of(st.none(), st.integers(0, 4)))
    return world(
        tokens,
        draw(st.integers(1, 3)),
        density,
        draw(st.integers(0, 999)),
        shards=shards,
        align=draw(st.sampled_from([1, 2, 3, 8])),
        blocks=blocks,
    )


FIXED = [
    world([3, 0, 4, 2], 2, 0.5, 1, shards=2, align=2, blocks=3),
    world([2, 2, 2, 2], 2, 0.6, 2, shards=4, align=4, blocks=1),
    world([4, 3], 3, 0.7, 3, shards=1, align=3, blocks=None),
    world([4], 4, 0.5, 4, shards=1, align=2, blocks=4),
    world([2, 1, 2], 2, 2.0, 5, shards=1, align=1, blocks=2),
]


def noise(w: World, *shape: int, dtype: torch.dtype = torch.bfloat16, salt: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * w.seed + salt), dtype=torch.float64).to(
        dtype
    )


def names(w: World) -> list[Tensor]:
    """Tokens that say who they are: (rank, token)."""
    return [
        torch.stack([torch.full((count,), rank), torch.arange(count)], dim=1) for rank, count in enumerate(w.tokens)
    ]


def cell_numbers(w: World) -> list[Tensor]:
    """Probs that say where they stand: 1, 2, … over all ranks' cells."""
    numbers = torch.arange(1, sum(w.tokens) * w.experts + 1, dtype=torch.float64).reshape(-1, w.experts)
    return list(numbers.split(w.tokens))


def assert_bits(got: Any, right: Any) -> None:
    assert len(got) == len(right)
    for x, y in zip(got, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and np.array_equal(bits(x), bits(y)), (x, y)


def fields(results: list, name: str) -> list:
    return [getattr(own, name) for own in results]
