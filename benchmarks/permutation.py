"""How fast permute, unpermute and their gradients are: beside the bytes they must move, and beside eager torch.

    PYTHONPATH=. python3 benchmarks/permutation.py [--tokens 8192] [--shapes mixtral-8x7b,qwen3-30b] [--json FILE] [--quick]

Every result is compared with eager torch before it is timed. `--quick` only compares, at tiny sizes; it runs without a GPU.
A floor is the time in which this run's copy ceiling (of 2 GiB) moves each input once and each output once. A copy of as many
bytes, timed like the rest, shows what a launch and the size cost.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import BF16, QUICK_SHAPES, SHAPES, Shape, ceilings, interleaved, lines_of, replayed, table
from moe_fast.launch.backend import INTERPRETED, triton
from moe_fast.permutation import row_map as metadata
from moe_fast.permutation.permute import merge_backward, move_to_rows, sum_rows

DEVICE = "cpu" if INTERPRETED else "cuda"


@dataclass(frozen=True)
class Problem:
    """Random tokens and routing, and what eager torch must know beforehand: it is not timed."""

    tokens_TH: Tensor
    routing_map_TE: Tensor
    probs_TE: Tensor
    token_P: Tensor  # the row's token; T in padding rows
    row_M: Tensor  # the rows that have a token
    token_M: Tensor
    expert_M: Tensor
    row_TK: Tensor  # experts ascending
    probs_TK: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.token_P)


def make_problem(shape: Shape, num_tokens: int, align: int, seed: int = 0) -> Problem:
    """A token takes `topk` experts at random, each at most once."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens = torch.randn(num_tokens, shape.hidden, generator=generator, device=DEVICE).bfloat16()
    scores = torch.rand(num_tokens, shape.experts, generator=generator, device=DEVICE)
    experts_TK = scores.topk(shape.topk).indices.sort().values
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts_TK, True)
    probs = torch.where(routing_map, torch.rand(scores.shape, generator=generator, device=DEVICE), 0)
    expert_M, token_M = routing_map.t().nonzero(as_tuple=True)
    count = routing_map.sum(0)
    segment = (count + align - 1) // align * align
    row_M = (
        torch.arange(len(token_M), device=DEVICE) + (segment.cumsum(0) - segment - count.cumsum(0) + count)[expert_M]
    )
    token_P = torch.full((int(segment.sum()),), num_tokens, device=DEVICE)
    token_P[row_M] = token_M
    row_TE = torch.zeros(scores.shape, dtype=torch.int64, device=DEVICE)
    row_TE[token_M, expert_M] = row_M
    return Problem(
        tokens,
        routing_map,
        probs,
        token_P,
        row_M,
        token_M,
        expert_M,
        row_TE.gather(1, experts_TK),
        probs.gather(1, experts_TK),
    )


def place(problem: Problem, align: int) -> metadata.RowMap:
    """Where the rows are, as `permute` finds it out before it moves them."""
    return metadata.place(problem.routing_map_TE, align, problem.num_rows)[0]


def permuted_map(problem: Problem, align: int) -> metadata.RowMap:
    """The row map that `permute` returns."""
    return moe_fast.permute(problem.tokens_TH, problem.routing_map_TE, align=align, num_rows=problem.num_rows).row_map


# --- eager torch


def padded_gather(tokens_with_zero_row: Tensor, token_P: Tensor) -> Tensor:
    return tokens_with_zero_row.index_select(0, token_P)


def two_steps(p: Problem) -> Tensor:
    rows = p.tokens_TH.index_select(0, p.token_M)
    return rows.new_zeros(p.num_rows, rows.shape[1]).index_copy_(0, p.row_M, rows)


def gather_rows(p: Problem, rows: Tensor) -> Tensor:
    return rows.index_select(0, p.row_TK.flatten()).view(*p.row_TK.shape, rows.shape[1])


def gather_bmm(p: Problem, rows: Tensor) -> Tensor:
    return torch.bmm(p.probs_TK.to(rows.dtype)[:, None], gather_rows(p, rows))[:, 0]


def gather_mul_sum(p: Problem, rows: Tensor) -> Tensor:
    return (gather_rows(p, rows) * p.probs_TK[..., None].to(rows.dtype)).sum(1)


def mul_index_add(p: Problem, rows: Tensor, probs_M: Tensor) -> Tensor:
    return rows.new_zeros(p.tokens_TH.shape).index_add_(0, p.token_M, rows.index_select(0, p.row_M) * probs_M[:, None])


