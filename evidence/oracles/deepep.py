"""DeepEP's own references, read from its source: layouts, dispatch, the cast for the wire."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import OURS, Comparison, Known, compare
from evidence.oracles.random_inputs import blocks, generator
from evidence.oracles.source import load, run, statements
from evidence.oracles.te_quantization import Part, of_rows
from evidence.oracles.te_router import placed
from moe_ref.dispatch.low_latency import quantize_for_wire

PEER = "DeepEP's references"
PACKAGES: tuple[str, ...] = ()
SOURCE = "deepseek-ai/DeepEP"

SHAPES = ((1, 1, 1, 1), (3, 4, 2, 2), (17, 8, 3, 4), (64, 32, 8, 8))  # tokens, experts, slots, ranks
NAN = "a NaN in the block: the cast of DeepEP's tests carries it into the scale, the kernel's maximum passes over it"
ROUNDED = (
    "the cast of DeepEP's tests takes amax / 448 and, as torch does, 448 · (1 / amax) with two roundings; the kernel "
    "amax · (1/448) and 448 / amax, each rounded once"
)


def comparisons(source: Path) -> Iterator[Comparison]:
    """Layouts of all shapes, with and without empty slots; dispatch; the cast."""
    read = load(source / "deep_ep/utils/math.py", ["align", "ceil_div", "inplace_unique", "per_token_cast_to_fp8"])
    nodes = statements(source / "tests/legacy/test_intranode.py", "test_main", "rank_idx", "is_token_in_rank")
    no_exchange = SimpleNamespace(all_reduce=lambda x, group: None)  # sums over ranks are not compared
    for (tokens, experts, slots, ranks), empty in product(SHAPES, (False, True)):
        indices = [indices_of(tokens, experts, slots, empty, rank) for rank in range(ranks)]
        text = f"T={tokens} E={experts} K={slots} ranks={ranks} {'with empty slots' * empty}"
        sizes = {"num_tokens": tokens, "num_experts": experts, "num_ranks": ranks}
        for rank_indices in indices:
            namespace = {
                "inplace_unique": read.inplace_unique,
                "topk_idx": rank_indices,
                "dist": no_exchange,
                "group": None,
                **sizes,
            }
            space = run(nodes, "test_intranode.py", namespace)
            for name, value in moe_ref.deepep_layout(rank_indices, num_experts=experts, ranks=ranks)._asdict().items():
                their_value = space[name].to(value.dtype)
                yield compare(f"layout: {name}", value, their_value, case=partial(placed, text))
        yield from dispatched(source, indices, experts, read.ceil_div, text)
    yield from cast(read.per_token_cast_to_fp8)


def indices_of(tokens: int, experts: int, slots: int, empty: bool, rank: int) -> Tensor:
    """Different experts for each token; -1 in some slots."""
    draw = generator(100 * rank + tokens)
    chosen = torch.rand(tokens, experts, generator=draw).topk(slots, dim=1).indices
    return torch.where(torch.rand(tokens, slots, generator=draw) < 0.3, -1, chosen) if empty else chosen


class Ranks:
    """torch.distributed, as far as the reference calls it, between threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self.own, self.barrier = size, threading.local(), threading.Barrier(size)
        self.sent: list[Any] = [None] * size

    def get_rank(self) -> int:
        """The number of this thread's rank."""
        return self.own.rank

    def get_world_size(self) -> int:
        """The number of threads."""
        return self.size

    def all_to_all_single(self, out: Tensor, x: Tensor, received: Any = None, lengths: Any = None) -> None:
        """Pieces of x with these `lengths`, one for each rank; without lengths, equal pieces."""
        self.sent[self.own.rank] = x.split(lengths or [len(x) // self.size] * self.size)
        self.barrier.wait()
        out.copy_(torch.cat([pieces[self.own.rank] for pieces in self.sent]))
        self.barrier.wait()


def dispatched(source: Path, indices: list[Tensor], experts: int, ceil_div: Any, text: str) -> Iterator[Comparison]:
    """Rows, local indices and weights of each rank."""
    ranks, draw = Ranks(len(indices)), generator(5)
    dispatch = load(source / "deep_ep/utils/refs.py", ["dispatch"], dist=ranks, ceil_div=ceil_div).dispatch
    tokens = [torch.randn(len(rank_indices), 4, generator=draw).to(torch.bfloat16) for rank_indices in indices]
    probs = [torch.rand(rank_indices.shape, generator=draw) for rank_indices in indices]

    def play(rank: int) -> Any:
        ranks.own.rank = rank
        return dispatch(tokens[rank], indices[rank], probs[rank], len(tokens[rank]), experts)

    with ThreadPoolExecutor(ranks.size) as pool:
        theirs = list(pool.map(play, range(ranks.size)))
    ours = moe_ref.deepep_dispatch(tokens, indices, num_experts=experts, probs=probs)
    for mine, (rows, slots, weights, *_) in zip(ours, theirs, strict=True):
        assert mine.probs is not None
        weights = torch.where(
            slots == -1, 0, weights
        )  # the reference leaves these rows as they are, and nothing reads them
        for name, rank_indices, their_value in (("rows", mine.rows, rows), ("indices", mine.indices, slots), ("probs", mine.probs, weights)):  # fmt: skip  # noqa: E501
            yield compare(
                f"dispatch: {name}", rank_indices, their_value.to(rank_indices.dtype), case=partial(placed, text)
            )


def cast(theirs: Any) -> Iterator[Comparison]:
    """Blocks of 128 to E4M3, by the cast of DeepEP's tests."""

    def own(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = quantize_for_wire(x)
        return codes.view(torch.uint8), scale

    def other(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = theirs(x)
        return codes.view(torch.uint8), scale

    def known(x: Tensor, out: Tensor) -> list[Known]:
        mine, theirs = (selected(x)[0 if out.dtype == torch.uint8 else 1].double() for selected in (own, other))
        step = 1 if out.dtype == torch.uint8 else theirs * 2.0**-22
        return [
            Known(NAN, OURS, of_rows(x, torch.isnan, out)),
            Known(ROUNDED, OURS, (mine - theirs).abs() <= step),
        ]

    for dtype in (torch.float32, torch.bfloat16):
        yield from Part(own, other).compared("FP8 for the wire", blocks(512, 128, dtype, 448.0), known, per=1)
