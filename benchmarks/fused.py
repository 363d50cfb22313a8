"""Time fused stages against the bytes they must move, and against separate stages.

    PYTHONPATH=. python3 -m benchmarks.fused --shapes permute [--only "MXFP8, rows"] [--quick]
    PYTHONPATH=. python3 -m benchmarks.fused --shapes glu --blocks 5 --reps 9

permute_and_quantize is first compared with moe_fast's permute and quantize bit by bit, then timed
in CUDA graphs. "moves" starts from a row map, like index_select from its indices; its peer
quantises one group by torch.compile. "call" includes the row map. A token is read once (current
scaling: twice).

Quantised activations are within half a code step of eager torch in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import BF16, DEVICE, FP32, SHAPES, Call, Operation, Shape, measure, parse, replayed
from benchmarks.experts import GPT_OSS, Hidden, glu, glu_backward, make_hidden
from benchmarks.permutation import Problem, make_problem
from benchmarks.quantization import E4M3_MAX, eager_block, eager_current, eager_delayed, eager_mxfp8, segments
from moe_fast.fused.permute_and_quantize import Work
from moe_fast.permutation import row_map as row_maps
from moe_ref.config import QuantizerState, Recipe

BLOCK, MXFP8 = Recipe("block"), Recipe("mxfp8")
SCALE_BYTES = {"block": 4 / 128, "mxfp8": 1 / 32}  # per element and direction
HALF_STEP, LEAST = 2.0**-4 * 1.01, 2.0**-10  # E4M3: relative to the value, to its scale


class PermuteShape(NamedTuple):
    shape: Shape


class GluShape(NamedTuple):
    shape: Shape
    settings: dict[str, Any]


MODELS = {f"permute {name}": PermuteShape(shape) for name, shape in SHAPES.items()} | {
    f"glu {name}": GluShape(shape, GPT_OSS if name == "gptoss-120b" else {}) for name, shape in SHAPES.items()
}
TINY = {
    "permute": PermuteShape(Shape(64, 8, 2, 0)),
    "permute, wide": PermuteShape(Shape(160, 20, 5, 0)),
    "glu": GluShape(Shape(0, 3, 1, 64), {}),
    "glu as in gpt-oss": GluShape(Shape(0, 3, 1, 64), GPT_OSS),
    "glu in blocks of 4": GluShape(Shape(0, 3, 1, 64), {"interleave": 4}),
}


def operations(model: PermuteShape | GluShape, num_tokens: int) -> Iterator[Operation]:
    if isinstance(model, PermuteShape):
        return permute_operations(model.shape, num_tokens)
    return glu_operations(model.shape, model.settings, num_tokens)


# --- permute and quantize


@dataclass(frozen=True)
class Kind:
    """A recipe, its group alignment, and one group's quantiser in eager torch."""

    title: str
    recipe: Recipe
    align: int
    reads: int  # per token
    written: float  # bytes per element of a row
    peer: Callable[..., object]
    columnwise: bool = False

    def state(self, experts: int) -> QuantizerState | None:
        """The quantiser state of a delayed recipe, else None."""
        if self.recipe.scaling != "delayed":
            return None
        return QuantizerState(torch.zeros(experts, 16, device=DEVICE), torch.full((experts,), 64.0, device=DEVICE))


KINDS = (
    Kind("block 1×128, rows", BLOCK, 128, 1, 1 + 4 / 128, partial(eager_block, dims=(1,))),
    Kind("MXFP8, rows", MXFP8, 32, 1, 1 + 1 / 32, partial(eager_mxfp8, dims=(1,))),
    Kind("block 1×128, rows and columns", BLOCK, 128, 1, 2 + 8 / 128, partial(eager_block, dims=(1, 0)), True),
    Kind("MXFP8, rows and columns", MXFP8, 32, 1, 2 + 2 / 32, partial(eager_mxfp8, dims=(1, 0)), True),
    Kind("current", Recipe("current"), 16, 2, 1, eager_current),
    Kind("delayed", Recipe("delayed", amax_history_len=16), 16, 1, 1, eager_delayed),
)


def one_call(p: Problem, kind: Kind, state: QuantizerState | None) -> Any:
    settings = {"probs": p.probs_TE, "align": p.align, "num_rows": p.num_rows, "columnwise": kind.columnwise}
    return moe_fast.permute_and_quantize(p.tokens_TH, p.routing_map_TE, kind.recipe, state=state, **settings)


