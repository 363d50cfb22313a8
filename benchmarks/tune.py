"""Search a GPU's sizes of kernels, and write its table in `moe_fast/launch/tables`.

    PYTHONPATH=. python3 -m benchmarks.tune [--only activation] [--seconds 100] [--table FILE]
    PYTHONPATH=. python3 -m benchmarks.tune --quick        # without a GPU: judges, times nothing

The search begins with the sizes in use. It doubles and halves each number of a kernel's record, and
goes on from a candidate that gains at least `GAIN`. A candidate is timed beside the sizes that it
would replace, at the sizes of two models; its score is the geometric mean of the ratios of times. A
faster candidate is then judged: all of the kernel's cases of the suite must PASS against the
reference with these sizes. A candidate that fails, or that the compiler refuses, never enters the
table. The table also holds what was measured.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import DEVICE, SHAPES, Call, Random, Shape, Times
from benchmarks.experts import make_hidden
from conformance import catalogue as catalogue  # whose families `Case.family` knows
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.engine.speed.clocks import queued
from conformance.interface import Implementation
from moe_fast.launch import tables, tuning
from moe_ref.config import Recipe

GAIN = 0.03  # less than this of a time is noise
TOKENS = 8192
MODELS = ("qwen3-30b", "dsv3-ep8")
TINY = {"tiny": Shape(40, 8, 2, 24)}
MOST = {"num_warps": 16, "num_stages": 6, "stages": 4, "steps": 32}  # lengths are bounded by their tile
LEAST_OF_A_DOT, LARGEST_TILE = 16, 2**16
Make = Callable[[Shape, int], Call]
Clock = Callable[[Mapping[str, Call]], Times]


@dataclass(frozen=True)
class Kernel:
    """A record of `Tuning`, calls at models' sizes that read it, and cases of the suite that do."""

    path: str
    make: Make
    cases: tuple[Mapping[str, Any], ...]


@dataclass
class SearchResult:
    """The fastest sizes of a kernel that a search has reached."""

    sizes: dict[str, int]
    ratio: float = 1.0  # of the time to that of the sizes before
    timed: int = 0
    refused: list[str] = field(default_factory=list)  # by the compiler, or wrong


class Verdict(NamedTuple):
    """Whether every case passed, else the first that did not."""

    passed: bool
    reason: str = ""


# ---- the kernels that have a table


