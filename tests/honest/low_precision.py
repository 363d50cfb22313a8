"""Honest low-precision grouped GEMMs that differ in everything the contract leaves open.

ScaledFirst    value = code · scale in float32; one matmul
ScaledLast     matmul of codes per block, each partial sum scaled; per-tensor scales last
Split          values, in four parts along K, the last part first
FourteenBits   14-bit truncated sums of 32 products, promoted every 128 (declared: hopper_fp8)
Reciprocal     scales other than powers of two by reciprocals (declared)

Each stage can be replaced by a wrong one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_ref
from moe_ref import config
from moe_ref.config.quantization import BLOCK
from moe_ref.quantization.recipes import operands, scheme
from tests.honest import quantizers

DEPTH, PROMOTED = 32, 128  # products per instruction, products per promotion


class Part(NamedTuple):
    """One expert's operand, [rows, K], K last."""

    code: Tensor  # float32, decoded
    scale: Tensor  # float32, per element
    whole: Tensor  # float32 [rows,1], per row

    @property
    def value(self) -> Tensor:
        return self.code * (self.scale * self.whole)


class Source(NamedTuple):
    """A GEMM operand before quantisation."""

    x: Tensor  # [R,C]
    splits: Tensor
    role: str
    gemm: str
    recipe: config.Recipe
    state: config.QuantizerState | None
    noise: Tensor | None

    @property
    def operand(self) -> config.Operand:
        return {operand.role: operand for operand in operands(self.gemm, self.recipe)}[self.role]

    @property
    def columnwise(self) -> bool:
        return self.operand.columnwise

    @property
    def turned(self) -> bool:
        """Whether the rows are the contraction."""
        return self.gemm == "wgrad" or (self.role == "weight" and self.gemm == "dgrad")


# ---- from tensors to codes and scales


