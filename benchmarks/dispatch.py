"""Time dispatch and combine on one NVLink host: stores into peers' memory against all-to-all.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python -m benchmarks.dispatch --ranks 4
    python -m benchmarks.dispatch --quick

Each version dispatches tokens to identity experts and combines the results. Wire bytes leave a GPU:
one row per (token, other rank) with deduplication, else one row per copy. A quantised row has one
byte per number and four per 128; combine returns bfloat16. Times are the slowest rank's, medians of
alternating turns. Every version is first compared with the exact result; `--quick` only compares,
on two processes without a GPU.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe_fast
from benchmarks.common import DEVICE, Call, Random, captured, elapsed_us, heading, table, write
from moe_fast.dispatch import symmetric
from moe_fast.dispatch.overlap import beside
from moe_fast.dispatch.slabs import _slabs
from moe_fast.dispatch.steps import FREE, Results, push
from moe_fast.dispatch.symmetric import _slab
from moe_fast.launch.backend import tl, triton
from moe_ref.config import Recipe

# H, E, K
SHAPES = {"deepseek-v3": (7168, 256, 8), "qwen3-235b": (4096, 128, 8), "gptoss-120b": (2880, 128, 4)}
TINY = {"tiny": (256, 8, 3)}
ALIGN = 16
RECIPE = Recipe("block")
SHARED = 2048  # FFN size of DeepSeek-V3's shared expert
EAGER = "eager all-to-all"
SLACK = 1.25  # rows of a buffer ÷ rows of balanced routing


@triton.jit
def peer_copy_kernel(rows_ptr, table_ptr, rank, num_ranks, num_columns, WRITE: tl.constexpr, BLOCK_H: tl.constexpr):
    """Copies row i to or from row i of peer(i): the bandwidth of plain stores and loads."""
    row = tl.program_id(0).to(tl.int64)
    peer = (rank + 1 + row % (num_ranks - 1)) % num_ranks
    peer_ptr = tl.multiple_of(tl.load(table_ptr + peer).to(tl.pointer_type(tl.bfloat16)), 16) + row * num_columns
    local_ptr = rows_ptr + row * num_columns
    for first in range(0, num_columns, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        in_row = h < num_columns
        if WRITE:
            tl.store(peer_ptr + h, tl.load(local_ptr + h, mask=in_row), mask=in_row)
        else:
            tl.store(local_ptr + h, tl.load(peer_ptr + h, mask=in_row), mask=in_row)


class Bench:
    """The tokens of one rank and all versions on them."""

    def __init__(self, rank: int, ranks: int, shape: tuple[int, int, int], num_tokens: int, shared: int) -> None:
        self.rank, self.ranks, (hidden, self.experts, self.topk) = rank, ranks, shape
        self.group, random = dist.group.WORLD, Random(rank)
        self.tokens = random.normal(num_tokens, hidden)
        scores = random.uniform(num_tokens, self.experts)
        self.indices = scores.topk(self.topk).indices
        self.map = torch.zeros(scores.shape, dtype=torch.bool, device=DEVICE).scatter_(1, self.indices, True)
        self.probs = random.uniform(*scores.shape)
        slack = SLACK if num_tokens > ALIGN else 8.0  # few tokens are unbalanced
        self.num_rows = int(slack * num_tokens * self.topk) // ALIGN * ALIGN
        self.shared_weights = [
            random.normal(*size, std=size[1] ** -0.5) for size in ((2 * shared, hidden), (hidden, shared))
        ]

    def wire_rows(self) -> tuple[int, int]:
        """Rows that leave this rank: copies, and distinct (token, rank) pairs."""
        by_rank = self.map.unflatten(1, (self.ranks, -1))
        is_remote = torch.arange(self.ranks, device=DEVICE) != self.rank
        return int(by_rank.sum(2)[:, is_remote].sum()), int(by_rank.any(2)[:, is_remote].sum())

    def eager(self) -> Tensor:
        """index_select, all_to_all_single with split lists on the host, index_add in float32."""
        local = self.experts // self.ranks
        expert, copy = self.indices.flatten().sort(stable=True)
        counts = torch.empty(self.ranks * self.experts, dtype=torch.int64, device=DEVICE)
        dist.all_gather_into_tensor(counts, torch.bincount(expert, minlength=self.experts))
        counts = counts.view(self.ranks, self.experts)
        by_rank = counts.unflatten(1, (self.ranks, local)).sum(2).tolist()
        send, receive = by_rank[self.rank], [row[self.rank] for row in by_rank]
        token = copy // self.topk
        copies = self.tokens.index_select(0, token)
        arrived = copies.new_empty((sum(receive), copies.shape[1]))
        dist.all_to_all_single(arrived, copies, receive, send)
        chunks = counts[:, self.rank * local : (self.rank + 1) * local].flatten()
        chunk = torch.arange(len(chunks), device=DEVICE).repeat_interleave(chunks, output_size=len(arrived))
        order = (chunk % local).sort(stable=True).indices
        rows = arrived.index_select(0, order)
        outputs = torch.empty_like(rows).index_copy_(0, order, rows)
        home = torch.empty_like(copies)
        dist.all_to_all_single(home, outputs, send, receive)
        out = torch.zeros(self.tokens.shape, dtype=torch.float32, device=DEVICE)
        return out.index_add_(0, token, home.float()).to(self.tokens.dtype)

    def all_to_all(self) -> Tensor:
        settings = {"probs": self.probs, "align": ALIGN, "num_rows": self.num_rows, "group": self.group}
        dispatched = moe_fast.hybridep_dispatch(self.tokens, self.map, **settings)
        return moe_fast.hybridep_combine(dispatched.rows, dispatched.handle, group=self.group).tokens

    def push(self, deduplicate: bool = True, recipe: Recipe | None = None) -> Any:
        settings = {"align": ALIGN, "num_rows": self.num_rows, "deduplicate": deduplicate, "recipe": recipe}
        return symmetric.hybridep_dispatch(self.tokens, self.map, probs=self.probs, group=self.group, **settings)

    def pull(self, dispatched: Any, rows: Tensor | None = None) -> Tensor:
        rows = dispatched.rows if rows is None else rows
        return symmetric.hybridep_combine(rows, dispatched.handle, group=self.group).tokens

    def push_alone(self, handle: Any, recipe: Recipe | None = None) -> None:
        """Only the kernel that writes to peers: no counts, barriers or later kernels."""
        slab = _slab(handle, self.tokens, None)
        assert slab is not None
        results = Results.empty(self.tokens, None, handle.lists.num_rows, recipe)
        push(self.tokens, None, None, slab, handle, results, FREE, recipe)

    def symmetric(self, deduplicate: bool = True) -> Tensor:
        return self.pull(self.push(deduplicate))

    def symmetric_quantized(self, rows: Tensor, deduplicate: bool = True) -> Tensor:
        """Dispatches codes and scales; combines these rows."""
        return self.pull(self.push(deduplicate, RECIPE), rows)

    def shared(self) -> Tensor:
        return moe_fast.shared_experts(self.tokens, *self.shared_weights)

    def with_shared(self, overlap: bool) -> tuple[Tensor, Tensor]:
        """The shared expert and the symmetric version, overlapped or in sequence."""
        if overlap:
            return beside(self.shared, self.symmetric, self.tokens.device)
        return self.shared(), self.symmetric()

    def expected(self) -> Tensor:
        """Σ of K copies of each token, with the roundings of combine's reduction tree."""
        per_rank = self.map.unflatten(1, (self.ranks, -1)).sum(2)
        total = torch.zeros(self.tokens.shape, dtype=torch.float32, device=DEVICE)
        for rank in range(self.ranks):
            rank_sum = torch.zeros_like(total)
            for n in range(int(per_rank.max())):
                rank_sum += torch.where((per_rank[:, rank] > n)[:, None], self.tokens.float(), 0.0)
            total += rank_sum.bfloat16().float()
        return total.bfloat16()

    def check(self) -> None:
        """Compares every version with the exact result.

        Raises:
            AssertionError: a version differs.
        """
        expected = self.expected()
        for out in (self.symmetric(), self.symmetric(deduplicate=False), self.all_to_all()):
            assert torch.equal(out, expected)
        error = (self.eager().double() - self.tokens.double() * self.topk).abs().max()
        assert float(error) < 0.5, error
        (shared, out), (shared_beside, out_beside) = self.with_shared(False), self.with_shared(True)
        assert torch.equal(shared, shared_beside) and torch.equal(out, expected) and torch.equal(out_beside, expected)
        for deduplicate in (True, False):
            rows, codes = self.push(deduplicate), self.push(deduplicate, RECIPE)
            quantized = moe_fast.quantize(rows.rows, RECIPE, splits=rows.tokens_per_expert).quantized
            count = int(rows.tokens_per_expert.sum())
            assert torch.equal(moe_fast.codes(codes.rows)[:count], moe_fast.codes(quantized)[:count]), "codes"
            assert torch.equal(moe_fast.scales(codes.rows), moe_fast.scales(quantized)), "scales"

    def graph(self) -> Call:
        """The symmetric version in a CUDA graph: no device waits, follows a changed map."""
        graph, (out,) = captured(lambda: [self.symmetric()])
        routing_map = self.map.clone()
        self.map.copy_(self.map.roll(5, 1))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, self.expected()), "a replay with another routing"
        self.map.copy_(routing_map)
        dist.barrier()
        return graph.replay

    def versions(self) -> dict[str, Call]:
        """Versions by name; two leading spaces mark a part of a version."""
        dispatched = self.push()
        return {
            EAGER: self.eager,
            "moe_fast all-to-all": self.all_to_all,
            "symmetric, with duplicates": partial(self.symmetric, deduplicate=False),
            "symmetric": self.symmetric,
            "symmetric, graph": self.graph(),
            "symmetric, shared expert first": partial(self.with_shared, False),
            "symmetric, shared expert overlapped": partial(self.with_shared, True),
            "symmetric, quantised, with duplicates": partial(self.symmetric_quantized, dispatched.rows, False),
            "symmetric, quantised": partial(self.symmetric_quantized, dispatched.rows),
            "  dispatch": self.push,
            "  dispatch, quantised": partial(self.push, recipe=RECIPE),
            "  combine": partial(self.pull, dispatched),
            "  push alone": partial(self.push_alone, dispatched.handle),
            "  push alone, quantised": partial(self.push_alone, dispatched.handle, RECIPE),
        }


