"""Time activations against the bytes they must move, and grouped GEMMs against torch's.

    PYTHONPATH=. python3 -m benchmarks.experts --shapes glu [--json FILE] [--quick]
    PYTHONPATH=. python3 -m benchmarks.experts --shapes linear --blocks 6

Results are compared with eager torch in float32 before they are timed, activations also on more
than 2³¹ elements. GEMMs are timed in bursts: power sets the clock, so only ratios within one run
are meaningful. FP8 operands are quantised untimed; transposing them for a gradient is timed.
torch's FP8 GEMM has one scale per row and never promotes its sums.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import BF16, DEVICE, FP32, SHAPES, Call, Operation, Random, bursts, measure, parse
from moe_fast.experts.scaled_linear import (
    Precision,
    quantized_rows,
    quantized_weight,
    scaled_dgrad,
    scaled_fprop,
    scaled_plan,
    scaled_wgrad,
)
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Recipe

GPT_OSS: dict[str, Any] = {"alpha": 1.702, "clamp": 7.0, "offset": 1.0, "interleave": 1}
RECIPES = ("current", "block")
PRODUCTS = ("forward", "dgrad", "wgrad")


class Activation(NamedTuple):
    """Rows per token, FFN size F, settings of glu."""

    topk: int
    width: int
    settings: dict[str, Any]


class Layer(NamedTuple):
    """The expert GEMM of a model: experts, K, N, total rows."""

    experts: int
    ins: int
    outs: int
    rows: int


ACTIVATIONS = {
    f"glu {name}": Activation(shape.topk, shape.width, GPT_OSS if name == "gptoss-120b" else {})
    for name, shape in SHAPES.items()
}
LAYERS = {
    "linear mixtral fc1": Layer(8, 4096, 28672, 16384),
    "linear mixtral fc2": Layer(8, 14336, 4096, 16384),
    "linear dsv3 fc1": Layer(32, 7168, 4096, 65536),
    "linear dsv3 fc2": Layer(32, 2048, 7168, 65536),
    "linear qwen3 fc1": Layer(128, 2048, 1536, 65536),
    "linear qwen3 fc2": Layer(128, 768, 2048, 65536),
    "linear gptoss fc1": Layer(128, 2880, 5760, 32768),
    "linear gptoss fc2": Layer(128, 2880, 2880, 32768),
    "linear qwen3, 8 rows per expert": Layer(128, 2048, 1536, 1024),
}
TINY = {
    "glu": Activation(1, 40, {}),
    "glu as in gpt-oss": Activation(1, 40, GPT_OSS),
    "glu in blocks of 4": Activation(1, 40, {"interleave": 4}),
    "linear": Layer(5, 24, 40, 70),
    "linear, few rows": Layer(6, 40, 24, 5),
}


def operations(shape: Activation | Layer, num_tokens: int) -> Iterator[Operation]:
    return activations(shape, num_tokens) if isinstance(shape, Activation) else products(shape)


# --- activations


@dataclass(frozen=True)
class Hidden:
    """The output of fc1 in bfloat16, a gradient, and probs in float32."""

    h_PF2: Tensor
    d_out_PF: Tensor
    probs_P: Tensor
    settings: dict[str, Any] = field(default_factory=dict)

    def last(self, count: int) -> "Hidden":
        return Hidden(self.h_PF2[-count:], self.d_out_PF[-count:], self.probs_P[-count:], self.settings)

    def bytes(self, elements: float) -> float:
        """Bytes of `elements` bfloat16 elements per element of the output."""
        return elements * self.d_out_PF.numel() * BF16

    @property
    def size(self) -> str:
        return " · ".join(map(str, self.d_out_PF.shape))

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.h_PF2, self.probs_P


def make_hidden(rows: int, width: int, settings: dict[str, Any]) -> Hidden:
    random = Random()
    return Hidden(random.normal(rows, 2 * width), random.normal(rows, width), random.uniform(rows), settings)


def halves(h: Tensor, interleave: int | None) -> list[Tensor]:
    if interleave is None:
        return list(h.chunk(2, dim=1))
    return [half.flatten(1) for half in h.view(len(h), -1, 2, interleave).unbind(2)]


def joined(u: Tensor, v: Tensor, interleave: int | None) -> Tensor:
    if interleave is None:
        return torch.cat([u, v], dim=1)
    return torch.stack([x.view(len(x), -1, interleave) for x in (u, v)], dim=2).flatten(1)


def glu(
    h: Tensor,
    probs: Tensor,
    alpha: float = 1.0,
    clamp: float | None = None,
    offset: float = 0.0,
    interleave: int | None = None,
) -> Tensor:
    """glu in eager torch: float32, rounded once."""
    u, v = (x.float() for x in halves(h, interleave))
    if clamp is not None:
        u, v = u.clamp(max=clamp), v.clamp(-clamp, clamp)
    return (u * torch.sigmoid(alpha * u) * (v + offset) * probs[:, None]).to(h.dtype)


def glu_backward(
    d_out: Tensor,
    h: Tensor,
    probs: Tensor,
    alpha: float = 1.0,
    clamp: float | None = None,
    offset: float = 0.0,
    interleave: int | None = None,
) -> tuple[Tensor, Tensor]:
    """d_h and d_probs in eager torch: float32, each rounded once."""
    u_in, v_in = u, v = [x.float() for x in halves(h, interleave)]
    if clamp is not None:
        u, v = u.clamp(max=clamp), v.clamp(-clamp, clamp)
    s = torch.sigmoid(alpha * u)
    g = d_out.float() * probs[:, None]
    du, dv = g * (s + alpha * u * s * (1 - s)) * (v + offset), g * u * s
    if clamp is not None:
        du, dv = torch.where(u_in <= clamp, du, 0), torch.where(v_in.abs() <= clamp, dv, 0)
    d_probs = (d_out.float() * u * s * (v + offset)).sum(1)
    return joined(du, dv, interleave).to(h.dtype), d_probs


def fast_forward(p: Hidden) -> Tensor:
    return moe_fast.glu(p.h_PF2, probs=p.probs_P, **p.settings)


def fast_backward(p: Hidden) -> Any:
    return moe_fast.glu_backward(p.d_out_PF, p.h_PF2, probs=p.probs_P, **p.settings)


def check_activation(p: Hidden) -> None:
    """Compares with eager torch: within one bfloat16 ulp, as float32 differs in its last bits.

    Raises:
        AssertionError: the results differ by more.
    """
    rounded = partial(torch.testing.assert_close, rtol=2.0**-7, atol=2.0**-12)
    rounded(fast_forward(p), glu(*p.inputs, **p.settings))
    fast, (d_h, d_probs) = fast_backward(p), glu_backward(p.d_out_PF, *p.inputs, **p.settings)
    rounded(fast.d_h, d_h)
    torch.testing.assert_close(fast.d_probs, d_probs, rtol=1e-4, atol=2e-2)  # sums over F cancel


def check_last_rows(rows: int, width: int, settings: dict[str, Any]) -> None:
    """The last rows of a large problem equal the same rows alone, bit by bit.

    Raises:
        AssertionError: they differ.
    """
    p = make_hidden(rows, width, settings)
    last = p.last(5)
    of_all_rows, of_last_rows = fast_backward(p), fast_backward(last)
    assert torch.equal(fast_forward(p)[-5:], fast_forward(last))
    assert torch.equal(of_all_rows.d_h[-5:], of_last_rows.d_h) and torch.equal(
        of_all_rows.d_probs[-5:], of_last_rows.d_probs
    )


def activations(shape: Activation, num_tokens: int) -> Iterator[Operation]:
    """Forward, and backward with d_probs."""
    p = make_hidden(num_tokens * shape.topk, shape.width, shape.settings)
    check_activation(p)
    forward = {
        "moe_fast": partial(fast_forward, p),
        "torch.compile": partial(torch.compile(glu, dynamic=False), *p.inputs, **p.settings),
    }
    backward = {
        "moe_fast": partial(fast_backward, p),
        "torch.compile": partial(torch.compile(glu_backward, dynamic=False), p.d_out_PF, *p.inputs, **p.settings),
    }
    probs = FP32 * len(p.probs_P)
    yield Operation("GLU · p, forward", forward, p.bytes(3) + probs, p.size)
    yield Operation("GLU · p, backward with d_probs", backward, p.bytes(5) + 2 * probs, p.size)


# --- grouped GEMMs


class Operands(NamedTuple):
    """The operands of the three GEMMs."""

    rows_PN: Any
    weight_LMN: Any
    d_out_PM: Any


def make_operands(layer: Layer) -> tuple[Operands, Tensor]:
    """Random normal operands in bfloat16 and random rows per expert."""
    random = Random()
    expert = torch.randint(layer.experts, (layer.rows,), generator=random.generator, device=DEVICE)
    counts = torch.bincount(expert, minlength=layer.experts)
    sizes = (layer.rows, layer.ins), (layer.experts, layer.outs, layer.ins), (layer.rows, layer.outs)
    return Operands(*(random.normal(*size) for size in sizes)), counts


def fast_versions(x: Operands, counts: Tensor) -> dict[str, Call]:
    """moe_fast's versions; every call plans its tiles."""
    return {
        "forward": lambda: moe_fast.grouped_linear(x.rows_PN, x.weight_LMN, counts),
        "dgrad": lambda: moe_fast.grouped_dgrad(x.d_out_PM, x.weight_LMN, counts),
        "wgrad": lambda: moe_fast.grouped_wgrad(x.d_out_PM, x.rows_PN, counts),
    }