def by_codes(source: Source, quantizer: Any = quantizers.Divides, columnwise: bool | None = None) -> list[Part]:
    """Codes and scales from a quantiser's readers; dequantised values if the operand is kept so."""
    if source.operand.kept == "stored":
        return as_stored(source)
    recipe = source.recipe
    read = source.columnwise if columnwise is None else columnwise
    if recipe.four_over_six not in (None, "none"):
        quantizer = moe_ref
    form: dict[str, Any] = {"role": source.role, "splits": source.splits, "rowwise": not read, "columnwise": read}
    out = quantizer.quantize(source.x.detach(), recipe, state=source.state, noise=source.noise, **form).quantized
    code, scale, amax = (getattr(quantizer, name)(out, columnwise=read) for name in ("codes", "scales", "amax"))
    sizes = source.splits.tolist()
    codes = decoded(code[: sum(sizes)], recipe, source.role).split(sizes)
    square = bool(recipe.two_dimensional_weights) and source.role == "weight"
    rows = [-(-size // BLOCK["block"]) if recipe.scaling == "block" and (square or read) else size for size in sizes]
    if recipe.scaling in ("mxfp8", "nvfp4") and read:
        rows = [size // BLOCK[recipe.scaling] for size in sizes]
    scales = scale.split(rows) if scale.dim() > 1 else list(scale)
    operands_of_groups = []
    for g, (group_codes, group_scale) in enumerate(zip(codes, scales, strict=True)):
        row_scale = torch.ones(1, 1)
        if recipe.scaling == "nvfp4":
            row_scale = of_group(amax, g, sizes, recipe, source.role, read) * torch.tensor(
                1 / (6 * scheme(recipe, source.role).scale_max)
            )
        element = spread(
            exponents(group_scale)
            if recipe.scaling == "mxfp8"
            else group_scale.view(torch.float8_e4m3fn).float()
            if recipe.scaling == "nvfp4"
            else group_scale,
            group_codes,
        )
        operand = group_codes, element, row_scale.expand_as(group_codes)
        if source.operand.kept == "dequantized":
            operand = as_numbers((group_codes * (element * row_scale)).to(source.x.dtype).float())
        operands_of_groups.append(Part(*(x.T if source.turned else x for x in operand)))
    return [
        Part(code, scale, row_scale[:, :1] if row_scale.shape[1] else row_scale.new_ones(len(row_scale), 1))
        for code, scale, row_scale in operands_of_groups
    ]


def as_stored(source: Source) -> list[Part]:
    """The unquantised values, float32."""
    groups = source.x[: int(source.splits.sum())].float().split(source.splits.tolist())
    values = [x.T if source.turned else x for x in groups]
    return [Part(x, torch.ones_like(x), torch.ones(len(x), 1)) for x in values]


def as_numbers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values as codes, with scales of 1."""
    return x, torch.ones_like(x), torch.ones_like(x)


def decoded(codes: Tensor, recipe: config.Recipe, role: str) -> Tensor:
    if recipe.scaling == "nvfp4":
        return quantizers.meaning(codes, None)
    return quantizers.meaning(
        codes.contiguous(),
        torch.float8_e5m2 if recipe.fp8_format == "hybrid" and role == "grad_output" else torch.float8_e4m3fn,
    )


def exponents(codes: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes.int() - 127).float()


def of_group(amax: Tensor, g: int, sizes: list[int], recipe: config.Recipe, role: str, columnwise: bool) -> Tensor:
    """NVFP4's amax per group, or per row or column of the group."""
    if not (recipe.row_scaled_activation and role == "input"):
        return amax[g].reshape(1, 1)
    return amax[g : g + 1] if columnwise else amax[sum(sizes[:g]) : sum(sizes[: g + 1]), None]


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """Block scales expanded to elements; the block sizes follow from the shapes."""
    if scale.dim() == 0:
        return scale.expand_as(like)
    block_rows, block_columns = (
        next((size for size in (1, 16, 32, 128) if -(-n // size) == m), 1)
        for n, m in zip(like.shape, scale.shape, strict=True)
    )
    return scale.repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)[: like.shape[0], : like.shape[1]]


# ---- from codes and scales to products


def scaled_first(lhs: Part, rhs: Part, recipe: config.Recipe) -> Tensor:
    return lhs.value @ rhs.value.T


def scaled_last(lhs: Part, rhs: Part, recipe: config.Recipe) -> Tensor:
    """Scales each block's partial sum; blocks start at k = 0."""
    terms = lhs.code.shape[1]
    size = BLOCK.get(recipe.scaling, max(terms, 1))
    total = torch.zeros(len(lhs.code), len(rhs.code))
    for k in range(0, terms, size):
        block = slice(k, k + size)
        partial = lhs.code[:, block] @ rhs.code[:, block].T
        total = total + partial * (lhs.scale[:, k, None] * rhs.scale[None, :, k])
    return total * (lhs.whole * rhs.whole.T)


def split(lhs: Part, rhs: Part, recipe: config.Recipe) -> Tensor:
    quarters = list(zip(lhs.value.tensor_split(4, 1), rhs.value.tensor_split(4, 1), strict=True))
    return sum((a @ b.T for a, b in reversed(quarters)), torch.zeros(len(lhs.code), len(rhs.code)))


def cut_off(total: Tensor, partial: Tensor) -> Tensor:
    """total + partial, truncated to 14 bits below the larger operand."""
    quantum = torch.exp2(torch.frexp(torch.maximum(total.abs(), partial.abs())).exponent.double() - 14)
    cut = torch.trunc((total.double() + partial.double()) / quantum) * quantum
    return torch.where(total.isfinite() & partial.isfinite(), cut, (total + partial).double()).float()


def of_fourteen_bits(lhs: Part, rhs: Part, recipe: config.Recipe, promoted: int = PROMOTED) -> Tensor:
    """FP8 GEMM in 14-bit sums; MXFP8 and NVFP4 as ScaledFirst."""
    if recipe.scaling in ("mxfp8", "nvfp4"):
        return scaled_first(lhs, rhs, recipe)
    a, b = lhs.code * lhs.scale, rhs.code * rhs.scale
    total = torch.zeros(len(a), len(b))
    for k in range(0, a.shape[1], promoted):
        block_sum = torch.zeros_like(total)
        for j in range(k, min(k + promoted, a.shape[1]), DEPTH):
            step = slice(j, min(j + DEPTH, k + promoted))
            block_sum = cut_off(block_sum, a[:, step] @ b[:, step].T)
        total = total + block_sum
    return total * (lhs.whole * rhs.whole.T)


def never_promoted(lhs: Part, rhs: Part, recipe: config.Recipe) -> Tensor:
    return of_fourteen_bits(lhs, rhs, recipe, promoted=1 << 30)


# ---- the functions


@dataclass(frozen=True)
class Way:
    """The options of a variant."""

    parts: Callable[[Source], list[Part]] = by_codes
    product: Callable[[Part, Part, config.Recipe], Tensor] = scaled_first
    overridden: Callable[[Part, Part, config.Recipe], Tensor] = scaled_first  # for unquantised operands
    declared: tuple[tuple[str, Any], ...] = ()
    bias: Callable[[Tensor], Tensor] = lambda bias: bias


class Layer(torch.autograd.Function):
    """The three GEMMs of a variant."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, variant: Way,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weight, bias, counts)
        ctx.way, ctx.options = variant, options
        return fprop(variant, rows, weight, bias, counts, options)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        rows, weight, bias, counts = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_rows = grouped_dgrad(ctx.way, d_out, weight, counts, **ctx.options) if wanted[0] else None
        d_weight = grouped_wgrad(ctx.way, d_out, rows, counts, **ctx.options) if wanted[1] else None
        sums = [segment.double().sum(0) for segment in segments(d_out, counts)]
        d_bias = torch.stack(sums).to(bias.dtype) if wanted[2] else None
        return d_rows, d_weight, d_bias, None, None, None


def segments(x: Tensor, counts: Tensor) -> list[Tensor]:
    config.check_count_values(counts.tolist(), len(x))
    return list(x[: int(counts.sum())].split(counts.tolist()))


def products(variant: Way, lhs: tuple, rhs: tuple, gemm: str, options: dict[str, Any]) -> list[Tensor]:
    """Each expert's GEMM of two operands (tensor, splits, role)."""
    recipe = options["recipe"]
    operands_of_experts = []
    for x, splits, role in (lhs, rhs):
        state = None if options["state"] is None else getattr(options["state"], role)
        noise = options["noise"] if role == "grad_output" else None
        operands_of_experts.append(variant.parts(Source(x, splits, role, gemm, recipe, state, noise)))
    product = variant.product if recipe.backward_override is None or gemm == "fprop" else variant.overridden
    return [product(a, b, recipe) for a, b in zip(*operands_of_experts, strict=True)]


def weights(weight: Tensor) -> tuple[Tensor, Tensor, str]:
    return weight.reshape(-1, weight.shape[2]), torch.full((len(weight),), weight.shape[1]), "weight"


def below(products_of_experts: list[Tensor], like: Tensor) -> Tensor:
    out = torch.cat(products_of_experts).to(like.dtype)
    return torch.cat([out, out.new_zeros(len(like) - len(out), out.shape[1])])


def fprop(variant: Way, rows, weight, bias, counts, options):
    outs = products(variant, (rows, counts, "input"), weights(weight), "fprop", options)
    outs = outs if bias is None else [out + variant.bias(bias[e]).float() for e, out in enumerate(outs)]
    return below(outs, rows)


def settings(recipe, state, noise, accumulator):
    config.check_precision(recipe, state, noise, accumulator)
    return {"recipe": recipe, "state": state, "noise": noise, "accumulator": accumulator}


def grouped_linear(
    variant: Way, rows, weight, counts, *, bias=None, recipe=None, state=None, noise=None, accumulator="float32"
):
    config.check_grouped_linear(rows, weight, counts, bias)
    options = settings(recipe, state, noise, accumulator)
    if recipe is None:
        return moe_ref.grouped_linear(rows, weight, counts, bias=bias, accumulator=accumulator)
    return Layer.apply(rows, weight, bias, counts, variant, options)


def grouped_dgrad(variant: Way, d_out, weight, counts, *, recipe=None, state=None, noise=None, accumulator="float32"):
    config.check_grouped_dgrad(d_out, weight, counts)
    options = settings(recipe, state, noise, accumulator)
    if recipe is None:
        return moe_ref.grouped_dgrad(d_out, weight, counts, accumulator=accumulator)
    return below(products(variant, (d_out, counts, "grad_output"), weights(weight), "dgrad", options), d_out)


def grouped_wgrad(
    variant: Way, d_out, rows, counts, *, accumulate_into=None, recipe=None, state=None, noise=None,
    accumulator="float32",
):  # fmt: skip
    config.check_grouped_wgrad(d_out, rows, counts, accumulate_into)
    options = settings(recipe, state, noise, accumulator)
    if recipe is None:
        return moe_ref.grouped_wgrad(d_out, rows, counts, accumulate_into=accumulate_into, accumulator=accumulator)
    total = torch.stack(products(variant, (d_out, counts, "grad_output"), (rows, counts, "input"), "wgrad", options))
    return total.to(rows.dtype) if accumulate_into is None else (total + accumulate_into).to(accumulate_into.dtype)


def supports(function, **arguments):
    dtype = arguments.get("rows", arguments.get("d_out")).dtype
    return "sums are float32" if arguments.get("accumulator") == "float64" or dtype == torch.float64 else None


def declares(variant: Way, function):
    return dict(variant.declared)


def make(variant: Way) -> SimpleNamespace:
    """The namespace of a variant; high precision is the reference's."""
    functions = (grouped_linear, grouped_dgrad, grouped_wgrad, declares)
    return SimpleNamespace(**{f.__name__: MethodType(f, variant) for f in functions}, supports=supports)


def by_reciprocals(source: Source) -> list[Part]:
    return by_codes(source, quantizers.Multiplies)


ScaledFirst = make(Way())
ScaledLast = make(Way(product=scaled_last))
Split = make(Way(product=split, overridden=split))
FourteenBits = make(Way(product=of_fourteen_bits, declared=(("accumulator", "hopper_fp8"),)))
Reciprocal = make(Way(parts=by_reciprocals, declared=(("scale_arithmetic", "reciprocal"),)))
