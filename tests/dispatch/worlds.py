"""Small worlds of several ranks, what they send, and what has to come of it, as claims about any
namespace with the reference's names.

The same claims judge `moe_ref` and, in the tests of the tests, `moe_ref` with a planted mistake.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.judge.exact import bits
from tests.dispatch import oracle


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


def sent_rows(w: World, like: list[Tensor]) -> list[Tensor]:
    """Rows for combine: inexact numbers."""
    return [noise(w, *own.shape, dtype=own.dtype, salt=rank) for rank, own in enumerate(like)]


def poison(rows: list[Tensor], cells: oracle.Rows) -> list[Tensor]:
    """NaN in every row that holds no token."""
    return [
        torch.where(torch.tensor([cell is None for cell in own], dtype=torch.bool)[:, None], torch.nan, x)
        for x, own in zip(rows, cells, strict=True)
    ]


def assert_bits(got: Any, right: Any) -> None:
    assert len(got) == len(right)
    for x, y in zip(got, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and np.array_equal(bits(x), bits(y)), (x, y)


def fields(results: list, name: str) -> list:
    return [getattr(own, name) for own in results]


# What each rank gets


def claim_rows(
    w: World, results: list, segments: list[oracle.Segments], shards: int, num_rows: int | None = None
) -> None:
    """Rows, probs and counts are those of the oracle's cells, in its order; padding is zero."""
    local = w.experts * shards // w.ranks
    numbers = cell_numbers(w)
    for rank, own in enumerate(results):
        cells = oracle.joined(segments[rank], num_rows)
        assert own.rows.tolist() == [[0, 0] if cell is None else [*cell[:2]] for cell in cells]
        expert = [None if cell is None else rank // shards * local + cell[2] % local for cell in cells]
        right = [
            0.0 if cell is None else numbers[cell[0]][cell[1], e].item() for cell, e in zip(cells, expert, strict=True)
        ]
        assert own.probs.tolist() == right
        assert own.tokens_per_expert.tolist() == [len(segment) for segment in segments[rank]]


def claim_allgather(ns: Any, w: World) -> None:
    results = ns.allgather_dispatch(names(w), w.maps, probs=cell_numbers(w), expert_tensor_parallel=w.shards)
    segments = oracle.allgather(oracle.nested(w.maps), w.experts, w.shards)
    claim_rows(w, results, segments, w.shards)
    assert not any(fields(results, "overflow"))


def claim_alltoall(ns: Any, w: World) -> None:
    for capacity in (None, 1, 2, 7):
        results = ns.alltoall_dispatch(
            names(w), w.maps, probs=cell_numbers(w), expert_tensor_parallel=w.shards, capacity=capacity
        )
        segments = oracle.alltoall(oracle.nested(w.maps), w.experts, w.shards, capacity)
        claim_rows(w, results, segments, w.shards)
        local = w.experts * w.shards // w.ranks
        for rank, own in enumerate(results):
            first = rank // w.shards * local
            counts = torch.stack([routing_map[:, first : first + local].sum(0) for routing_map in w.maps])
            assert bool(own.overflow) == (capacity is not None and bool((counts > capacity).any()))


def claim_hybridep(ns: Any, w: World) -> None:
    results = ns.hybridep_dispatch(names(w), w.maps, probs=cell_numbers(w), align=w.align, num_rows=w.num_rows)
    segments, lost = oracle.hybridep(oracle.nested(w.maps), w.experts, w.align, w.num_rows)
    claim_rows(w, results, segments, 1, w.num_rows)
    assert [bool(own.overflow) for own in results] == lost
    assert_bits(ns.hybridep_cached_dispatch(names(w), fields(results, "handle")), fields(results, "rows"))


def claim_deepep(ns: Any, w: World) -> None:
    weights = [noise(w, *own.shape, dtype=torch.float32, salt=rank) for rank, own in enumerate(w.indices)]
    rows, slots = oracle.deepep(oracle.nested(w.indices), w.experts)
    most = max(map(len, rows))
    for room in (None, most + 2):
        scales = [own[:, :1] * 2.0 for own in names(w)]
        results = ns.deepep_dispatch(
            names(w),
            w.indices,
            num_experts=w.experts,
            probs=weights,
            scales=scales,
            expert_alignment=w.align,
            num_worst_tokens=room,
        )
        for rank, own in enumerate(results):
            here = len(rows[rank])
            assert len(own.rows) == (here if room is None else room)
            assert own.rows[:here].tolist() == [list(row) for row in rows[rank]]
            assert own.scales[:here].tolist() == [[2.0 * row[0]] for row in rows[rank]]
            assert own.indices[:here].tolist() == slots[rank] and (own.indices[here:] == -1).all()
            for i, (s, t) in enumerate(rows[rank]):
                assert torch.equal(own.probs[i], torch.where(torch.tensor(slots[rank][i]) >= 0, weights[s][t], 0.0))
            local = w.experts // w.ranks
            counts = [sum(row.count(e) for row in slots[rank]) for e in range(local)]
            assert (
                own.tokens_per_expert is None
                if room
                else own.tokens_per_expert.tolist() == [-(-n // w.align) * w.align for n in counts]
            )
        assert_bits(ns.deepep_cached_dispatch(names(w), fields(results, "handle")), fields(results, "rows"))


def claim_low_latency(ns: Any, w: World) -> None:
    most = max(*w.tokens, 1) + 1
    results = ns.deepep_low_latency_dispatch(names(w), w.indices, num_experts=w.experts, max_tokens_per_rank=most)
    copies = oracle.low_latency(oracle.nested(w.indices), w.experts)
    for rank, own in enumerate(results):
        assert own.rows.shape == (w.experts // w.ranks, w.ranks * most, 2)
        for l_, sources in enumerate(copies[rank]):
            expected = [copy for source in sources for copy in source]
            count = int(own.tokens_per_expert[l_])
            assert own.rows[l_, :count].tolist() == [[s, t] for s, t, _ in expected]
            assert own.source_tokens[l_, :count].tolist() == [t for _, t, _ in expected]
            begin = 0
            for s, source in enumerate(sources):
                assert divmod(int(own.layout_range[l_, s]), 2**32) == (begin, len(source))
                begin += len(source)
            assert begin == count


# What comes back, and what goes back in the backward: bit by bit, with sums that round, and NaN in
# rows that hold no token


def claim_sums(got: list[Tensor], right: list[Tensor]) -> None:
    assert_bits(got, right)
    assert not any(own.isnan().any() for own in got)


def backward(rows: list[Tensor], tokens: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(rows, tokens, cotangents))


def leaves(w: World, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(count, 3, dtype=dtype, requires_grad=True) for count in w.tokens]


BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [
    (BF16, BF16),
    (BF16, FP32),
    (FP32, FP32),
]  # of rows and probs; between bfloat16 rows the order of a float32 sum hardly shows


def claim_allgather_sums(ns: Any, w: World) -> None:
    cells = [oracle.joined(own) for own in oracle.allgather(oracle.nested(w.maps), w.experts, w.shards)]
    for storage, dtype in DTYPES:
        tokens, probs = leaves(w, storage), [own.to(dtype) for own in cell_numbers(w)]
        results = ns.allgather_dispatch(tokens, w.maps, probs=probs, expert_tensor_parallel=w.shards)
        rows = sent_rows(w, fields(results, "rows"))
        claim_sums(
            ns.allgather_combine(rows, fields(results, "handle")), oracle.two_levels(rows, cells, w.tokens, dtype)
        )
        claim_sums(backward(fields(results, "rows"), tokens, rows), oracle.two_levels(rows, cells, w.tokens, storage))


def claim_alltoall_sums(ns: Any, w: World) -> None:
    for capacity in (None, 2):
        cells = [oracle.joined(own) for own in oracle.alltoall(oracle.nested(w.maps), w.experts, w.shards, capacity)]
        for storage, dtype in DTYPES:
            tokens, probs = leaves(w, storage), [own.to(dtype) for own in cell_numbers(w)]
            results = ns.alltoall_dispatch(
                tokens, w.maps, probs=probs, expert_tensor_parallel=w.shards, capacity=capacity
            )
            rows = poison(sent_rows(w, fields(results, "rows")), cells)
            right = oracle.shards_then_experts(rows, cells, w.tokens, w.shards, dtype)
            claim_sums(ns.alltoall_combine(rows, fields(results, "handle")), right)
            right = oracle.shards_then_experts(rows, cells, w.tokens, w.shards, storage)
            claim_sums(backward(fields(results, "rows"), tokens, rows), right)


def claim_hybridep_sums(ns: Any, w: World) -> None:
    segments, _ = oracle.hybridep(oracle.nested(w.maps), w.experts, w.align, w.num_rows)
    cells = [oracle.joined(own, w.num_rows) for own in segments]
    for storage in (BF16, FP32):
        tokens, numbers = leaves(w, storage), cell_numbers(w)
        results = ns.hybridep_dispatch(tokens, w.maps, probs=numbers, align=w.align, num_rows=w.num_rows)
        rows = poison(sent_rows(w, fields(results, "rows")), cells)
        right = oracle.two_levels(rows, cells, w.tokens, torch.float32)
        probs = [own[:, 0] for own in poison([x[:, None] for x in fields(results, "probs")], cells)]
        combined = ns.hybridep_combine(rows, fields(results, "handle"), probs=probs)
        claim_sums(fields(combined, "tokens"), right)
        claim_sums(backward(fields(results, "rows"), tokens, rows), right)
        for s, own in enumerate(fields(combined, "probs")):
            kept = {
                (t, e) for rank in cells for cell in rank if cell is not None for source, t, e in [cell] if source == s
            }
            assert own.tolist() == [
                [numbers[s][t, e].item() if (t, e) in kept else 0.0 for e in range(w.experts)]
                for t in range(w.tokens[s])
            ]


def claim_deepep_sums(ns: Any, w: World) -> None:
    arrived, _ = oracle.deepep(oracle.nested(w.indices), w.experts)
    most = max(map(len, arrived)) + 1
    cells = [[*own, *[None] * (most - len(own))] for own in arrived]
    for storage in (BF16, FP32):
        tokens, weights = (
            leaves(w, storage),
            [noise(w, *own.shape, dtype=torch.float32, salt=rank) for rank, own in enumerate(w.indices)],
        )
        results = ns.deepep_dispatch(tokens, w.indices, num_experts=w.experts, probs=weights, num_worst_tokens=most)
        rows = poison(sent_rows(w, fields(results, "rows")), cells)
        biases = [
            [noise(w, count, 3, dtype=storage, salt=50 + 10 * n + rank) for rank, count in enumerate(w.tokens)]
            for n in range(2)
        ]
        for given in ((), biases[:1], biases):
            combined = ns.deepep_combine(rows, fields(results, "handle"), probs=fields(results, "probs"), biases=given)
            claim_sums(fields(combined, "tokens"), oracle.flat(rows, cells, w.tokens, given))
        assert_bits(
            fields(combined, "probs"), [torch.where(i >= 0, x, 0.0) for i, x in zip(w.indices, weights, strict=True)]
        )
        claim_sums(backward(fields(results, "rows"), tokens, rows), oracle.flat(rows, cells, w.tokens))


def claim_low_latency_sums(ns: Any, w: World) -> None:
    copies = oracle.low_latency(oracle.nested(w.indices), w.experts)
    probs = [
        torch.where(own >= 0, noise(w, *own.shape, dtype=torch.float32, salt=rank), torch.nan)
        for rank, own in enumerate(w.indices)
    ]
    for storage in (BF16, FP32):
        tokens = leaves(w, storage)
        results = ns.deepep_low_latency_dispatch(
            tokens, w.indices, num_experts=w.experts, max_tokens_per_rank=max(*w.tokens, 1)
        )
        rows = []
        for rank, own in enumerate(sent_rows(w, fields(results, "rows"))):
            tail = torch.arange(own.shape[1]) >= results[rank].tokens_per_expert[:, None]
            rows.append(torch.where(tail[:, :, None], torch.nan, own))
        right = oracle.weighted(rows, copies, oracle.nested(w.indices), probs, w.experts)
        claim_sums(ns.deepep_low_latency_combine(rows, w.indices, probs, fields(results, "handle")), right)
        cells: list[list] = []
        for own, rank in zip(rows, copies, strict=True):
            slabs = [[copy for source in sources for copy in source] for sources in rank]
            cells.append([cell for slab in slabs for cell in [*slab, *[None] * (own.shape[1] - len(slab))]])
        claim_sums(
            backward(fields(results, "rows"), tokens, rows),
            oracle.flat([own.flatten(0, 1) for own in rows], cells, w.tokens),
        )


CLAIMS = {
    "what allgather dispatches": claim_allgather,
    "what alltoall dispatches": claim_alltoall,
    "what hybridep dispatches": claim_hybridep,
    "what deepep dispatches": claim_deepep,
    "what deepep dispatches with low latency": claim_low_latency,
    "what allgather adds": claim_allgather_sums,
    "what alltoall adds": claim_alltoall_sums,
    "what hybridep adds": claim_hybridep_sums,
    "what deepep adds": claim_deepep_sums,
    "what deepep adds with low latency": claim_low_latency_sums,
}