def timed(versions: Mapping[str, Call], turns: int, calls: int, pause: float = 0) -> dict[str, float]:
    """µs per version on the slowest rank: medians of turns after a warm-up, each after a pause of
    seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(turns + 1):
        for name, run in versions.items():
            torch.cuda.synchronize()
            time.sleep(pause)
            dist.barrier()
            slowest = torch.tensor(elapsed_us(run, calls), device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                times[name].append(slowest.item())
    return {name: statistics.median(measured) for name, measured in times.items()}


def wire_bytes(version: str, hidden: int, copies: int, distinct: int) -> int:
    """Bytes that leave this rank in a call."""
    rows = distinct if version.startswith(("symmetric", "  ")) and "duplicates" not in version else copies
    unquantized, codes = rows * 2 * hidden, rows * (hidden + 4 * -(-hidden // 128))
    out = codes if "quantised" in version else unquantized
    return out if version.startswith("  ") else out + unquantized


def ceilings(bench: Bench, turns: int) -> dict[str, float]:
    """GB/s that leave a GPU while all GPUs write to, or read from, their peers."""
    slab, rows = _slabs[bench.group], torch.randn((16384, 7168), dtype=torch.bfloat16, device="cuda")
    rows = rows[: slab.region("rows", torch.uint8, slab.room.rows * slab.room.row_bytes).numel() // (7168 * 2)]

    def copy(write: bool) -> None:
        arguments = rows, slab.tables["rows"], bench.rank, bench.ranks, 7168
        peer_copy_kernel[(len(rows),)](*arguments, WRITE=write, BLOCK_H=1024)

    times = timed({"write": partial(copy, True), "read": partial(copy, False)}, turns, 5)
    return {name: rows.numel() * 2 / us / 1000 for name, us in times.items()}


def measure(bench: Bench, hidden: int, options: argparse.Namespace) -> dict[str, Any]:
    times = timed(bench.versions(), options.turns, options.calls)
    copies, distinct = bench.wire_rows()
    wire = {version: wire_bytes(version, hidden, copies, distinct) for version in times}
    return {"us": times, "ceilings": ceilings(bench, options.turns), "wire_bytes": wire}


def lines_of(name: str, figures: dict[str, Any]) -> list[list[str]]:
    times, wire, top = figures["us"], figures["wire_bytes"], figures["ceilings"]
    eager = times[EAGER]
    lines = [
        [name, version, f"{us:.0f}", f"{eager / us:.2f}", f"{wire[version] / us / 1000:.0f}"]
        for version, us in times.items()
    ]
    return [*lines, [name, "peers' memory: write, read", "", "", f"{top['write']:.0f}, {top['read']:.0f}"]]


def report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    print(heading(options.tokens, options.ranks))
    lines = [line for name, by_version in figures.items() for line in lines_of(name, by_version)]
    print(table("Dispatch and combine", ["shape", "version", "µs", "eager ÷", "wire GB/s"], lines))
    write(options.json, operations_of(figures, options.ranks))


def operations_of(figures: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The figures as `moe-conformance bench` compares them: each version with the eager one."""
    out = {}
    for name, by_version in figures.items():
        ours = [version for version in by_version["us"] if version != EAGER]
        out[f"{name}, {ranks} ranks"] = {"dispatch and combine": by_version | {"ours": ours}}
    return out


