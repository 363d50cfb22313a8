"""Time permute, unpermute and gradients against the bytes they must move and eager torch.

    PYTHONPATH=. python3 -m benchmarks.permutation [--shapes mixtral,qwen3] [--json FILE] [--quick]

Results are compared with eager torch before they are timed. A floor is the time in which this run's
copy ceiling reads each input once and writes each output once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import (
    BF16,
    DEVICE,
    FP32,
    SHAPES,
    TINY_SHAPES,
    Call,
    Operation,
    Random,
    Shape,
    measure,
    parse,
    replayed,
)
from moe_fast.permutation import row_map as row_maps
from moe_fast.permutation.permute import merge_backward as launch_merge_backward
from moe_fast.permutation.permute import move_to_rows, sum_rows
from moe_ref.config import Permuted

ALIGNS = (1, 16, 128)


@dataclass(frozen=True)
class Problem:
    """Random tokens and routing, and the indices for eager torch, computed untimed."""

    align: int
    tokens_TH: Tensor
    routing_map_TE: Tensor
    probs_TE: Tensor
    counts_E: Tensor  # rows per expert, including padding
    token_P: Tensor  # T in padding rows
    row_M: Tensor  # rows that hold a token
    token_M: Tensor
    expert_M: Tensor
    row_TK: Tensor  # experts ascending
    probs_TK: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.token_P)

    @property
    def probs_M(self) -> Tensor:
        return self.probs_TE[self.token_M, self.expert_M]

    @property
    def padded_tokens(self) -> Tensor:
        """The tokens and a row of zeros."""
        return torch.cat([self.tokens_TH, self.tokens_TH.new_zeros(1, self.tokens_TH.shape[1])])

    def permuted(self) -> Permuted:
        """`permute`, without a host sync."""
        settings = {"probs": self.probs_TE, "align": self.align, "num_rows": self.num_rows}
        return moe_fast.permute(self.tokens_TH, self.routing_map_TE, **settings)

    def placed(self) -> row_maps.RowMap:
        """The row map, as `permute` builds it."""
        return row_maps.place(self.routing_map_TE, self.align, self.num_rows)[0]


def make_problem(shape: Shape, num_tokens: int, align: int, seed: int = 0) -> Problem:
    """Each token goes to `topk` distinct random experts."""
    random = Random(seed)
    tokens, scores = random.normal(num_tokens, shape.hidden), random.uniform(num_tokens, shape.experts)
    experts_TK = scores.topk(shape.topk).indices.sort().values
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts_TK, True)
    probs = torch.where(routing_map, random.uniform(*scores.shape), 0)
    expert_M, token_M = routing_map.t().nonzero(as_tuple=True)
    counts = routing_map.sum(0)
    padded = (counts + align - 1) // align * align
    first_row_E = padded.cumsum(0) - padded - counts.cumsum(0) + counts
    row_M = torch.arange(len(token_M), device=DEVICE) + first_row_E[expert_M]
    token_P = torch.full((int(padded.sum()),), num_tokens, device=DEVICE)
    token_P[row_M] = token_M
    row_TE = torch.zeros(scores.shape, dtype=torch.int64, device=DEVICE)
    row_TE[token_M, expert_M] = row_M
    row_TK, probs_TK = row_TE.gather(1, experts_TK), probs.gather(1, experts_TK)
    return Problem(align, tokens, routing_map, probs, padded, token_P, row_M, token_M, expert_M, row_TK, probs_TK)


# --- eager torch


def gathered(p: Problem, rows: Tensor) -> Tensor:
    """Each token's rows [T, K, H]."""
    return rows.index_select(0, p.row_TK.flatten()).view(*p.row_TK.shape, rows.shape[1])


def gather_bmm(p: Problem, rows: Tensor) -> Tensor:
    return torch.bmm(p.probs_TK.to(rows.dtype)[:, None], gathered(p, rows))[:, 0]


