"""Honest grouped products in low precision that differ in all that the contract leaves open; every stage can be replaced by a wrong one.

ScaledFirst    each value is code · scale in float32; one matmul
ScaledLast     codes are multiplied, each block's sum is scaled when it is added; factors that a whole tensor shares come last
Split          values, in four parts along the contraction, the last first
FourteenBits   sums of 14 bits, cut off, of 32 products at a time, promoted after each 128, as it declares (hopper_fp8)
Reciprocal     scales that are no powers of two by reciprocals, as it declares
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_ref
from moe_ref.config import (
    Operand,
    QuantizerState,
    Recipe,
    check_count_values,
    check_grouped_dgrad,
    check_grouped_linear,
    check_grouped_wgrad,
    check_precision,
)
from moe_ref.config.quantization import BLOCK
from moe_ref.quantization.recipes import operands, scheme
from tests.honest import quantizers

DEPTH, PROMOTED = 32, 128  # products of one instruction, and of a sum until it is promoted


class Part(NamedTuple):
    """One expert's part of a factor, [rows, K]: the contraction lies last."""

    code: Tensor  # float32, what codes mean
    scale: Tensor  # float32, of each element
    whole: Tensor  # float32 [rows,1], what all elements of a row are multiplied by

    @property
    def value(self) -> Tensor:
        return self.code * (self.scale * self.whole)


class Source(NamedTuple):
    """A tensor on its way into a product."""

    x: Tensor  # [R,C]
    splits: Tensor
    role: str
    gemm: str
    recipe: Recipe
    state: QuantizerState | None
    noise: Tensor | None

    @property
    def operand(self) -> Operand:
        return {operand.role: operand for operand in operands(self.gemm, self.recipe)}[self.role]

    @property
    def columnwise(self) -> bool:
        return self.operand.columnwise

    @property
    def turned(self) -> bool:
        """Whether the contraction lies along the rows."""
        return self.gemm == "wgrad" or (self.role == "weight" and self.gemm == "dgrad")


# ---- from tensors to codes and scales


