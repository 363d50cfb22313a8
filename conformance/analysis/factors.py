"""GEMM operands as intervals, in high precision or dequantised from a recipe's codes.

Exact values have the reference's codes; with `scale_arithmetic` "reciprocal", codes near a midpoint
and NVFP4's block scales may be the adjacent ones. Results of earlier stages are intervals, and so
are their scales and codes (see `quantizer`).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.quantizer import Decoded, Quantizer, transformed
from conformance.analysis.running import Running
from conformance.judge.bound import FLOAT32, MATRIX_UNIT, ROUNDOFF, Accumulator
from conformance.judge.ranges import Interval
from moe_ref.config import Operand, Recipe
from moe_ref.quantization.quantize import quantize, turned
from moe_ref.quantization.recipes import Scaled, Scheme, operands, scheme, spread, values
from moe_ref.rounding import round_to

# float32 roundings of a product by scales: three per value of NVFP4, or in one factor for both
# operands, and the multiplication by it
SCALED = 8
SCALED_BY_RECIPROCALS = 16  # and at most five roundings per scale


@dataclass(frozen=True)
class Factor:
    """One expert's part of an operand."""

    values: Interval  # float64, in logical orientation
    aligned: Tensor | None = None  # float64: magnitudes for the alignment of sums; None: |values|

    @property
    def transposed(self) -> "Factor":
        return Factor(self.values.each(lambda x: x.T), None if self.aligned is None else self.aligned.T)