def index_add(p: Problem, rows: Tensor) -> Tensor:
    return rows.new_zeros(p.tokens_TH.shape).index_add_(0, p.token_M, rows.index_select(0, p.row_M))


def merge_backward(p: Problem, dout: Tensor, rows: Tensor, probs_M: Tensor) -> tuple[Tensor, Tensor]:
    dout_MH = dout.index_select(0, p.token_M)
    drows = torch.zeros_like(rows).index_copy_(0, p.row_M, dout_MH * probs_M[:, None])
    dprobs = torch.zeros_like(p.probs_TE)
    dprobs[p.token_M, p.expert_M] = (rows.index_select(0, p.row_M) * dout_MH).sum(1, dtype=torch.float32)
    return drows, dprobs


# --- what is measured


@dataclass(frozen=True)
class Operation:
    """One table: ours first, then eager versions of it, and the bytes that must be moved."""

    title: str
    minimum: int
    versions: dict[str, Callable[[], object]]


def check(problem: Problem, align: int) -> None:
    """Moves are bit-equal to eager torch; sums differ from its sums in float32 by less than a rounding to bfloat16."""
    p, row_map = problem, permuted_map(problem, align)
    tokens_0 = torch.cat([p.tokens_TH, p.tokens_TH.new_zeros(1, p.tokens_TH.shape[1])])
    result = moe_fast.permute(p.tokens_TH, p.routing_map_TE, probs=p.probs_TE, align=align, num_rows=p.num_rows)
    assert torch.equal(result.rows, padded_gather(tokens_0, p.token_P)) and not bool(result.overflow)
    assert torch.equal(result.rows, two_steps(p))
    row_probs = torch.zeros(p.num_rows, device=DEVICE).index_copy_(0, p.row_M, p.probs_TE[p.token_M, p.expert_M])
    assert torch.equal(result.probs, row_probs)
    count = p.routing_map_TE.sum(0)
    assert torch.equal(result.tokens_per_expert, (count + align - 1) // align * align)
    rows, dout = torch.randn_like(result.rows), torch.randn_like(p.tokens_TH)
    gathered, probs = gather_rows(p, rows).float(), p.probs_TK[..., None]
    close = partial(torch.testing.assert_close, rtol=2.0**-8, atol=1e-5)
    close(moe_fast.unpermute(rows, row_map).float(), gathered.sum(1))
    close(moe_fast.unpermute(rows, row_map, probs=p.probs_TE).float(), (gathered * probs).sum(1))
    dtokens, dprobs = sum_rows(rows, None, row_probs, row_map)
    close(dtokens.float(), gathered.sum(1))
    assert torch.equal(dprobs, p.probs_TE)
    drows, dprobs = merge_backward(dout, rows, p.probs_TE, row_map, True)
    right = torch.zeros_like(rows).index_copy_(
        0, p.row_M, (dout[p.token_M].float() * p.probs_TE[p.token_M, p.expert_M][:, None]).bfloat16()
    )
    assert torch.equal(drows, right)
    right = torch.zeros_like(p.probs_TE)
    right[p.token_M, p.expert_M] = (rows[p.row_M].float() * dout[p.token_M].float()).sum(1)
    torch.testing.assert_close(dprobs, right, rtol=1e-4, atol=1e-3)


def operations(p: Problem, align: int) -> list[Operation]:
    """The moves alone: both sides know where the rows go."""
    (num_tokens, hidden), rows_M, row_map = p.tokens_TH.shape, len(p.row_M), permuted_map(p, align)
    row, pad = hidden * BF16, "" if align == 1 else f" + pad {align}"
    tokens_0 = torch.cat([p.tokens_TH, p.tokens_TH.new_zeros(1, hidden)])
    gather = {"index_select": partial(padded_gather, tokens_0, p.token_P)}
    if align > 1:
        gather = {"gather over a zero row": gather["index_select"], "two steps": partial(two_steps, p)}
    ours = partial(move_to_rows, p.tokens_TH, p.probs_TE, place(p, align), row_map.slots_TE)
    found = [Operation(f"permute{pad}", (num_tokens + p.num_rows) * row + 12 * rows_M, {"moe_fast": ours, **gather})]
    if align == 128:
        return found
    rows, dout = torch.randn(p.num_rows, hidden, device=DEVICE).bfloat16(), torch.randn_like(p.tokens_TH)
    probs_M, drow_probs = p.probs_TE[p.token_M, p.expert_M], torch.randn(p.num_rows, device=DEVICE)
    probs_M = probs_M.to(rows.dtype)
    unpad = "" if align == 1 else "unpad + "
    summed = (num_tokens + rows_M) * row + 8 * rows_M
    merged = {
        "moe_fast": partial(moe_fast.unpermute, rows, row_map, probs=p.probs_TE),
        "gather + bmm": partial(gather_bmm, p, rows),
        "gather + mul + sum": partial(gather_mul_sum, p, rows),
        "mul + index_add": partial(mul_index_add, p, rows, probs_M),
    }
    found.append(Operation(f"{unpad}unpermute by probs", summed, merged))
    if align == 1:
        backward = {
            "moe_fast": partial(sum_rows, rows, None, drow_probs, row_map),
            "gather + sum": lambda: gather_rows(p, rows).sum(1),
        }
        backward["index_add"] = partial(index_add, p, rows)
        return [
            *found,
            Operation(
                "permute backward with dprobs",
                (num_tokens + rows_M) * row + 8 * rows_M + 4 * p.probs_TE.numel(),
                backward,
            ),
        ]
    minimum = (num_tokens + rows_M + p.num_rows) * row + 12 * rows_M
    backward = {
        "moe_fast": partial(merge_backward, dout, rows, p.probs_TE, row_map, True),
        "eager": partial(merge_backward, p, dout, rows, probs_M),
    }
    return [*found, Operation(f"{unpad}unpermute by probs, backward with dprobs", minimum, backward)]


def metadata_versions(p: Problem, align: int) -> dict[str, Callable[[], object]]:
    """The two launches that find the places, each alone; both and their memory; eager torch's way to the rows."""
    slots, walk = metadata.empty_slots(p.routing_map_TE), metadata.plan_walk(p.routing_map_TE)
    metadata.count_blocks(p.routing_map_TE, walk, slots)
    experts_TK = p.expert_M[p.token_M.argsort(stable=True)].view(p.row_TK.shape)

    def argsort() -> tuple[Tensor, ...]:
        expert = experts_TK.flatten()
        order = expert.argsort(stable=True)
        count = p.routing_map_TE.sum(0)
        segment = (count + align - 1) // align * align
        row = (
            torch.arange(len(order), device=DEVICE)
            + (segment.cumsum(0) - segment - count.cumsum(0) + count)[expert[order]]
        )
        return order, count, row

    return {
        "both": lambda: metadata.place(p.routing_map_TE, align, p.num_rows),
        "walk": lambda: metadata.count_blocks(p.routing_map_TE, walk, slots),
        "layout": lambda: metadata.lay_out(walk, slots, align, p.num_rows),
        "argsort": argsort,
    }


def whole_call(p: Problem, align: int) -> dict[str, Callable[[], object]]:
    """What a user calls, metadata included, without a host sync."""
    ours = partial(moe_fast.permute, p.tokens_TH, p.routing_map_TE, probs=p.probs_TE, align=align, num_rows=p.num_rows)
    return {"moe_fast.permute": ours}


# --- what must hold on a GPU


def check_repeats(shape: Shape, num_tokens: int, launches: int) -> int:
    """The metadata of many launches in a row, on several maps in turn, each compared on the device with torch's."""
    problems = [make_problem(Shape(8, *shape[1:]), num_tokens, 16, seed) for seed in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for launch in range(launches):
        p = problems[launch % len(problems)]
        row_map = place(p, 16)
        slots = row_map.slots_TE[:, : p.row_TK.shape[1]].long()
        block = torch.arange(num_tokens, device=DEVICE)[:, None] // row_map.tokens_per_block
        row = row_map.base_BE[block, slots & 0xFFFF] + (slots >> 16)
        wrong += (row != p.row_TK).sum() + (row_map.num_slots_T != p.row_TK.shape[1]).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong rows in {launches} launches"
    return launches


def check_graph(shape: Shape, num_tokens: int) -> None:
    """A captured forward and backward follow the routing that is in the map at the replay, and wait for no device."""
    first, second = (make_problem(shape, num_tokens, 16, seed) for seed in (1, 2))
    num_rows = (num_tokens * shape.topk // 16 + 2 * shape.experts) * 16
    tokens, routing_map, probs = first.tokens_TH.clone(), first.routing_map_TE.clone(), first.probs_TE.clone()

    def step() -> tuple[Tensor, ...]:
        x, q = tokens.detach().requires_grad_(), probs.detach().requires_grad_()
        permuted = moe_fast.permute(x, routing_map, probs=q, align=16, num_rows=num_rows)
        merged = moe_fast.unpermute(permuted.rows, permuted.row_map, probs=q)
        return (
            permuted.rows.detach(),
            merged.detach(),
            *torch.autograd.grad([merged, permuted.probs], [x, q], [tokens, permuted.probs.detach()]),
        )

    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = step()
    for problem in (second, first, second):
        for buffer, value in (
            (tokens, problem.tokens_TH),
            (routing_map, problem.routing_map_TE),
            (probs, problem.probs_TE),
        ):
            buffer.copy_(value)
        graph.replay()
        expected = padded_gather(torch.cat([tokens, tokens.new_zeros(1, shape.hidden)]), problem.token_P)
        assert torch.equal(captured[0][: problem.num_rows], expected) and not captured[0][problem.num_rows :].any()
        for replayed_value, value in zip(captured, step(), strict=True):
            assert torch.equal(replayed_value, value)


# --- the report


def report(operation: Operation, times: dict[str, float], copy: float) -> dict[str, object]:
    floor = operation.minimum / copy / 1e6
    return {"title": operation.title, "floor_us": floor, "to_floor": times["moe_fast"] / floor, "us": times}


def measure(shapes: dict[str, Shape], num_tokens: int, blocks: int, reps: int) -> dict:
    """All figures of one run."""
    top = ceilings(blocks, reps)
    results: dict[str, dict[str, dict]] = {}
    latencies: dict[str, dict[str, float]] = {}
    started = time.perf_counter()
    for name, shape in shapes.items():
        results[name] = {}
        for align in (1, 16, 128):
            p = make_problem(shape, num_tokens, align)
            check(p, align)
            for operation in operations(p, align):
                source = torch.randn(operation.minimum // 8, device=DEVICE)
                versions = {
                    **operation.versions,
                    "copy of as many bytes": partial(torch.empty_like(source).copy_, source),
                }
                results[name][operation.title] = report(operation, interleaved(versions, blocks, reps), top["copy"])
            if align == 16:
                latencies[name] = replayed(metadata_versions(p, align), blocks, reps)
                latencies[name]["permute, graph"] = replayed(whole_call(p, align), blocks, reps)["moe_fast.permute"]
                latencies[name]["permute, eager"] = interleaved(whole_call(p, align), blocks, reps)["moe_fast.permute"]
    after = ceilings(blocks, reps)
    print(
        f"copy {top['copy']:.2f} TB/s (after: {after['copy']:.2f}), write {top['write']:.2f}, read {top['read']:.2f}; {time.perf_counter() - started:.0f} s"
    )
    for title in dict.fromkeys(title for by_title in results.values() for title in by_title):
        print(lines_of(results, title))
    columns = list(next(iter(latencies.values())))
    lines = [[name, *(f"{time:.1f}" for time in times.values())] for name, times in latencies.items()]
    print(table("routing metadata, and the whole of permute + pad 16, µs", ["shape", *columns], lines))
    return {"ceilings": top, "ceilings_after": after, "operations": results, "latencies": latencies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="all", help="names separated by commas")
    parser.add_argument("--blocks", type=int, default=7, help="turns that each version takes")
    parser.add_argument("--reps", type=int, default=15, help="calls a turn")
    parser.add_argument("--launches", type=int, default=3000, help="repeats of the metadata that are compared")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare tiny sizes, time nothing")
    options = parser.parse_args()
    if options.quick:
        for name, shape in QUICK_SHAPES.items():
            for align in (1, 16, 128):
                check(make_problem(shape, 24, align), align)
            check_repeats(shape, 24, 3)
            print(f"{name}: equal to eager torch")
        return
    names = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens}"
    )
    with torch.no_grad():
        figures = measure({name: SHAPES[name] for name in names}, options.tokens, options.blocks, options.reps)
    repeated = sum(check_repeats(SHAPES[name], options.tokens, options.launches) for name in names)
    for name in names:
        check_graph(SHAPES[name], options.tokens)
    print(
        f"\n{repeated} launches of the metadata equal torch's; captured steps follow a changed map; no host sync with num_rows"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