def merge_backward(p: Problem, dout: Tensor, rows: Tensor, probs_M: Tensor) -> tuple[Tensor, Tensor]:
    dout_MH = dout.index_select(0, p.token_M)
    drows = torch.zeros_like(rows).index_copy_(0, p.row_M, dout_MH * probs_M[:, None])
    dprobs = torch.zeros_like(p.probs_TE)
    dprobs[p.token_M, p.expert_M] = (rows.index_select(0, p.row_M) * dout_MH).sum(1, dtype=torch.float32)
    return drows, dprobs


def argsort(p: Problem, expert_R: Tensor) -> tuple[Tensor, ...]:
    """The rows of all token copies, sorted by expert."""
    order = expert_R.argsort(stable=True)
    counts = p.routing_map_TE.sum(0)
    padded = (counts + p.align - 1) // p.align * p.align
    first_row_E = padded.cumsum(0) - padded - counts.cumsum(0) + counts
    return order, counts, torch.arange(len(order), device=DEVICE) + first_row_E[expert_R[order]]


# --- checks


def check(p: Problem) -> None:
    """Moves equal eager torch bit by bit; sums are within a bfloat16 rounding of float32 sums.

    Raises:
        AssertionError: a result differs.
    """
    result = p.permuted()
    assert torch.equal(result.rows, p.padded_tokens[p.token_P]) and not bool(result.overflow)
    row_probs = torch.zeros(p.num_rows, device=DEVICE).index_copy_(0, p.row_M, p.probs_M)
    assert torch.equal(result.probs, row_probs)
    assert torch.equal(result.tokens_per_expert, p.counts_E)
    rows, dout, row_map = torch.randn_like(result.rows), torch.randn_like(p.tokens_TH), result.row_map
    rows_TKH, probs = gathered(p, rows).float(), p.probs_TK[..., None]
    close = partial(torch.testing.assert_close, rtol=2.0**-8, atol=1e-5)
    close(moe_fast.unpermute(rows, row_map).float(), rows_TKH.sum(1))
    close(moe_fast.unpermute(rows, row_map, probs=p.probs_TE).float(), (rows_TKH * probs).sum(1))
    dtokens, dprobs = sum_rows(rows, None, row_probs, row_map)
    close(dtokens.float(), rows_TKH.sum(1))
    assert torch.equal(dprobs, p.probs_TE)
    drows, dprobs = launch_merge_backward(dout, rows, p.probs_TE, row_map, True)
    drows_MH = (dout[p.token_M].float() * p.probs_M[:, None]).bfloat16()
    assert torch.equal(drows, torch.zeros_like(rows).index_copy_(0, p.row_M, drows_MH))
    expected = torch.zeros_like(p.probs_TE)
    expected[p.token_M, p.expert_M] = (rows[p.row_M].float() * dout[p.token_M].float()).sum(1)
    torch.testing.assert_close(dprobs, expected, rtol=1e-4, atol=1e-3)


def check_repeats(shape: Shape, num_tokens: int, launches: int) -> None:
    """Row maps of several routing maps in turn, each compared on the device with eager torch.

    Raises:
        AssertionError: a launch built a wrong row map.
    """
    problems = [make_problem(shape._replace(hidden=8), num_tokens, 16, seed) for seed in range(4)]
    mismatches = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for launch in range(launches):
        p = problems[launch % len(problems)]
        row_map, topk = p.placed(), p.row_TK.shape[1]
        slots = row_map.slots_TE[:, :topk].long()
        block = torch.arange(num_tokens, device=DEVICE)[:, None] // row_map.tokens_per_block
        row = row_map.base_BE[block, slots & 0xFFFF] + (slots >> 16)
        mismatches += (row != p.row_TK).sum() + (row_map.num_slots_T != topk).sum()
    assert int(mismatches) == 0, f"{int(mismatches)} wrong rows in {launches} launches"


# --- operations


def operations(shape: Shape, num_tokens: int) -> Iterator[Operation]:
    """Moves by a ready row map (eager torch: ready indices), the row map, whole calls."""
    for align in ALIGNS:
        p = make_problem(shape, num_tokens, align)
        check(p)
        yield permute_operation(p)
        if align < 128:
            yield unpermute_operation(p)
            yield permute_backward(p) if align == 1 else unpermute_backward(p)
        if align == 16:
            yield row_map_operation(p)
            yield Operation("permute + pad 16, whole call in a graph", {"moe_fast": p.permuted}, clock=replayed)
            yield Operation("permute + pad 16, whole call", {"moe_fast": p.permuted})