def torch_versions(x: Operands, counts: Tensor) -> dict[str, Call]:
    """torch's versions; the segment ends are computed untimed."""
    ends = counts.cumsum(0).int()
    return {
        "forward": lambda: torch.nn.functional.grouped_mm(x.rows_PN, x.weight_LMN.mT, offs=ends),
        "dgrad": lambda: torch.nn.functional.grouped_mm(x.d_out_PM, x.weight_LMN, offs=ends),
        "wgrad": lambda: torch.nn.functional.grouped_mm(x.d_out_PM.mT, x.rows_PN, offs=ends),
    }


def quantized(x: Operands, counts: Tensor, scaling: str) -> Operands:
    """Operands quantised by a recipe's defaults, rowwise and columnwise."""
    precision = Precision(Recipe(scaling), None, None)
    rows = quantized_rows(x.rows_PN, "input", counts, precision, True, True)
    d_out = quantized_rows(x.d_out_PM, "grad_output", counts, precision, True, True)
    return Operands(rows, quantized_weight(x.weight_LMN, precision, True, True), d_out)


def scaled_versions(q: Operands, counts: Tensor, num_rows: int) -> dict[str, Call]:
    recipe = q.rows_PN.recipe
    return {
        "forward": lambda: scaled_fprop(q.rows_PN, q.weight_LMN, scaled_plan(counts, num_rows, recipe)),
        "dgrad": lambda: scaled_dgrad(q.d_out_PM, q.weight_LMN, scaled_plan(counts, num_rows, recipe)),
        "wgrad": lambda: scaled_wgrad(q.d_out_PM, q.rows_PN, scaled_plan(counts, num_rows, recipe)),
    }


