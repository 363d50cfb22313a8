"""Operands of a GEMM as intervals: the numbers themselves, or what the codes of a recipe stand for.

Of numbers that are known exactly the codes are the reference's. Where `scale_arithmetic` "reciprocal" is declared, codes near a midpoint
and NVFP4's scales of blocks may have been decided the other way; where the numbers are results of earlier stages, each code and scale may
be any in its interval (see `quantizer`).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.quantizer import Decoded, Quantizer, transformed
from conformance.analysis.running import Running
from conformance.judge.bound import FLOAT32, ROUNDOFF, Accumulator
from conformance.judge.ranges import Interval
from moe_ref.config import Operand, Recipe
from moe_ref.quantization.quantize import quantize, turned
from moe_ref.quantization.recipes import Scaled, Scheme, operands, scheme, spread, values
from moe_ref.rounding import round_to

# roundings of float32 that scales bring to a product: three in each value of NVFP4's, or in one factor for both, and the product with it
SCALED = 8
SCALED_BY_RECIPROCALS = 16  # and each scale up to five roundings off


@dataclass(frozen=True)
class Factor:
    """One expert's part of an operand."""

    values: Interval  # float64, in logical orientation
    aligned: Tensor | None = None  # float64: the magnitude that a matrix unit aligns a number by; None: its own

    @property
    def transposed(self) -> "Factor":
        return Factor(self.values.each(lambda x: x.T), None if self.aligned is None else self.aligned.T)