@contextmanager
def world(rank: int, options: argparse.Namespace) -> Iterator[None]:
    """The group of all ranks, within it."""
    settings: dict[str, Any] = {"rank": rank, "world_size": options.ranks}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        settings["device_id"] = torch.device("cuda", rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{options.port}", **settings)
    yield
    dist.destroy_process_group()


def work(rank: int, options: argparse.Namespace) -> None:
    """One rank."""
    with world(rank, options):
        run(rank, options)


def run(rank: int, options: argparse.Namespace) -> None:
    shapes = TINY if options.quick else {name: SHAPES[name] for name in options.shapes.split(",")}
    figures: dict[str, Any] = {}
    for name, shape in shapes.items():
        bench = Bench(rank, options.ranks, shape, options.tokens, 32 if options.quick else SHARED)
        bench.check()
        if not options.quick:
            figures[name] = measure(bench, shape[0], options)
    if rank == 0:
        print("all versions are correct") if options.quick else report(figures, options)


def parse(document: str | None, tokens: int, shapes: str, names: Iterable[str], turns: int, calls: int) -> Any:
    """The options of a run on several ranks; `tokens`, `shapes`, `turns` and `calls` by default."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--tokens", type=int, default=tokens, help="per rank")
    parser.add_argument("--shapes", default=shapes, help=f"of {', '.join(names)}, separated by commas")
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--calls", type=int, default=calls, help="per turn")
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare a tiny shape, time nothing")
    options = parser.parse_args()
    options.tokens = 12 if options.quick else options.tokens
    return options


def main() -> None:
    options = parse(__doc__, 4096, "deepseek-v3", SHAPES, turns=7, calls=5)
    mp.spawn(work, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
