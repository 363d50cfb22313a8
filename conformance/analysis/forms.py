"""Expectations for one quantised form, each output given the earlier outputs.

    amax    the interval per block: a maximum does not round
    scales  the recipe's rule for the returned amax; if not returned, for any in its interval
    codes   between the codes of both ends, for the returned scales
    values  from the returned codes and scales

For an exact input each output has one right value: with `scale_arithmetic` "division", the default,
the reference's. With "reciprocal" and scales other than powers of two, a scale may be two roundings
off on either side, and a code near a midpoint the adjacent one (`judge.codes`); with given noise,
the code of any value within the roundings is right. 4over6 depends on a sum of errors, so it is
always exact.

If the implementation draws its noise itself, a code is one of two with known probabilities: some
rows are repeated and quantised several times, and each copy of an element is one draw.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.quantizer import Block, Quantizer, meanings, transformed
from conformance.judge import Bounded, Exact, Expectation, Given, Outputs
from conformance.judge.codes import RECIPROCAL, Codes
from conformance.judge.draws import Drawn
from conformance.judge.expectation import Resolved
from conformance.judge.ranges import Interval, Ranged
from conformance.judge.statistics import ALPHA, Stochastic
from moe_ref.quantization.formats import E4M3, Format, encode
from moe_ref.quantization.quantize import Form, Quantized, turned
from moe_ref.quantization.recipes import Scaled, each_row, over, values

ROUNDING = 2.0**-24  # of float32
LEAST = 2.0**-149  # the smallest float32


@dataclass(frozen=True)
class NotRead(Exact):
    """The expectation of an output that the reader does not return, because the implementation's
    reader lacks the keyword for it.
    """

    @property
    def optional(self) -> bool:
        return True


@dataclass(frozen=True)
class QuantizedForm:
    """The expectations for one form, given the implementation's earlier outputs."""

    form: Form  # the reference's
    names: dict[str, str]  # of the outputs
    right: dict[str, Any]  # the reference's results, by name
    reciprocal: bool  # whether scales may be off
    # [M,N], the rows of all groups before a transform; None: the reference's source, exactly
    input: Interval | None = None
    dtype: torch.dtype | None = None  # the input's rounding; None: the source's
    given_scale: Tensor | None = None  # [G], of delayed scaling, if the call has the state
    noise_MN: Tensor | None = None  # given rounding noise
    repeated: int = 0  # repeated rows, where the implementation draws its noise
    others: tuple[str, ...] = ()  # outputs with the codes of other calls

    checks: ClassVar[int] = 8  # draws of noise: two calls in each direction of two cases

    @property
    def loose(self) -> bool:
        recipe = self.form.scheme.recipe
        return self.reciprocal and not (
            recipe.power_of_two_scales or recipe.scaling == "mxfp8" or self.form.scheme.four_over_six
        )

    @property
    def two_levels(self) -> bool:
        return self.form.scheme.recipe.scaling == "nvfp4"

    def expectations(self) -> dict[str, Expectation]:
        expectations: dict[str, Expectation] = {
            self.names["amax"]: Exact(self._reference_output("amax"), "values") if self.input is None else self._amax(),
            self.names["scales"]: self._exact_scales() if self.input is None else self._given("scales", self._scales),
            self.names["codes"]: self._given("codes", self._exact_codes if self.input is None else self._codes),
            self.names["values"]: self._given("values", self._values),
        }
        if self.names["scales.gemm"] in self.right:
            expectations[self.names["scales.gemm"]] = self._given("scales.gemm", self._for_gemm)
        return expectations

    def _given(self, what: str, make: Callable[[Outputs], Resolved]) -> Given:
        return Given(self._reference_output(what), make)

    def _reference_output(self, what: str) -> Tensor:
        value: Tensor = self.right[self.names[what]].detach()
        return value

    # ---- the quantised input and the quantisers, by group, in the form's orientation

    def _groups(self, tensor: Tensor) -> list[Tensor]:
        sizes = [turned(group.codes, self.form.columnwise).shape[0] for group in self.form.groups]
        return [turned(rows, self.form.columnwise) for rows in tensor[: sum(sizes)].split(sizes)]

    def _inputs(self) -> list[Interval]:
        """The inputs after the transform, if any."""
        if self.input is None:
            return [Interval.exact(x) for x in self._groups(self.form.source_MN.detach().float())]
        bounds_of_groups = zip(
            *(self._groups(x) for x in (self.input.low, self.input.high, self.input.nan, self.input.unknown)),
            strict=True,
        )
        return [transformed(Interval(*x)) if self.form.scheme.hadamard else Interval(*x) for x in bounds_of_groups]

    def _quantizers(self) -> list[Quantizer]:
        groups = range(len(self.form.groups))
        dtype = self.dtype or self.form.source_MN.dtype
        noises = [None for _ in groups] if self.noise_MN is None else self._groups(self.noise_MN)
        scales = [None if self.given_scale is None else self.given_scale[g] for g in groups]
        pairs = zip(scales, noises, strict=True)
        return [Quantizer(self.form.scheme, dtype, delayed_scale, noise, self.loose) for delayed_scale, noise in pairs]

    def _in_logical_order(self, groups: list[Tensor]) -> Tensor:
        """[M,N] in logical orientation, 0 after the last group."""
        logical = torch.cat([turned(group, self.form.columnwise) for group in groups])
        return torch.cat([logical, logical.new_zeros(len(self.form.source_MN) - len(logical), logical.shape[1])])

    def _compact(self, groups: list[Tensor]) -> Tensor:
        """Amaxes or scales of blocks, as one tensor in logical orientation."""
        compact = torch.cat([turned(group, self.form.columnwise) for group in groups])
        return compact.flatten() if self._reference_output("scales").dim() == 1 else compact

    def returned(self, outputs: Outputs) -> list[Scaled]:
        """Each group as the implementation returned it."""
        tensors_by_name = {
            name: by_group(self.form, name, outputs[self.names[name]]) for name in ("codes", "scales", "amax")
        }
        turn = self.form.columnwise
        return [
            Scaled(turned(codes, turn).to(torch.uint8), turned(scale, turn), turned(amax, turn))
            for codes, scale, amax in zip(
                tensors_by_name["codes"], tensors_by_name["scales"], tensors_by_name["amax"], strict=True
            )
        ]

    # ---- amax

    def _amax(self) -> Bounded:
        """The amax of each block; for NVFP4, of each group or row."""
        quantizers, inputs = self._quantizers(), self._inputs()
        block = quantizers[0].whole if self.two_levels else self.form.scheme.block
        ends = [self._blocks(q, x, block) for q, x in zip(quantizers, inputs, strict=True)]
        least, most = (self._as_returned([pair[side] for pair in ends]) for side in (0, 1))
        unknown = most.isinf() & (least < most)
        interval = Interval(least, most, torch.zeros_like(unknown), unknown)
        center = torch.where(unknown, least.double(), interval.center)
        return Bounded(center, interval.margin, torch.float32, torch.float32)

    def _blocks(self, quantizer: Quantizer, x: Interval, block: Block) -> tuple[Tensor, Tensor]:
        """The amax of each block; MXFP8 and NVFP4 store it per row of a square block."""
        least, most = quantizer.amax(x, block)
        per_row = self.form.scheme.recipe.scaling in ("mxfp8", "nvfp4") and block == self.form.scheme.block
        return (each_row(least, self.form.scheme), each_row(most, self.form.scheme)) if per_row else (least, most)

    def _as_returned(self, amaxes: list[Tensor]) -> Tensor:
        """The amaxes of all groups in the layout of the output `amax`."""
        groups = tuple(group._replace(amax=amax) for group, amax in zip(self.form.groups, amaxes, strict=True))
        return moe_ref.amax(self._with(groups), columnwise=self.form.columnwise)

    def _with(self, groups: tuple[Scaled, ...]) -> Quantized:
        form = replace(self.form, groups=groups)
        return Quantized(None, form) if form.columnwise else Quantized(form, None)

    # ---- scales

    def _exact_scales(self) -> Resolved:
        """The scales of an exact amax."""
        scales = self._reference_output("scales")
        if not self.loose:
            return Exact(scales)
        if not self.two_levels:
            return nearly(scales, 5)  # 1/(FMAX/a), or FMAX · (1/a) and one more reciprocal
        quantized_groups = zip(self._quantizers(), self._inputs(), self.form.groups, strict=True)
        wanted = [
            q.level(self._blocks(q, x, q.scheme.block)[1], q.encoding(group.amax)) for q, x, group in quantized_groups
        ]
        scaled = torch.cat([turned(group_scales, self.form.columnwise) for group_scales in wanted]).clamp(max=E4M3.max)
        return Codes(scales, scaled=scaled, table=meanings(E4M3), window=RECIPROCAL)

    def _scales(self, outputs: Outputs) -> Resolved:
        """The scales of the returned amax."""
        scales_of_reference = self._reference_output("scales")
        if self.given_scale is not None:
            return nearly(scales_of_reference, 2) if self.loose else Exact(scales_of_reference)
        amaxes = [
            turned(group_amax, self.form.columnwise)
            for group_amax in by_group(self.form, "amax", outputs[self.names["amax"]])
        ]
        quantizers = self._quantizers()
        if self.two_levels:
            scale_intervals = [
                q.levels(self._blocks(q, x, q.scheme.block), (encoding := q.encoding(amax), encoding))
                for q, x, amax in zip(quantizers, self._inputs(), amaxes, strict=True)
            ]
            return _ranged(scale_intervals, self._compact, E4M3)
        mx = self.form.scheme.recipe.scaling == "mxfp8"
        scales = [
            q.exponent(amax) if mx else over(1.0, q.fitting(amax)) for q, amax in zip(quantizers, amaxes, strict=True)
        ]
        expected_scales = self._compact(scales)
        return nearly(expected_scales, 5) if self.loose else Exact(expected_scales)

    # ---- codes

    def _exact_codes(self, outputs: Outputs) -> Resolved:
        """The codes nearest to the input over the returned scales."""
        if not self.repeated and not self.loose:
            return Exact(self._any_nan(self._reference_output("codes"), outputs), "integers")
        if self.noise_MN is not None:
            return self._codes(outputs)
        quantized_groups = zip(self._quantizers(), self._inputs(), self.returned(outputs), strict=True)
        scaled = self._in_logical_order([q.product(x.low, q.of_group(group)) for q, x, group in quantized_groups])
        if self.repeated:
            return self._stochastic_codes(scaled, outputs)
        format = self.form.scheme.format
        nearest = self._any_nan(encode(scaled, format), outputs)
        return Codes(nearest, scaled=scaled, table=meanings(format), window=RECIPROCAL)

    def _stochastic_codes(self, scaled: Tensor, outputs: Outputs) -> Drawn:
        """Either code adjacent to a magnitude."""
        codes, format = self._reference_output("codes"), self.form.scheme.format
        grid = meanings(format)[: format.max_code + 1]
        value = scaled[: self.repeated].abs().flatten().clamp(max=format.max)
        grid_index = torch.searchsorted(grid, value, right=True) - 1
        above = (grid_index + (grid[grid_index] < value)).clamp(max=format.max_code)
        rounding = Stochastic(value, grid[grid_index], grid[above], ALPHA, self.checks)
        codes_of_other_calls = (outputs.get(name) for name in self.others)
        same = tuple(x for x in codes_of_other_calls if isinstance(x, Tensor) and x.shape == codes.shape)
        return Drawn(
            codes, "integers", rounding=rounding, table=meanings(format), sign_bit=format.sign_bit, others=same
        )

    def _codes(self, outputs: Outputs) -> Ranged:
        """The codes between both ends of the input."""
        quantized_groups = zip(self._quantizers(), self._inputs(), self.returned(outputs), strict=True)
        return _ranged(
            [q.codes(x, q.of_group(group)) for q, x, group in quantized_groups],
            self._in_logical_order,
            self.form.scheme.format,
        )

    def _any_nan(self, reference_codes: Tensor, outputs: Outputs) -> Tensor:
        """The expected codes, in which the NaN that was returned replaces the reference's NaN: a
        format may have several codes for NaN.
        """
        observed = outputs.get(self.names["codes"])
        if not isinstance(observed, Tensor) or observed.shape != reference_codes.shape or observed.is_floating_point():
            return reference_codes
        got, meaning = observed.to(torch.int64) & 0xFF, meanings(self.form.scheme.format).isnan()
        return torch.where(
            meaning[got] & meaning[reference_codes.long()] & (got == observed), got.to(torch.uint8), reference_codes
        )

    # ---- values, and scales in another layout

    def _values(self, outputs: Outputs) -> Exact | Bounded:
        """The values of the returned codes with the returned scales."""
        value = self._in_logical_order([values(group, self.form.scheme) for group in self.returned(outputs)])
        dtype = self.form.source_MN.dtype
        if not (self.loose and self.two_levels):
            return Exact(one_nan(value.to(dtype)))
        bound = value.double().abs() * (4 * ROUNDING + torch.finfo(dtype).eps / 2) + torch.finfo(dtype).smallest_normal
        return Bounded(value.double(), torch.where(value.isfinite(), bound, 0.0), dtype, torch.float32)

    def _for_gemm(self, outputs: Outputs) -> Exact:
        """The returned scales in their places; padding is unchecked."""
        if self.names["scales.gemm"] not in outputs:
            return NotRead(self._reference_output("scales.gemm"))
        expected_scales = self._laid_out(self.returned(outputs))
        is_scale = self._laid_out([group._replace(scale=torch.ones_like(group.scale)) for group in self.form.groups])
        observed = outputs.get(self.names["scales.gemm"])
        if (
            not isinstance(observed, Tensor)
            or observed.shape != expected_scales.shape
            or observed.dtype != expected_scales.dtype
        ):
            return Exact(expected_scales)
        return Exact(torch.where(is_scale == 1, expected_scales, observed))

    def _laid_out(self, groups: list[Scaled]) -> Tensor:
        quantized = self._with(tuple(groups))
        group_scales = moe_ref.scales(quantized, columnwise=self.form.columnwise, layout="gemm")
        return torch.cat([scales_of_group.flatten() for scales_of_group in group_scales])


