"""Dispatch and combine on the GPUs of one NVLink host: rows straight into peers' memory, beside all-to-all.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python -m benchmarks.dispatch --ranks 4

Each version dispatches tokens to experts that do nothing and combines what comes back. Wire bytes are those that leave a GPU: a row for each
distinct pair of a token and another rank that wants it where duplicates are removed, one for each copy elsewhere where they are not. What is
quantised travels as a byte a number and four for each 128, and comes back as bfloat16. Times are the slowest rank's, medians of turns in
which all versions take part. Before anything is timed every version is compared with float64, or with what is quantised where it arrives.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.common import table
from moe_ref.config import Recipe

SHAPES = {"deepseek-v3": (7168, 256, 8), "qwen3-235b": (4096, 128, 8), "gptoss-120b": (2880, 128, 4)}  # H, E, K
ALIGN = 16
RECIPE = Recipe("block")
SHARED = 2048  # columns of a shared expert, DeepSeek-V3's
SLACK = 1.25  # rows of a buffer, in those that even routing would bring


@triton.jit
def peer_copy_kernel(rows_ptr, table_ptr, own_rank, num_ranks, num_columns, WRITE: tl.constexpr, BLOCK_H: tl.constexpr):
    """Row i to, or from, the same row of a peer, another one for each i: what the link gives to plain stores and loads."""
    row = tl.program_id(0).to(tl.int64)
    peer = (own_rank + 1 + row % (num_ranks - 1)) % num_ranks
    there_ptr = tl.multiple_of(tl.load(table_ptr + peer).to(tl.pointer_type(tl.bfloat16)), 16) + row * num_columns
    here_ptr = rows_ptr + row * num_columns
    for first in range(0, num_columns, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        inside = h < num_columns  # the last block sticks out
        if WRITE:
            tl.store(there_ptr + h, tl.load(here_ptr + h, mask=inside), mask=inside)
        else:
            tl.store(here_ptr + h, tl.load(there_ptr + h, mask=inside), mask=inside)


class Bench:
    """One rank's tokens, and every version on them."""

    def __init__(self, rank: int, ranks: int, hidden: int, experts: int, topk: int, num_tokens: int) -> None:
        self.rank, self.ranks, self.experts, self.topk = rank, ranks, experts, topk
        noise = torch.Generator(device="cuda").manual_seed(rank)
        self.tokens = torch.randn((num_tokens, hidden), dtype=torch.bfloat16, device="cuda", generator=noise)
        self.indices = torch.rand((num_tokens, experts), device="cuda", generator=noise).topk(topk).indices
        self.map = torch.zeros((num_tokens, experts), dtype=torch.bool, device="cuda").scatter_(1, self.indices, True)
        self.probs = torch.rand((num_tokens, experts), device="cuda", generator=noise)
        self.num_rows = int(SLACK * num_tokens * topk) // ALIGN * ALIGN
        self.group = dist.group.WORLD
        weights = ((2 * SHARED, hidden), (hidden, SHARED))
        self.shared_weights = [
            torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=noise) / shape[1] ** 0.5
            for shape in weights
        ]

    def wire_rows(self) -> tuple[int, int]:
        """Rows that leave this rank: copies, and distinct (token, rank)."""
        by_rank = self.map.unflatten(1, (self.ranks, -1))
        others = torch.arange(self.ranks, device="cuda") != self.rank
        return int(by_rank.sum(2)[:, others].sum()), int(by_rank.any(2)[:, others].sum())

    def eager(self) -> Tensor:
        """index_select, all_to_all_single with lists of the host, index_add in float32."""
        local = self.experts // self.ranks
        expert, copy = self.indices.flatten().sort(stable=True)
        counts = torch.empty((self.ranks, self.experts), dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(counts, torch.bincount(expert, minlength=self.experts))
        by_rank = counts.unflatten(1, (self.ranks, local)).sum(2).tolist()
        send, receive = by_rank[self.rank], [row[self.rank] for row in by_rank]
        token = copy // self.topk
        sent = self.tokens.index_select(0, token)
        arrived = sent.new_empty((sum(receive), sent.shape[1]))
        dist.all_to_all_single(arrived, sent, receive, send)
        chunks = counts[:, self.rank * local : (self.rank + 1) * local].flatten()
        chunk = torch.arange(len(chunks), device="cuda").repeat_interleave(chunks, output_size=len(arrived))
        order = (chunk % local).sort(stable=True).indices
        rows = arrived.index_select(0, order)
        back = torch.empty_like(rows).index_copy_(0, order, rows)
        home = torch.empty_like(sent)
        dist.all_to_all_single(home, back, send, receive)
        out = torch.zeros(self.tokens.shape, dtype=torch.float32, device="cuda")
        return out.index_add_(0, token, home.float()).to(self.tokens.dtype)

    def over_all_to_all(self) -> Tensor:
        import moe_fast

        given = moe_fast.hybridep_dispatch(
            self.tokens, self.map, probs=self.probs, align=ALIGN, num_rows=self.num_rows, group=self.group
        )
        return moe_fast.hybridep_combine(given.rows, given.handle, group=self.group).tokens

    def push(self, deduplicate: bool = True, recipe: Recipe | None = None) -> Any:
        from moe_fast.dispatch import symmetric

        settings: dict[str, Any] = {
            "align": ALIGN,
            "num_rows": self.num_rows,
            "deduplicate": deduplicate,
            "recipe": recipe,
        }
        return symmetric.hybridep_dispatch(self.tokens, self.map, probs=self.probs, group=self.group, **settings)

    def pull(self, given: Any, rows: Tensor | None = None) -> Tensor:
        from moe_fast.dispatch import symmetric

        return symmetric.hybridep_combine(given.rows if rows is None else rows, given.handle, group=self.group).tokens

    def push_alone(self, handle: Any, recipe: Recipe | None = None) -> None:
        """The one kernel that writes to other ranks, without counting, barriers and what follows."""
        from moe_fast.dispatch.steps import push
        from moe_fast.dispatch.symmetric import _slab

        slab = _slab(handle, self.tokens, None)
        assert slab is not None
        push(self.tokens, None, None, handle.lists, None, slab, handle.local_experts, handle.once, recipe)

    def symmetric(self) -> Tensor:
        return self.pull(self.push())

    def symmetric_with_duplicates(self) -> Tensor:
        return self.pull(self.push(deduplicate=False))

    def symmetric_quantized(self, rows: Tensor, deduplicate: bool = True) -> Tensor:
        """Codes and scales there, these rows back."""
        return self.pull(self.push(deduplicate, RECIPE), rows)

    def check_quantized(self, deduplicate: bool) -> None:
        """What has arrived as codes is what the rows become."""
        import moe_fast

        rows, got = self.push(deduplicate), self.push(deduplicate, RECIPE)
        right = moe_fast.quantize(rows.rows, RECIPE, splits=rows.tokens_per_expert).quantized
        inside = int(rows.tokens_per_expert.sum())
        assert torch.equal(moe_fast.codes(got.rows)[:inside], moe_fast.codes(right)[:inside]), "codes"
        assert torch.equal(moe_fast.scales(got.rows), moe_fast.scales(right)), "scales"

    def shared(self) -> Tensor:
        """A shared expert of SHARED columns."""
        import moe_fast

        return moe_fast.shared_experts(self.tokens, *self.shared_weights)

    def all_of_it(self, at_once: bool) -> tuple[Tensor, Tensor]:
        """The shared expert, and what the symmetric version makes."""
        from moe_fast.dispatch.overlap import beside

        return beside(self.shared, self.symmetric, self.tokens.device) if at_once else (self.shared(), self.symmetric())

    def expected(self) -> Tensor:
        """Each token so often as it has experts, rounded as combine's tree rounds."""
        per_rank = self.map.unflatten(1, (self.ranks, -1)).sum(2)
        total = torch.zeros(self.tokens.shape, dtype=torch.float32, device="cuda")
        for rank in range(self.ranks):
            part = torch.zeros_like(total)
            for n in range(int(per_rank.max())):
                part += torch.where((per_rank[:, rank] > n)[:, None], self.tokens.float(), 0.0)
            total += part.bfloat16().float()
        return total.bfloat16()


def timed(versions: dict[str, Callable[[], Any]], turns: int, calls: int) -> dict[str, float]:
    """µs of each version, the slowest rank's: medians of turns."""
    found: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(turns + 1):
        for name, run in versions.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) * 1000 / calls, device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first warms up
                found[name].append(slowest.item())
    return {name: statistics.median(times) for name, times in found.items()}


