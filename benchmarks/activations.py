"""How fast an activation and its gradients are: beside the bytes they must move, beside eager torch and beside torch.compile.

    PYTHONPATH=. python3 -m benchmarks.activations [--tokens 8192] [--shapes mixtral-8x7b,gptoss-120b] [--json FILE] [--quick]

Every result is compared with eager torch in float32 before it is timed, and once at a size beyond 2³¹ elements. `--quick` only compares,
at tiny sizes; it runs without a GPU. A floor is the time in which this run's copy ceiling (of 2 GiB) moves each input once and each output
once. A copy of as many bytes, timed like the rest, shows what a launch and the size cost.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import BF16, SHAPES, ceilings, interleaved, lines_of
from moe_fast.launch.backend import INTERPRETED, triton

DEVICE = "cpu" if INTERPRETED else "cuda"
PROB = 4  # bytes
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "clamp": 7.0, "offset": 1.0, "interleave": 1}
WIDTHS = {  # of an expert, F
    "mixtral-8x7b": 14336,
    "dsv3-ep8": 2048,
    "qwen3-30b": 768,
    "qwen3-235b": 1536,
    "gptoss-120b": 2880,
    "kimi-k2-ep8": 2048,
    "qwen3next-80b": 512,
}
rounded = partial(
    torch.testing.assert_close, rtol=2.0**-7, atol=2.0**-12
)  # neighbours in bfloat16, where float32 differs in its last bits
summed = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-2)  # a sum over F in float32, of terms that cancel


@dataclass(frozen=True)
class Problem:
    """Rows as fc1 leaves them, in bfloat16; probs in float32."""

    h_PF2: Tensor
    d_out_PF: Tensor
    probs_P: Tensor
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def forward_bytes(self) -> int:
        return 3 * self.d_out_PF.numel() * BF16 + len(self.probs_P) * PROB

    @property
    def backward_bytes(self) -> int:
        return 5 * self.d_out_PF.numel() * BF16 + 2 * len(self.probs_P) * PROB


def make(rows: int, width: int, settings: dict[str, Any], seed: int = 0) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    h = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
    d_out = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
    return Problem(h, d_out, torch.rand(rows, generator=generator, device=DEVICE), settings)


# --- eager torch


def halves(h: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    if interleave is None:
        u, v = h.chunk(2, dim=1)
        return u, v
    u, v = h.view(len(h), -1, 2, interleave).unbind(2)
    return u.flatten(1), v.flatten(1)


def joined(u: Tensor, v: Tensor, interleave: int | None) -> Tensor:
    if interleave is None:
        return torch.cat([u, v], dim=1)
    blocks = (len(u), -1, interleave)
    return torch.stack([u.view(blocks), v.view(blocks)], dim=2).flatten(1)


def forward(
    h: Tensor,
    probs: Tensor,
    alpha: float = 1.0,
    clamp: float | None = None,
    offset: float = 0.0,
    interleave: int | None = None,
) -> Tensor:
    """In float32, rounded once."""
    u, v = (x.float() for x in halves(h, interleave))
    if clamp is not None:
        u, v = u.clamp(max=clamp), v.clamp(-clamp, clamp)
    return (u * torch.sigmoid(alpha * u) * (v + offset) * probs[:, None]).to(h.dtype)


def backward(
    d_out: Tensor,
    h: Tensor,
    probs: Tensor,
    alpha: float = 1.0,
    clamp: float | None = None,
    offset: float = 0.0,
    interleave: int | None = None,
) -> tuple[Tensor, Tensor]:
    """In float32, each result rounded once."""
    free_u, free_v = u, v = tuple(x.float() for x in halves(h, interleave))
    if clamp is not None:
        u, v = u.clamp(max=clamp), v.clamp(-clamp, clamp)
    s = torch.sigmoid(alpha * u)
    g = d_out.float() * probs[:, None]
    du, dv = g * (s + alpha * u * s * (1 - s)) * (v + offset), g * u * s
    if clamp is not None:
        du, dv = torch.where(free_u <= clamp, du, 0), torch.where(free_v.abs() <= clamp, dv, 0)
    d_probs = (d_out.float() * u * s * (v + offset)).sum(1)
    return joined(du, dv, interleave).to(h.dtype), d_probs


# --- what is measured


@dataclass(frozen=True)
class Operation:
    """One table: ours first, then other versions of it, and the bytes that must be moved."""

    title: str
    minimum: int
    versions: dict[str, Callable[[], object]]


def check(p: Problem) -> None:
    """Ours beside eager torch.

    Raises:
        AssertionError: they differ by more than their roundings.
    """
    rounded(moe_fast.glu(p.h_PF2, probs=p.probs_P, **p.settings), forward(p.h_PF2, p.probs_P, **p.settings))
    fast, eager = (
        moe_fast.glu_backward(p.d_out_PF, p.h_PF2, probs=p.probs_P, **p.settings),
        backward(p.d_out_PF, p.h_PF2, p.probs_P, **p.settings),
    )
    rounded(fast.d_h, eager[0])
    summed(fast.d_probs, eager[1])


def check_large(rows: int, width: int, settings: dict[str, Any]) -> None:
    """The last rows of a problem beside those rows by themselves, bit by bit."""
    p = make(rows, width, settings)
    out = moe_fast.glu(p.h_PF2, probs=p.probs_P, **settings)
    d_h, d_probs = moe_fast.glu_backward(p.d_out_PF, p.h_PF2, probs=p.probs_P, **settings)
    last = slice(rows - 5, rows)
    alone = moe_fast.glu_backward(p.d_out_PF[last], p.h_PF2[last], probs=p.probs_P[last], **settings)
    assert torch.equal(out[last], moe_fast.glu(p.h_PF2[last], probs=p.probs_P[last], **settings))
    assert alone.d_probs is not None and d_probs is not None
    assert torch.equal(d_h[last], alone.d_h) and torch.equal(d_probs[last], alone.d_probs)


def check_graph(p: Problem) -> None:
    """A captured forward and backward follow what is in h at the replay, and wait for no device."""
    h, probs = p.h_PF2.clone(), p.probs_P.clone()

    def step() -> tuple[Tensor, ...]:
        x, q = h.detach().requires_grad_(), probs.detach().requires_grad_()
        out = moe_fast.glu(x, probs=q, **p.settings)
        return out.detach(), *torch.autograd.grad(out, [x, q], p.d_out_PF)

    with torch.enable_grad():
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            captured = step()
        for scale in (0.5, 2.0):
            h.mul_(scale)
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True))


def operations(p: Problem) -> list[Operation]:
    """Forward, and backward with d_probs."""
    compiled_forward, compiled_backward = torch.compile(forward, dynamic=False), torch.compile(backward, dynamic=False)
    there, back = (p.h_PF2, p.probs_P), (p.d_out_PF, p.h_PF2, p.probs_P)
    return [
        Operation(
            "GLU · p, forward",
            p.forward_bytes,
            {
                "moe_fast": partial(moe_fast.glu, p.h_PF2, probs=p.probs_P, **p.settings),
                "torch.compile": partial(compiled_forward, *there, **p.settings),
                "eager": partial(forward, *there, **p.settings),
            },
        ),
        Operation(
            "GLU · p, backward with d_probs",
            p.backward_bytes,
            {
                "moe_fast": partial(moe_fast.glu_backward, p.d_out_PF, p.h_PF2, probs=p.probs_P, **p.settings),
                "torch.compile": partial(compiled_backward, *back, **p.settings),
                "eager": partial(backward, *back, **p.settings),
            },
        ),
    ]


# --- the report


def measure(names: list[str], num_tokens: int, blocks: int, reps: int) -> dict[str, Any]:
    """All figures of one run."""
    top = ceilings(blocks, reps)
    results: dict[str, dict[str, dict]] = {}
    started = time.perf_counter()
    for name in names:
        torch._dynamo.reset()  # each shape has its own compilation, and no limit on how many
        p = make(num_tokens * SHAPES[name].topk, WIDTHS[name], GPT_OSS if name == "gptoss-120b" else {})
        check(p)
        check_graph(p)
        results[name] = {}
        for operation in operations(p):
            source = torch.randn(operation.minimum // 8, device=DEVICE)
            times = interleaved(
                {**operation.versions, "copy of as many bytes": partial(torch.empty_like(source).copy_, source)},
                blocks,
                reps,
            )
            floor = operation.minimum / top["copy"] / 1e6
            size = f"{len(p.probs_P)} · {WIDTHS[name]}"
            results[name][operation.title] = {
                "size": size,
                "floor_us": floor,
                "to_floor": times["moe_fast"] / floor,
                "us": times,
            }
    after = ceilings(blocks, reps)
    print(
        f"copy {top['copy']:.2f} TB/s (after: {after['copy']:.2f}), write {top['write']:.2f}, read {top['read']:.2f}; {time.perf_counter() - started:.0f} s"
    )
    for title in next(iter(results.values())):
        print(lines_of(results, title, "rows · F"))
    return {"ceilings": top, "ceilings_after": after, "operations": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="all", help="names separated by commas")
    parser.add_argument("--blocks", type=int, default=7, help="turns that each version takes")
    parser.add_argument("--reps", type=int, default=15, help="calls a turn")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare tiny sizes, time nothing")
    options = parser.parse_args()
    if options.quick:
        for settings in ({}, GPT_OSS, {"interleave": 4}):
            check(make(24, 40, settings))
            check_large(24, 40, settings)
        print("equal to eager torch")
        return
    names = list(WIDTHS) if options.shapes == "all" else options.shapes.split(",")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens}"
    )
    with torch.no_grad():
        figures = measure(names, options.tokens, options.blocks, options.reps)
        for settings in ({}, GPT_OSS, {"interleave": 32}):
            check_large(2**16 + 5, 2**14 + 64, settings)  # h has more than 2³¹ elements
        check_large(2**22 + 5, 8, {})  # more programs than the other axes of a grid may have
    print("\ncaptured steps follow changed rows and wait for no device; the last of more than 2³¹ elements are right")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