def two_calls(p: Problem, kind: Kind, state: QuantizerState | None) -> tuple[Any, Any]:
    permuted = p.permuted()
    settings = {"splits": permuted.tokens_per_expert, "columnwise": kind.columnwise, "state": state}
    return permuted, moe_fast.quantize(permuted.rows, kind.recipe, **settings)


def moves(p: Problem, kind: Kind, state: QuantizerState | None) -> Call:
    """The launches after the row map."""
    lists, slots, _ = row_maps.place(p.routing_map_TE, p.align, p.num_rows)
    arguments = p.tokens_TH, p.probs_TE, kind.recipe, "input", lists, slots.tokens_per_expert
    return lambda: Work(*arguments).done(True, kind.columnwise, state)


def compiled(p: Problem, kind: Kind) -> Call:
    """index_select, then a fused quantiser."""
    tokens, quantizer = p.padded_tokens, torch.compile(kind.peer, dynamic=False)
    scale = (torch.full((), 64.0, device=DEVICE),) if kind.recipe.scaling == "delayed" else ()
    return lambda: quantizer(tokens.index_select(0, p.token_P), *scale)


def check_permuted(p: Problem, kind: Kind, state: QuantizerState | None) -> None:
    """Compares the fused call with two calls, bit by bit.

    Raises:
        AssertionError: a result differs.
    """
    fused, (permuted, quantized) = one_call(p, kind, state), two_calls(p, kind, state)
    for columnwise in (False, True)[: 1 + kind.columnwise]:
        for read in (moe_fast.codes, moe_fast.scales, moe_fast.amax, moe_fast.dequantize):
            results = [read(x.quantized, columnwise=columnwise) for x in (fused, quantized)]
            assert torch.equal(*results), (kind.title, read.__name__)
    assert torch.equal(fused.probs, permuted.probs) and torch.equal(fused.tokens_per_expert, permuted.tokens_per_expert)
    ones = torch.ones_like(permuted.rows)
    assert torch.equal(moe_fast.unpermute(ones, fused.row_map), moe_fast.unpermute(ones, permuted.row_map))
    if state is not None:
        assert torch.equal(fused.state.amax_history, quantized.state.amax_history)


def permute_operations(shape: Shape, num_tokens: int) -> Iterator[Operation]:
    for kind in KINDS:
        p, state = make_problem(shape, num_tokens, kind.align), kind.state(shape.experts)
        check_permuted(p, kind, state)
        moves(p, kind, state)()
        minimum = (kind.reads * num_tokens * BF16 + p.num_rows * kind.written) * shape.hidden
        size = f"{num_tokens} → {p.num_rows} · {shape.hidden}"
        versions = {
            "moves": moves(p, kind, state),
            "index_select, torch.compile": compiled(p, kind),
            "call": partial(one_call, p, kind, state),
            "permute, then quantize": partial(two_calls, p, kind, state),
        }
        ours = ("call", "permute, then quantize")
        yield Operation(kind.title, versions, minimum, size, clock=replayed, ours=ours)


# --- activate and quantize


def check_activated(p: Hidden, splits: Tensor, recipe: Recipe) -> None:
    """Compares with eager torch, in both directions.

    Raises:
        AssertionError: a value differs by more than half a code step.
    """
    call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": True, **p.settings}
    forward = moe_fast.glu_and_quantize(p.h_PF2, recipe, **call).quantized
    backward = moe_fast.glu_backward_and_quantize(p.d_out_PF, p.h_PF2, recipe, **call)
    h, d_out, count = p.h_PF2.float(), p.d_out_PF.float(), int(splits.sum())
    d_h, d_probs = glu_backward(d_out, h, p.probs_P, **p.settings)
    for quantized, expected in ((forward, glu(h, p.probs_P, **p.settings)), (backward.quantized, d_h)):
        for columnwise in (False, True):
            value = moe_fast.dequantize(quantized, columnwise=columnwise)[:count].float()
            magnitude = expected[:count].abs()
            bound = HALF_STEP * magnitude + LEAST * 2 * magnitude.amax() / E4M3_MAX
            assert bool(((value - expected[:count]).abs() <= bound).all())
    torch.testing.assert_close(backward.d_probs[:count], d_probs[:count], rtol=1e-4, atol=2e-2)