def _ranged(group_intervals: list[Interval], join: Callable[[list[Tensor]], Tensor], format: Format) -> Ranged:
    """The codes of all groups between both ends."""
    ends = (
        join([getattr(interval, name) for interval in group_intervals]) for name in ("low", "high", "nan", "unknown")
    )
    return Ranged.between(
        Interval(*ends), meanings(format)[: 2 * max(format.sign_bit, format.max_code + 1)], format.sign_bit
    )


def nearly(scale: Tensor, roundings: int) -> Bounded:
    """Scales within `roundings` roundings."""
    return Bounded(scale.double(), scale.double() * (roundings * ROUNDING) + LEAST, torch.float32, torch.float32)


def one_nan(x: Tensor) -> Tensor:
    """x with the same payload in every NaN, because the payload after a conversion depends on the
    machine.
    """
    return torch.where(x.isnan(), torch.nan, x)


def by_group(form: Form, name: str, tensor: Tensor) -> list[Tensor]:
    """One output of a form by group: views in logical orientation, [rows, columns]."""
    field = {"codes": "codes", "values": "codes", "scales": "scale", "amax": "amax"}[name]
    counts = [turned(getattr(group, field), form.columnwise).shape[0] for group in form.groups]
    matrix = tensor.reshape(-1, 1) if tensor.dim() == 1 else tensor
    return list(matrix[: sum(counts)].split(counts))