def _tokens(shape: Shape, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and the map and probs of a random choice."""
    random = Random()
    x, scores = random.normal(tokens, shape.hidden, dtype=dtype), random.uniform(tokens, shape.experts)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(shape.topk).indices, True)
    return x, chosen, scores * chosen


def _permute(shape: Shape, tokens: int) -> Call:
    x, chosen, probs = _tokens(shape, tokens)
    return partial(moe_fast.permute, x, chosen, probs=probs, num_rows=tokens * shape.topk)


def _unpermute(shape: Shape, tokens: int) -> Call:
    x, chosen, _ = _tokens(shape, tokens)
    permuted = moe_fast.permute(x, chosen, num_rows=tokens * shape.topk)
    return partial(moe_fast.unpermute, permuted.rows, permuted.row_map)


def _topk(shape: Shape, tokens: int) -> Call:
    logits = Random().normal(tokens, shape.experts, dtype=torch.float32)
    return partial(moe_fast.topk_routing, logits, topk=shape.topk)


def _glu(shape: Shape, tokens: int, backward: bool) -> Call:
    p = make_hidden(tokens * shape.topk, shape.width, {})
    if backward:
        return partial(moe_fast.glu_backward, p.d_out_PF, p.h_PF2, probs=p.probs_P)
    return partial(moe_fast.glu, p.h_PF2, probs=p.probs_P)


def _quantize(shape: Shape, tokens: int) -> Call:
    x, *_ = _tokens(shape, tokens)
    return partial(moe_fast.quantize, x, Recipe("block"), role="input", columnwise=False)


def _glu_and_quantize(shape: Shape, tokens: int) -> Call:
    p = make_hidden(tokens * shape.topk, shape.width, {})
    return partial(moe_fast.glu_and_quantize, p.h_PF2, Recipe("block"), probs=p.probs_P)


def _few_rows(shape: Shape, tokens: int, rows: int) -> Call:
    """fc1 of experts with `rows` rows each."""
    random, counts = Random(), torch.full((shape.experts,), rows, device=DEVICE)
    weight = random.normal(shape.experts, 2 * shape.width, shape.hidden)
    return partial(moe_fast.grouped_linear, random.normal(rows * shape.experts, shape.hidden), weight, counts)


BF16: dict[str, Any] = {"dtype": "bfloat16"}
ROUTED = BF16 | {"tokens": 70, "experts": 5, "hidden": 300, "topk": 2, "routing": None, "spread": "uniform"}
PERMUTE = {"function": "permute"} | ROUTED
GLU = {"function": "glu"} | BF16 | {"tokens": 70, "width": 300, "probs": "float32"}
CODES = BF16 | {"scaling": "block", "tokens": 3}
PRODUCT = {"function": "grouped_linear"} | BF16 | {"hidden": 200, "width": 300, "experts": 5}
LOGITS = {"function": "topk_routing", "tokens": 70, "topk": 4, "score": "softmax"}
KERNELS = (
    Kernel("activation", partial(_glu, backward=False), (GLU,)),
    Kernel("activation_backward", partial(_glu, backward=True), (GLU | {"grads": "h+probs"},)),
    Kernel(
        "permute", _permute, tuple({"function": "permute"} | ROUTED | x for x in ({"probs": "float32"}, {"align": 16}))
    ),
    Kernel("unpermute", _unpermute, ({"function": "unpermute"} | ROUTED,)),
    Kernel("topk", _topk, tuple(LOGITS | {"experts": experts} for experts in (5, 200))),
    Kernel("quantize.rows", _quantize, ({"function": "quantize", "direction": "rowwise", "hidden": 5} | CODES,)),
    Kernel("activate_quantize.columns", _glu_and_quantize, ({"function": "glu_and_quantize", "width": 5} | CODES,)),
    Kernel("grouped.by_rows.0", partial(_few_rows, rows=8), ({"function": "grouped_linear", "tokens": 60} | PRODUCT,)),
    Kernel(
        "grouped.by_rows.1", partial(_few_rows, rows=48), ({"function": "grouped_linear", "tokens": 300} | PRODUCT,)
    ),
)


# ---- the search


@contextmanager
def using(sizes: tuning.Tuning) -> Iterator[None]:
    """Kernels run with these sizes."""
    earlier_sizes = tuning.INTERPRETER, tuning.GPU
    tuning.INTERPRETER = tuning.GPU = sizes
    try:
        yield
    finally:
        tuning.INTERPRETER, tuning.GPU = earlier_sizes


def candidates(record: Any) -> list[dict[str, int]]:
    """The record with one number doubled or halved, within what a kernel can take."""
    neighbours = []
    numbers = {f.name: getattr(record, f.name) for f in fields(record)}
    for name, value in numbers.items():
        for changed_value in (value * 2, value // 2) if isinstance(value, int) else ():
            tile = math.prod(numbers[side] for side in ("tokens", "rows", "columns", "elements") if side in numbers)
            least = LEAST_OF_A_DOT if "depth" in numbers and name in ("rows", "columns", "depth") else 1
            larger = tile * changed_value // value if name not in MOST else 0
            if least <= changed_value <= MOST.get(name, LARGEST_TILE) and larger <= LARGEST_TILE:
                neighbours.append(numbers | {name: changed_value})
    return neighbours


def judged(cases: Sequence[Mapping[str, Any]], implementation: Implementation) -> Verdict:
    """The suite's verdict on the cases, each against the reference."""
    for settings in cases:
        case = Case.family[settings["function"]](**settings)
        outcome = evaluate(case, implementation, DEVICE)
        if outcome.status != "PASS":
            return Verdict(False, f"{settings['function']} {outcome.status} {outcome.finding or outcome.reason}")
    return Verdict(True)


def search(
    kernel: Kernel, sizes: tuning.Tuning, calls: Sequence[Call], implementation: Implementation, clock: Clock,
    until: float = math.inf,
) -> SearchResult:  # fmt: skip
    """The fastest right sizes of a kernel that a walk from `sizes` reaches before the time `until`.

    Raises:
        RuntimeError: the sizes to begin with are wrong.
    """
    record = record_at(kernel.path)(sizes)
    numbers = {f.name: getattr(record, f.name) for f in fields(record)}
    with using(sizes):
        verdict = judged(kernel.cases, implementation)
    if not verdict.passed:
        raise RuntimeError(f"{kernel.path} is wrong before the search: {verdict.reason}")
    result, better = SearchResult(numbers), True
    while better:
        better = False
        for candidate in candidates(record_at(kernel.path)(sizes)):
            if time.monotonic() > until:
                return result
            changed = tables.changed(sizes, kernel.path, candidate)
            ratio = _ratio(calls, sizes, changed, clock, result)
            if ratio > 1 - GAIN:
                continue
            with using(changed):
                verdict = judged(kernel.cases, implementation)
            if not verdict.passed:
                result.refused.append(f"{candidate}: {verdict.reason}")
                continue
            sizes, result.sizes, result.ratio, better = changed, candidate, result.ratio * ratio, True
            break
    return result


def _ratio(
    calls: Sequence[Call], current: tuning.Tuning, changed: tuning.Tuning, clock: Clock, result: SearchResult
) -> float:
    """The geometric mean of the ratios of the calls' times; infinite if the compiler refuses."""

    def under(sizes: tuning.Tuning, call: Call) -> object:
        with using(sizes):
            return call()

    logs = []
    try:
        for call in calls:
            us = clock({"current": partial(under, current, call), "candidate": partial(under, changed, call)})
            logs.append(math.log(us["candidate"] / us["current"]))
    except Exception as error:  # of the compiler, by any name: no room for the tile
        result.refused.append(f"{type(error).__name__}")
        return math.inf
    result.timed += 1
    return math.exp(sum(logs) / len(logs))


def record_at(path: str) -> Callable[[Any], Any]:
    """The record at a path of `Tuning`."""

    def get(sizes: Any) -> Any:
        for name in path.split("."):
            sizes = sizes[int(name)] if name.isdigit() else getattr(sizes, name)
        return sizes

    return get


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="prefixes of kernels, comma-separated")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the search, at most")
    parser.add_argument("--table", help="the file to write; else the GPU's in moe_fast/launch/tables")
    parser.add_argument("--quick", action="store_true", help="judge the sizes in use, time nothing")
    options = parser.parse_args()
    implementation = Implementation(moe_fast, "moe_fast")
    chosen = [kernel for kernel in KERNELS if kernel.path.startswith(tuple(options.only.split(",")))]
    if options.quick:
        for kernel in chosen:
            verdict = judged(kernel.cases, implementation)
            assert verdict.passed, (kernel.path, verdict.reason)
            [kernel.make(shape, 24)() for shape in TINY.values()]
            print(f"{kernel.path}: judged", flush=True)
        return
    gpu, sizes = tables.Gpu.of(torch.device(DEVICE)), tuning.for_device(torch.device(DEVICE))
    clock: Clock = partial(queued, blocks=3, reps=7)
    began = time.monotonic()
    written: dict[str, Any] = {"gpu": gpu._asdict(), "sizes": {}, "measured": {}}
    name = next(word for word in gpu.name.lower().split() if any(c.isdigit() for c in word))
    target = Path(options.table) if options.table else tables.FOLDER / f"{name}.json"
    for at, kernel in enumerate(chosen):
        share = (options.seconds - (time.monotonic() - began)) / (len(chosen) - at)
        calls = [kernel.make(SHAPES[name], TOKENS) for name in MODELS]
        result = search(kernel, sizes, calls, implementation, clock, time.monotonic() + share)
        if not result.timed:  # no time was left for it, or no candidate compiles
            print(f"{kernel.path}: no candidate timed", flush=True)
            continue
        written["sizes"][kernel.path] = result.sizes
        written["measured"][kernel.path] = {
            "ratio": round(result.ratio, 3),
            "timed": result.timed,
            "refused": len(result.refused),
        }
        target.write_text(json.dumps(written, indent=1) + "\n")  # now: a search may be ended from outside
        print(f"{kernel.path}: {result.ratio:.3f} of the time before, {result.timed} timed; {result.sizes}", flush=True)
        for reason in result.refused:
            print(f"  not taken: {reason}", flush=True)
    print(f"{target}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