@dataclass(frozen=True)
class ProductPrecision:
    """The quantisation of a GEMM's operands, and its accumulator, by call and declarations."""

    accumulator: Accumulator = FLOAT32
    reciprocal: bool = False
    # the reference's: accumulator, recipe, state, noise
    settings: dict[str, Any] = field(default_factory=dict)
    scaled: bool = True  # with a recipe: whether the operands are codes and scales
    narrowed: int = 0  # factors that are rounded to the accumulator first

    @property
    def recipe(self) -> Recipe | None:
        return self.settings.get("recipe")

    @property
    def sums(self) -> Accumulator:
        """The accumulator of sums other than products of codes."""
        return MATRIX_UNIT if self.accumulator.block else self.accumulator

    @property
    def roundings(self) -> int:
        """The float32 roundings of a product by scales, or of its factors."""
        if self.recipe is None or not self.scaled:
            return self.narrowed
        return SCALED_BY_RECIPROCALS if self.reciprocal else SCALED

    def of(self, gemm: str) -> "ProductPrecision":
        """The precision of one GEMM: a backward_override makes the backward high-precision."""
        scaled = self.recipe is None or gemm == "fprop" or self.recipe.backward_override is None
        return self if scaled else replace(self, accumulator=self.sums, scaled=False)

    def rows(self, x_PN: Tensor, counts: Tensor, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows of an exact operand."""
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
        quantizer_of_role = self._quantizer(form.scheme, x_PN.dtype)
        factors = []
        for group, x, group_noise in zip(
            form.groups, sources, self._noises(quantizer_of_role.scheme, counts, operand), strict=True
        ):
            quantizer = replace(quantizer_of_role, noise=group_noise)
            factors.append(self._factor(_decoded(quantizer, group, turned(x, form.columnwise)), quantizer, operand))
        return factors

    def inexact_rows(self, x: Running, counts: Tensor, role: str, gemm: str, dtype: torch.dtype) -> list[Factor]:
        """Each expert's rows of an operand with error bounds, stored in `dtype`."""
        operand, interval = self._operand(role, gemm), Interval.around(x.value, x.error)
        starts = (counts.cumsum(0) - counts).tolist()
        expert_intervals = [
            interval.each(lambda x, rows=slice(start, start + count): x[rows])  # type: ignore[misc]
            for start, count in zip(starts, counts.tolist(), strict=True)
        ]
        if operand is None:
            return [Factor(expert_interval) for expert_interval in expert_intervals]
        columnwise = operand.columnwise
        quantizer_of_role = self._quantizer(scheme(self.settings["recipe"], role, columnwise=columnwise), dtype)
        state, noises = self.settings.get("state"), self._noises(quantizer_of_role.scheme, counts, operand)
        factors = []
        for g, expert_interval in enumerate(expert_intervals):
            expert_interval = expert_interval.each(lambda y: turned(y, columnwise))
            delayed_scale = None if state is None else getattr(state, role).scale[g]
            quantizer = replace(quantizer_of_role, given=delayed_scale, noise=noises[g])
            decoded = quantizer.values(
                transformed(expert_interval) if quantizer_of_role.scheme.hadamard else expert_interval
            )
            factors.append(self._factor(decoded, quantizer, operand))
        return factors

    def weights(self, weight_LMN: Tensor, gemm: str) -> list[Factor]:
        """Each expert's weight."""
        experts, width, hidden = weight_LMN.shape
        return self.rows(weight_LMN.reshape(experts * width, hidden), torch.full((experts,), width), "weight", gemm)

    def _operand(self, role: str, gemm: str) -> Operand | None:
        """The quantised form that the GEMM reads; None: the tensor itself."""
        if self.recipe is None:
            return None
        operand = next(operand for operand in operands(gemm, self.recipe) if operand.role == role)
        return None if operand.kept == "stored" else operand

    def _noises(self, scheme: Scheme, counts: Tensor, operand: Operand) -> list[Tensor | None]:
        """Each expert's given noise, in the form's orientation; None: nearest rounding."""
        noise = self.settings.get("noise")
        if noise is None or not scheme.stochastic:
            return [None for _ in counts]
        noise_of_experts = noise[int(operand.columnwise)][: int(counts.sum())].split(counts.tolist())
        return [turned(expert_noise, operand.columnwise) for expert_noise in noise_of_experts]

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
    """The dequantised values of an exact source, which the reference quantises to `group`."""
    x, scales = Interval.exact(source.float().double()), quantizer.of_group(group)
    if not quantizer.reciprocal:
        decoding_scale = spread(scales.back[0], scales.block, source).double()
        decoded = Decoded(Interval.exact(values(group, quantizer.scheme).double()), decoding_scale)
    else:
        decoded = quantizer.values(x, None if quantizer.two_levels else [scales])
        decoded = replace(decoded, values=decoded.values.mapped(lambda end: end.float().double()))
    if not quantizer.two_levels:
        return decoded
    return replace(  # an infinity makes codes and scales unknown
        decoded, values=decoded.values.mapped(lambda end: torch.where(group.amax.isinf(), torch.inf, end))
    )


def may_be_others(scheme: Scheme) -> bool:
    """Whether a quantiser that multiplies by reciprocals may give a neighbouring code.

    It cannot where scales are powers of two, nor with 4over6.
    """
    recipe = scheme.recipe
    return not (recipe.power_of_two_scales or recipe.scaling == "mxfp8" or scheme.four_over_six)


def dequantised(values: Interval, dtype: torch.dtype, reciprocal: bool) -> Interval:
    """Values in the tensor's dtype: a monotonic rounding, after the rounding to float32."""
    off = SCALED_BY_RECIPROCALS * ROUNDOFF[torch.float32] if reciprocal else 0.0

    def rounded(end: Tensor, side: int) -> Tensor:
        moved = end + side * torch.where(end.isfinite(), off * end.abs(), 0.0)
        return round_to(moved.float(), dtype).double()

    return values.mapped(lambda low: rounded(low, -1), lambda high: rounded(high, 1))


def aligned_size(values: Interval, scale: Tensor, scheme: Scheme) -> Tensor:
    """The magnitudes by which a sum is aligned: |value|, but for a subnormal code the value of the
    smallest normal code. A matrix unit that truncates a sum aligns it by the largest exponent of
    its terms, and a subnormal code has the exponent of the smallest normal one. Measured on an
    H200: the product of a subnormal code lost three more bits.
    """
    smallest, center = scale * 2.0 ** (1 - scheme.format.bias), values.center
    return torch.where((center == 0) & (values.margin == 0), 0.0, torch.maximum(center.abs(), smallest))