def one_after_the_other(activate: Call, cast: Callable[..., Any], dims: tuple[int, ...]) -> object:
    """An activation written to memory, then quantised as one group."""
    result: Any = activate()
    return cast(result[0] if isinstance(result, tuple) else result, dims), result


def glu_operations(shape: Shape, settings: dict[str, Any], num_tokens: int) -> Iterator[Operation]:
    """Operations of fused glu; separate stages round to bfloat16 in between."""
    p = make_hidden(num_tokens * shape.topk, shape.width, settings)
    last_rows, splits = p.last(4096), segments(len(p.probs_P), shape.experts, 32)
    for recipe in (BLOCK, MXFP8):
        check_activated(
            last_rows, segments(len(last_rows.probs_P) - 32, shape.experts, 32), recipe
        )  # the last rows are in no group
    casts = {"block": torch.compile(eager_block, dynamic=False), "mxfp8": torch.compile(eager_mxfp8, dynamic=False)}
    yield from glu_forwards(p, splits, casts)
    yield from glu_backwards(p, splits, casts)


def glu_forwards(p: Hidden, splits: Tensor, casts: dict[str, Callable[..., Any]]) -> Iterator[Operation]:
    activate = partial(torch.compile(glu, dynamic=False), *p.inputs, **p.settings)

    def two_calls(recipe: Recipe, columnwise: bool) -> object:
        out = moe_fast.glu(p.h_PF2, probs=p.probs_P, **p.settings)
        return moe_fast.quantize(out, recipe, splits=splits, columnwise=columnwise)

    for title, recipe, columnwise in (
        ("1x128, rows", BLOCK, False),
        ("1x128, rows and columns", BLOCK, True),
        ("MXFP8, rows and columns", MXFP8, True),
    ):
        dims = (1, 0) if columnwise else (1,)
        call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": columnwise, **p.settings}
        versions: dict[str, Call] = {
            "moe_fast": partial(moe_fast.glu_and_quantize, p.h_PF2, recipe, **call),
            "torch.compile, twice": partial(one_after_the_other, activate, casts[recipe.scaling], dims),
            "glu, then quantize": partial(two_calls, recipe, columnwise),
        }
        written = len(dims) * (1 + SCALE_BYTES[recipe.scaling]) * p.d_out_PF.numel()
        minimum = p.bytes(2) + written + FP32 * len(p.probs_P)
        yield Operation(f"GLU · p, {title}", versions, minimum, p.size, ours=("glu, then quantize",))


def glu_backwards(p: Hidden, splits: Tensor, casts: dict[str, Callable[..., Any]]) -> Iterator[Operation]:
    activate = partial(torch.compile(glu_backward, dynamic=False), p.d_out_PF, *p.inputs, **p.settings)

    def two_calls(recipe: Recipe) -> object:
        d_h = moe_fast.glu_backward(p.d_out_PF, p.h_PF2, probs=p.probs_P, **p.settings).d_h
        return moe_fast.quantize(d_h, recipe, role="grad_output", splits=splits, columnwise=True)

    for title, recipe, rounds in (
        ("1x128, rounded first", BLOCK, True),
        ("1x128", BLOCK, False),
        ("MXFP8", MXFP8, False),
    ):
        call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": True, **p.settings}
        versions: dict[str, Call] = {
            "moe_fast": partial(
                moe_fast.glu_backward_and_quantize, p.d_out_PF, p.h_PF2, recipe, round_before_quantize=rounds, **call
            ),
            "torch.compile, twice": partial(one_after_the_other, activate, casts[recipe.scaling], (1, 0)),
            "glu_backward, then quantize": partial(two_calls, recipe),
        }
        written = 4 * (1 + SCALE_BYTES[recipe.scaling]) * p.d_out_PF.numel()
        title = f"GLU · p backward with d_probs, {title}, rows and columns"
        minimum = p.bytes(3) + written + 2 * FP32 * len(p.probs_P)
        yield Operation(title, versions, minimum, p.size, ours=("glu_backward, then quantize",))


@torch.no_grad()
def main() -> None:
    options = parse(__doc__, MODELS, TINY, tokens=96)
    measure(lambda model: operations(model, options.tokens), options)


if __name__ == "__main__":
    main()