@dataclass(frozen=True)
class ProductPrecision:
    """What the operands of a product become before it is taken, and what it is added in: as the call asks, and as is declared."""

    accumulator: Accumulator = FLOAT32
    reciprocal: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of the reference: accumulator, recipe, state, noise
    scaled: bool = True  # with a recipe: whether the product is of codes and scales

    @property
    def recipe(self) -> Recipe | None:
        return self.settings.get("recipe")

    @property
    def sums(self) -> Accumulator:
        """What is added in that is no product of codes."""
        return FLOAT32 if self.accumulator.block else self.accumulator

    @property
    def roundings(self) -> int:
        """Of float32, that scales bring to a product."""
        if self.recipe is None or not self.scaled:
            return 0
        return SCALED_BY_RECIPROCALS if self.reciprocal else SCALED

    def of(self, gemm: str) -> "ProductPrecision":
        """The same of one product: with a backward_override the backward's have high precision."""
        scaled = self.recipe is None or gemm == "fprop" or self.recipe.backward_override is None
        return self if scaled else replace(self, accumulator=self.sums, scaled=False)

    def rows(self, x_PN: Tensor, counts: Tensor, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows of an operand that is known exactly."""
        operand = self._operand(role, gemm)
        if operand is None:
            return [Factor(Interval.exact(x)) for x in x_PN[: int(counts.sum())].double().split(counts.tolist())]
        state, noise = self.settings.get("state"), self.settings.get("noise")
        quantization = quantize(
            x_PN.detach(),
            self.settings["recipe"],
            role=role,
            splits=counts,
            rowwise=not operand.columnwise,
            columnwise=operand.columnwise,
            state=None if state is None else getattr(state, role),
            noise=noise if role == "grad_output" else None,
        )
        form = quantization.quantized.form(operand.columnwise)
        sources = form.source_MN[: int(counts.sum())].detach().split(counts.tolist())
        quantizer = self._quantizer(form.scheme, x_PN.dtype)
        return [
            self._factor(_decoded(quantizer, group, turned(x, form.columnwise)), quantizer, operand)
            for group, x in zip(form.groups, sources, strict=True)
        ]

    def inexact_rows(self, x: Running, counts: Tensor, role: str, gemm: str, dtype: torch.dtype) -> list[Factor]:
        """Each expert's rows of an operand that is known in part, and stored in `dtype` wherever it is rounded on its way."""
        operand, whole = self._operand(role, gemm), Interval.around(x.value, x.error)
        starts = (counts.cumsum(0) - counts).tolist()
        parts = [
            whole.each(lambda x, rows=slice(start, start + count): x[rows])  # type: ignore[misc]
            for start, count in zip(starts, counts.tolist(), strict=True)
        ]
        if operand is None:
            return [Factor(part) for part in parts]
        columnwise = operand.columnwise
        one = self._quantizer(scheme(self.settings["recipe"], role, columnwise=columnwise), dtype)
        state, noise = self.settings.get("state"), self.settings.get("noise")
        noises = noise[int(columnwise)].split(counts.tolist()) if one.scheme.stochastic and noise is not None else None
        factors = []
        for g, part in enumerate(parts):
            part = part.each(lambda y: turned(y, columnwise))
            quantizer = replace(
                one,
                given=None if state is None else getattr(state, role).scale[g],
                noise=None if noises is None else turned(noises[g], columnwise),
            )
            decoded = quantizer.values(transformed(part) if one.scheme.hadamard else part)
            factors.append(self._factor(decoded, quantizer, operand))
        return factors

    def weights(self, weight_LMN: Tensor, gemm: str) -> list[Factor]:
        """Each expert's weight."""
        experts, width, hidden = weight_LMN.shape
        return self.rows(weight_LMN.reshape(experts * width, hidden), torch.full((experts,), width), "weight", gemm)

    def _operand(self, role: str, gemm: str) -> Operand | None:
        """The form of a tensor that a product reads; None where it reads the tensor itself."""
        if self.recipe is None:
            return None
        operand = next(operand for operand in operands(gemm, self.recipe) if operand.role == role)
        return None if operand.kept == "stored" else operand

    def _quantizer(self, scheme: Scheme, dtype: torch.dtype) -> Quantizer:
        return Quantizer(scheme, dtype, reciprocal=self.reciprocal and may_be_others(scheme))

    def _factor(self, decoded: Decoded, quantizer: Quantizer, operand: Operand) -> Factor:
        values, aligned = decoded.values, None
        if operand.kept == "dequantized":
            values = dequantised(values, quantizer.dtype, self.reciprocal)
        if self.accumulator.block:
            aligned = turned(aligned_size(values, decoded.scale, quantizer.scheme), operand.columnwise)
        return Factor(values.each(lambda x: turned(x, operand.columnwise)), aligned)


def _decoded(quantizer: Quantizer, group: Scaled, source: Tensor) -> Decoded:
    """What the codes of a source that is known exactly stand for, of which the reference made `group`."""
    x, scales = Interval.exact(source.float().double()), quantizer.of_group(group)
    if not quantizer.reciprocal:
        back = spread(scales.back[0], scales.block, source).double()
        decoded = Decoded(Interval.exact(values(group, quantizer.scheme).double()), back)
    else:
        decoded = quantizer.values(x, None if quantizer.two_levels else [scales])
        decoded = replace(decoded, values=decoded.values.mapped(lambda end: end.float().double()))
    if not quantizer.two_levels:
        return decoded
    return replace(  # over an infinity codes and scales say nothing
        decoded, values=decoded.values.mapped(lambda end: torch.where(group.amax.isinf(), torch.inf, end))
    )


def may_be_others(scheme: Scheme) -> bool:
    """Whether a product with a reciprocal may decide a code: no power of two does, nor a sum of errors, nor noise."""
    recipe = scheme.recipe
    return not (recipe.power_of_two_scales or recipe.scaling == "mxfp8" or scheme.four_over_six or scheme.stochastic)


def dequantised(values: Interval, dtype: torch.dtype, reciprocal: bool) -> Interval:
    """What codes come back as in the dtype of what was quantised: a monotonic rounding, after that of `values` to float32."""
    off = SCALED_BY_RECIPROCALS * ROUNDOFF[torch.float32] if reciprocal else 0.0

    def rounded(end: Tensor, side: int) -> Tensor:
        moved = end + side * torch.where(end.isfinite(), off * end.abs(), 0.0)
        return round_to(moved.float(), dtype).double()

    return values.mapped(lambda low: rounded(low, -1), lambda high: rounded(high, 1))


def aligned_size(values: Interval, scale: Tensor, scheme: Scheme) -> Tensor:
    """|value|, and for a code that is subnormal what the smallest normal one stands for.

    A matrix unit that keeps some leading bits of a sum counts them from the largest exponent of its terms, and the exponent of a subnormal
    code is that of the smallest normal one: measured on an H200, where a product of a subnormal lost three bits more.
    """
    smallest, center = scale * 2.0 ** (1 - scheme.format.bias), values.center
    return torch.where((center == 0) & (values.margin == 0), 0.0, torch.maximum(center.abs(), smallest))