def by_codes(source: Source, quantizer: Any = quantizers.Divides, columnwise: bool | None = None) -> list[Part]:
    """What a quantiser's own functions say that its codes and scales are; what comes back of them, where the backward is overridden."""
    if source.operand.kept == "stored":
        return as_stored(source)
    recipe, turn = source.recipe, source.columnwise
    read = turn if columnwise is None else columnwise
    if recipe.four_over_six not in (None, "none"):
        quantizer = moe_ref
    how: dict[str, Any] = {"role": source.role, "splits": source.splits, "rowwise": not read, "columnwise": read}
    made = quantizer.quantize(source.x.detach(), recipe, state=source.state, noise=source.noise, **how).quantized
    code, scale, amax = (getattr(quantizer, name)(made, columnwise=read) for name in ("codes", "scales", "amax"))
    sizes = source.splits.tolist()
    codes = decoded(code[: sum(sizes)], recipe, source.role).split(sizes)
    square = bool(recipe.two_dimensional_weights) and source.role == "weight"
    rows = [-(-size // BLOCK["block"]) if recipe.scaling == "block" and (square or read) else size for size in sizes]
    if recipe.scaling in ("mxfp8", "nvfp4") and read:
        rows = [size // BLOCK[recipe.scaling] for size in sizes]
    scales = scale.split(rows) if scale.dim() > 1 else list(scale)
    found = []
    for g, (own, its) in enumerate(zip(codes, scales, strict=True)):
        whole = torch.ones(1, 1)
        if recipe.scaling == "nvfp4":
            whole = of_group(amax, g, sizes, recipe, source.role, read) * torch.tensor(
                1 / (6 * scheme(recipe, source.role).scale_max)
            )
        element = spread(
            exponents(its)
            if recipe.scaling == "mxfp8"
            else its.view(torch.float8_e4m3fn).float()
            if recipe.scaling == "nvfp4"
            else its,
            own,
        )
        part = own, element, whole.expand_as(own)
        if source.operand.kept == "dequantized":
            part = as_numbers((own * (element * whole)).to(source.x.dtype).float())
        found.append(Part(*(x.T if source.turned else x for x in part)))
    return [
        Part(code, scale, whole[:, :1] if whole.shape[1] else whole.new_ones(len(whole), 1))
        for code, scale, whole in found
    ]


def as_stored(source: Source) -> list[Part]:
    """The numbers themselves, in float32."""
    own = source.x[: int(source.splits.sum())].float().split(source.splits.tolist())
    plain = [x.T if source.turned else x for x in own]
    return [Part(x, torch.ones_like(x), torch.ones(len(x), 1)) for x in plain]


def as_numbers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers in place of codes, with scales of 1."""
    return x, torch.ones_like(x), torch.ones_like(x)


def decoded(codes: Tensor, recipe: Recipe, role: str) -> Tensor:
    if recipe.scaling == "nvfp4":
        return quantizers.meaning(codes, None)
    return quantizers.meaning(
        codes.contiguous(),
        torch.float8_e5m2 if recipe.fp8_format == "hybrid" and role == "grad_output" else torch.float8_e4m3fn,
    )


def exponents(codes: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes.int() - 127).float()


def of_group(amax: Tensor, g: int, sizes: list[int], recipe: Recipe, role: str, columnwise: bool) -> Tensor:
    """NVFP4's amax of a group, or of each of its rows or columns."""
    if not (recipe.row_scaled_activation and role == "input"):
        return amax[g].reshape(1, 1)
    return amax[g : g + 1] if columnwise else amax[sum(sizes[:g]) : sum(sizes[: g + 1]), None]


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """Each block's scale at each of its elements: blocks are as long as it takes."""
    if scale.dim() == 0:
        return scale.expand_as(like)
    tall, wide = (
        next((size for size in (1, 16, 32, 128) if -(-n // size) == m), 1)
        for n, m in zip(like.shape, scale.shape, strict=True)
    )
    return scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[: like.shape[0], : like.shape[1]]


# ---- from codes and scales to products


def scaled_first(left: Part, right: Part, recipe: Recipe) -> Tensor:
    return left.value @ right.value.T


def scaled_last(left: Part, right: Part, recipe: Recipe) -> Tensor:
    """Blocks begin where the contraction does."""
    terms = left.code.shape[1]
    size = BLOCK.get(recipe.scaling, max(terms, 1))
    total = torch.zeros(len(left.code), len(right.code))
    for k in range(0, terms, size):
        own = slice(k, k + size)
        total = total + left.code[:, own] @ right.code[:, own].T * (left.scale[:, k, None] * right.scale[None, :, k])
    return total * (left.whole * right.whole.T)


def split(left: Part, right: Part, recipe: Recipe) -> Tensor:
    parts = list(zip(left.value.tensor_split(4, 1), right.value.tensor_split(4, 1), strict=True))
    return sum((a @ b.T for a, b in reversed(parts)), torch.zeros(len(left.code), len(right.code)))


def cut_off(total: Tensor, part: Tensor) -> Tensor:
    """total + part, cut off 14 bits below the larger of the two."""
    quantum = torch.exp2(torch.frexp(torch.maximum(total.abs(), part.abs())).exponent.double() - 14)
    cut = torch.trunc((total.double() + part.double()) / quantum) * quantum
    return torch.where(total.isfinite() & part.isfinite(), cut, (total + part).double()).float()


def of_fourteen_bits(left: Part, right: Part, recipe: Recipe, promoted: int = PROMOTED) -> Tensor:
    """FP8 products in sums of 14 bits; MXFP8 and NVFP4 have no such unit."""
    if recipe.scaling in ("mxfp8", "nvfp4"):
        return scaled_first(left, right, recipe)
    a, b = left.code * left.scale, right.code * right.scale
    total = torch.zeros(len(a), len(b))
    for k in range(0, a.shape[1], promoted):
        inside = torch.zeros_like(total)
        for j in range(k, min(k + promoted, a.shape[1]), DEPTH):
            own = slice(j, min(j + DEPTH, k + promoted))
            inside = cut_off(inside, a[:, own] @ b[:, own].T)
        total = total + inside
    return total * (left.whole * right.whole.T)


def never_promoted(left: Part, right: Part, recipe: Recipe) -> Tensor:
    return of_fourteen_bits(left, right, recipe, promoted=1 << 30)


# ---- the functions


@dataclass(frozen=True)
class Way:
    """What one of them does in its own way."""

    parts: Callable[[Source], list[Part]] = by_codes
    product: Callable[[Part, Part, Recipe], Tensor] = scaled_first
    overridden: Callable[[Part, Part, Recipe], Tensor] = scaled_first  # of what is no code
    declared: tuple[tuple[str, Any], ...] = ()
    bias: Callable[[Tensor], Tensor] = lambda bias: bias


class Layer(torch.autograd.Function):
    """The three products, of one way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor,
        ways: SimpleNamespace,
        how: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, counts)
        ctx.ways, ctx.how = ways, how
        return ways.forward(rows, weight, bias, counts, how)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        rows, weight, bias, counts = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_rows = ctx.ways.grouped_dgrad(d_out, weight, counts, **ctx.how) if wanted[0] else None
        d_weight = ctx.ways.grouped_wgrad(d_out, rows, counts, **ctx.how) if wanted[1] else None
        d_bias = (
            torch.stack([own.double().sum(0) for own in segments(d_out, counts)]).to(bias.dtype) if wanted[2] else None
        )
        return d_rows, d_weight, d_bias, None, None, None


def segments(x: Tensor, counts: Tensor) -> list[Tensor]:
    check_count_values(counts.tolist(), len(x))
    return list(x[: int(counts.sum())].split(counts.tolist()))


def make(way: Way) -> SimpleNamespace:
    """The namespace; high precision is the reference's."""

    def products(left: tuple, right: tuple, gemm: str, how: dict[str, Any]) -> list[Tensor]:
        """Of each expert's part of one factor and of the other, which are (tensor, splits, role)."""
        recipe = how["recipe"]
        parts = []
        for x, splits, role in (left, right):
            state = None if how["state"] is None else getattr(how["state"], role)
            noise = how["noise"] if role == "grad_output" else None
            parts.append(way.parts(Source(x, splits, role, gemm, recipe, state, noise)))
        product = way.product if recipe.backward_override is None or gemm == "fprop" else way.overridden
        return [product(a, b, recipe) for a, b in zip(*parts, strict=True)]

    def weights(weight: Tensor) -> tuple[Tensor, Tensor, str]:
        return weight.reshape(-1, weight.shape[2]), torch.full((len(weight),), weight.shape[1]), "weight"

    def below(parts: list[Tensor], like: Tensor) -> Tensor:
        out = torch.cat(parts).to(like.dtype)
        return torch.cat([out, out.new_zeros(len(like) - len(out), out.shape[1])])

    def forward(rows, weight, bias, counts, how):
        parts = products((rows, counts, "input"), weights(weight), "fprop", how)
        return below(
            parts if bias is None else [part + way.bias(bias[e]).float() for e, part in enumerate(parts)], rows
        )

    def settings(recipe, state, noise, accumulator):
        check_precision(recipe, state, noise, accumulator)
        return {"recipe": recipe, "state": state, "noise": noise, "accumulator": accumulator}

    def grouped_linear(rows, weight, counts, *, bias=None, recipe=None, state=None, noise=None, accumulator="float32"):
        check_grouped_linear(rows, weight, counts, bias)
        how = settings(recipe, state, noise, accumulator)
        if recipe is None:
            return moe_ref.grouped_linear(rows, weight, counts, bias=bias, accumulator=accumulator)
        return Layer.apply(rows, weight, bias, counts, ways, how)

    def grouped_dgrad(d_out, weight, counts, *, recipe=None, state=None, noise=None, accumulator="float32"):
        check_grouped_dgrad(d_out, weight, counts)
        how = settings(recipe, state, noise, accumulator)
        if recipe is None:
            return moe_ref.grouped_dgrad(d_out, weight, counts, accumulator=accumulator)
        return below(products((d_out, counts, "grad_output"), weights(weight), "dgrad", how), d_out)

    def grouped_wgrad(
        d_out, rows, counts, *, accumulate_into=None, recipe=None, state=None, noise=None, accumulator="float32"
    ):
        check_grouped_wgrad(d_out, rows, counts, accumulate_into)
        how = settings(recipe, state, noise, accumulator)
        if recipe is None:
            return moe_ref.grouped_wgrad(d_out, rows, counts, accumulate_into=accumulate_into, accumulator=accumulator)
        whole = torch.stack(products((d_out, counts, "grad_output"), (rows, counts, "input"), "wgrad", how))
        return whole.to(rows.dtype) if accumulate_into is None else (whole + accumulate_into).to(accumulate_into.dtype)

    def supports(function, **arguments):
        wide = (
            arguments.get("accumulator") == "float64"
            or arguments.get("rows", arguments.get("d_out")).dtype == torch.float64
        )
        return "sums are taken in float32" if wide else None

    def declares(function):
        return dict(way.declared)

    ways = SimpleNamespace(
        forward=forward,
        grouped_linear=grouped_linear,
        grouped_dgrad=grouped_dgrad,
        grouped_wgrad=grouped_wgrad,
        supports=supports,
        declares=declares,
    )
    return ways


def by_reciprocals(source: Source) -> list[Part]:
    return by_codes(source, quantizers.Multiplies)


ScaledFirst = make(Way())
ScaledLast = make(Way(product=scaled_last))
Split = make(Way(product=split, overridden=split))
FourteenBits = make(Way(product=of_fourteen_bits, declared=(("accumulator", "hopper_fp8"),)))
Reciprocal = make(Way(parts=by_reciprocals, declared=(("scale_arithmetic", "reciprocal"),)))