def torch_scaled_forward(x: Operands, counts: Tensor) -> Call:
    """torch's scaled GEMM, forward only."""
    rows, weight = x.rows_PN.to(torch.float8_e4m3fn), x.weight_LMN.to(torch.float8_e4m3fn).mT
    ones = torch.ones(len(rows), device=DEVICE), torch.ones(len(weight), weight.shape[2], device=DEVICE)
    settings = {"offs": counts.cumsum(0).int(), "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: torch._scaled_grouped_mm(rows, weight, *ones, **settings)


def check_products(
    versions: Mapping[str, Callable[[], Any]],
    by_rows: Operands,
    by_columns: Operands,
    counts: Tensor,
    noise: Callable[[int], float],
) -> None:
    """Compares with float32 products, expert by expert.

    Raises:
        AssertionError: an error exceeds `noise(terms)` · Σ|terms| + a rounding to bfloat16.
    """
    results, begin = {product: versions[product]() for product in PRODUCTS}, 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(begin, begin + count)
        begin += count
        factors = {
            "forward": (by_rows.rows_PN[rows], by_rows.weight_LMN[expert].T),
            "dgrad": (by_rows.d_out_PM[rows], by_columns.weight_LMN[expert]),
            "wgrad": (by_columns.d_out_PM[rows].T, by_columns.rows_PN[rows]),
        }
        for product, (a, b) in factors.items():
            exact = a.float() @ b.float()
            error = (results[product][expert if product == "wgrad" else rows].float() - exact).abs()
            bound = noise(a.shape[1]) * (a.float().abs() @ b.float().abs()) + 2.0**-8 * exact.abs()
            assert (error <= bound).all(), product


def check_scaled(x: Operands, counts: Tensor, scaling: str, versions: Mapping[str, Call]) -> None:
    """Compares with GEMMs of the dequantised codes, within the error of 14-bit sums."""
    recipe = Recipe(scaling)

    def moved(rows: Tensor, role: str) -> Quantized:  # the operands of products keep their columns' codes transposed
        return moe_fast.quantize(rows.float(), recipe, role=role, splits=counts, columnwise=True)[0]

    weight = quantized_weight(x.weight_LMN.float(), Precision(recipe, None, None), True, True)
    q = Operands(moved(x.rows_PN, "input"), weight, moved(x.d_out_PM, "grad_output"))

    def values(operand: Quantized, like: Tensor, columnwise: bool) -> Tensor:
        return moe_fast.dequantize(operand, columnwise=columnwise).float().view(like.shape)

    by_rows, by_columns = (
        Operands(*(values(a, b, columnwise) for a, b in zip(q, x, strict=True))) for columnwise in (False, True)
    )
    check_products(versions, by_rows, by_columns, counts, lambda terms: 2.0**-8)


def products(layer: Layer) -> Iterator[Operation]:
    """Forward and both gradients, in bfloat16 and FP8."""
    x, counts = make_operands(layer)
    scaled = {scaling: scaled_versions(quantized(x, counts, scaling), counts, layer.rows) for scaling in RECIPES}
    check_products(fast_versions(x, counts), x, x, counts, lambda terms: 2.0**-23 * terms)
    for scaling, versions in scaled.items():
        check_scaled(x, counts, scaling, versions)
    versions_of = {"moe_fast": fast_versions(x, counts), "grouped_mm": torch_versions(x, counts), **scaled}
    for product in PRODUCTS:
        versions = {name: by_product[product] for name, by_product in versions_of.items()}
        if product == "forward" and DEVICE == "cuda":
            versions["scaled_grouped_mm"] = torch_scaled_forward(x, counts)
        size = f"{layer.experts} · {layer.rows} · {layer.ins} · {layer.outs}"
        flops = 2 * layer.rows * layer.ins * layer.outs
        yield Operation(product, versions, size=size, flops=flops, clock=bursts, ours=tuple(scaled))


@torch.no_grad()
def main() -> None:
    options = parse(__doc__, ACTIVATIONS | LAYERS, TINY)
    measure(lambda shape: operations(shape, options.tokens), options)
    large = [] if options.quick else [shape for shape in options.shapes.values() if isinstance(shape, Activation)]
    if options.quick:
        check_last_rows(24, 40, {"interleave": 4})
    if large:
        for settings in ({}, GPT_OSS, {"interleave": 32}):
            check_last_rows(2**16 + 5, 2**14 + 64, settings)  # h: more than 2³¹ elements
        check_last_rows(2**22 + 5, 8, {})  # more programs than a grid's second axis allows
        print("the last of more than 2³¹ elements are correct")


if __name__ == "__main__":
    main()