def wire_bytes(version: str, hidden: int, copies: int, distinct: int) -> int:
    """Bytes that leave this rank in a call."""
    rows = distinct if version.startswith(("symmetric", "  ")) and "duplicates" not in version else copies
    plain, codes = rows * 2 * hidden, rows * (hidden + 4 * -(-hidden // 128))
    there = codes if "quantised" in version else plain
    return there if version.startswith("  ") else there + plain


def captured(bench: Bench) -> Callable[[], Any]:
    """The symmetric version in a graph, after a replay with another routing has been found right; nothing in it waits for the device."""
    bench.symmetric()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    bench.symmetric()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bench.symmetric()
    kept = bench.map.clone()
    bench.map.copy_(bench.map.roll(5, 1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, bench.expected()), "a replay with another routing"
    bench.map.copy_(kept)
    dist.barrier()
    return graph.replay


def ceilings(bench: Bench, turns: int) -> dict[str, float]:
    """GB/s that leave a GPU while all write to their peers, or read from them."""
    from moe_fast.dispatch.slabs import _slabs

    slab, rows = _slabs[bench.group], torch.randn((16384, 7168), dtype=torch.bfloat16, device="cuda")
    rows = rows[: slab.region("rows", torch.uint8, slab.room.rows * slab.room.row_bytes).numel() // (7168 * 2)]

    def copy(write: bool) -> None:
        peer_copy_kernel[(len(rows),)](
            rows, slab.tables["rows"], bench.rank, bench.ranks, 7168, WRITE=write, BLOCK_H=1024
        )

    times = timed({"write": lambda: copy(True), "read": lambda: copy(False)}, turns, 5)
    return {name: rows.numel() * 2 / us / 1000 for name, us in times.items()}


def work(rank: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=rank,
        world_size=options.ranks,
        device_id=torch.device("cuda", rank),
    )
    figures: dict[str, Any] = {}
    lines = []
    for name in options.shapes.split(","):
        hidden, experts, topk = SHAPES[name]
        bench = Bench(rank, options.ranks, hidden, experts, topk, options.tokens)
        right = bench.expected()
        assert (
            torch.equal(bench.symmetric(), right)
            and torch.equal(bench.symmetric_with_duplicates(), right)
            and torch.equal(bench.over_all_to_all(), right)
        )
        error = (bench.eager().double() - bench.tokens.double() * topk).abs().max()
        assert float(error) < 0.5, error
        (own, back), (own_beside, back_beside) = bench.all_of_it(False), bench.all_of_it(True)
        assert torch.equal(own, own_beside) and torch.equal(back, right) and torch.equal(back_beside, right)
        bench.check_quantized(True)
        bench.check_quantized(False)
        replay = captured(bench)
        given = bench.push()
        versions = {
            "eager all-to-all": bench.eager,
            "moe_fast all-to-all": bench.over_all_to_all,
            "symmetric, with duplicates": bench.symmetric_with_duplicates,
            "symmetric": bench.symmetric,
            "symmetric, graph": replay,
            "symmetric, shared expert first": partial(bench.all_of_it, False),
            "symmetric, shared expert beside": partial(bench.all_of_it, True),
            "symmetric, quantised, with duplicates": partial(bench.symmetric_quantized, given.rows, False),
            "symmetric, quantised": partial(bench.symmetric_quantized, given.rows),
            "  dispatch": bench.push,
            "  dispatch, quantised": partial(bench.push, recipe=RECIPE),
            "  combine": partial(bench.pull, given),
            "  push alone": partial(bench.push_alone, given.handle),
            "  push alone, quantised": partial(bench.push_alone, given.handle, RECIPE),
        }
        times = timed(versions, options.turns, options.calls)
        top = ceilings(bench, options.turns)
        copies, distinct = bench.wire_rows()
        wire = {version: wire_bytes(version, hidden, copies, distinct) for version in times}
        figures[name] = {"us": times, "ceilings": top, "wire_bytes": wire}
        for version, us in times.items():
            lines.append(
                [
                    name,
                    version,
                    f"{us:.0f}",
                    f"{times['eager all-to-all'] / us:.2f}",
                    f"{wire[version] / us / 1000:.0f}",
                ]
            )
        lines.append([name, "peers' memory: write, read", "", "", f"{top['write']:.0f}, {top['read']:.0f}"])
    if rank == 0:
        print(
            f"{options.ranks} × {torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens} a rank"
        )
        print(table("Dispatch and combine", ["shape", "version", "µs", "eager ÷", "wire GB/s"], lines))
        if options.json:
            with open(options.json, "w") as file:
                json.dump(figures, file, indent=1)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--shapes", default="deepseek-v3", help=f"of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5, help="in a turn")
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    mp.spawn(work, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