def permute_operation(p: Problem) -> Operation:
    """moe_fast also moves probs [T, E] to the rows and writes unpermute's row lists."""
    row_map = p.permuted().row_map
    versions: dict[str, Call] = {
        "moe_fast": partial(move_to_rows, p.tokens_TH, p.probs_TE, p.placed(), row_map.slots_TE),
        "index_select": partial(torch.index_select, p.padded_tokens, 0, p.token_P),
    }
    num_tokens, hidden = p.tokens_TH.shape
    minimum = (num_tokens + p.num_rows) * hidden * BF16 + 3 * FP32 * len(p.row_M)
    return Operation("permute" if p.align == 1 else f"permute + pad {p.align}", versions, minimum)


def unpermute_operation(p: Problem) -> Operation:
    rows, row_map = torch.randn(p.num_rows, p.tokens_TH.shape[1], device=DEVICE).bfloat16(), p.permuted().row_map
    versions = {
        "moe_fast": partial(moe_fast.unpermute, rows, row_map, probs=p.probs_TE),
        "gather + bmm": partial(gather_bmm, p, rows),
    }
    title = "unpermute by probs" if p.align == 1 else "unpad + unpermute by probs"
    return Operation(title, versions, summed_bytes(p))


def summed_bytes(p: Problem) -> int:
    return (len(p.tokens_TH) + len(p.row_M)) * p.tokens_TH.shape[1] * BF16 + 2 * FP32 * len(p.row_M)


def permute_backward(p: Problem) -> Operation:
    rows, drow_probs = torch.randn(p.num_rows, p.tokens_TH.shape[1], device=DEVICE).bfloat16(), torch.randn(p.num_rows)
    versions = {
        "moe_fast": partial(sum_rows, rows, None, drow_probs.to(DEVICE), p.permuted().row_map),
        "gather + sum": lambda: gathered(p, rows).sum(1),
    }
    return Operation("permute backward with dprobs", versions, summed_bytes(p) + FP32 * p.probs_TE.numel())


def unpermute_backward(p: Problem) -> Operation:
    rows = torch.randn(p.num_rows, p.tokens_TH.shape[1], device=DEVICE).bfloat16()
    dout = torch.randn_like(p.tokens_TH)
    versions = {
        "moe_fast": partial(launch_merge_backward, dout, rows, p.probs_TE, p.permuted().row_map, True),
        "eager": partial(merge_backward, p, dout, rows, p.probs_M.to(rows.dtype)),
    }
    minimum = summed_bytes(p) + rows.numel() * BF16 + FP32 * len(p.row_M)  # drows with padding
    return Operation("unpad + unpermute by probs, backward with dprobs", versions, minimum)


def row_map_operation(p: Problem) -> Operation:
    """Both launches of a row map with its allocation; each launch alone; a stable argsort."""
    slots = row_maps.empty_slots(p.routing_map_TE)
    walk = row_maps.plan_walk(p.routing_map_TE, row_maps.cut_of(p.routing_map_TE))
    row_maps.count_blocks(p.routing_map_TE, walk, slots)
    expert_R = p.expert_M[p.token_M.argsort(stable=True)]
    versions = {
        "moe_fast": p.placed,
        "walk": lambda: row_maps.count_blocks(p.routing_map_TE, walk, slots),
        "layout": lambda: row_maps.lay_out(walk, slots, p.align, p.num_rows),
        "argsort": partial(argsort, p, expert_R),
    }
    return Operation("row map, pad 16, in a graph", versions, clock=replayed, ours=("walk", "layout"))


@torch.no_grad()
def main() -> None:
    launches = {"type": int, "default": 3000, "help": "repeats of the row map that are compared"}
    options = parse(__doc__, SHAPES, TINY_SHAPES, flags={"--launches": launches})
    measure(lambda shape: operations(shape, options.tokens), options)
    launches = 3 if options.quick else options.launches
    for shape in options.shapes.values():
        check_repeats(shape, options.tokens, launches)
    print(f"{launches} row maps of each shape are right")


if __name__ == "__main__":
    main()
