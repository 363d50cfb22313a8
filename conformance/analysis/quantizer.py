"""What is right of one quantised form, each output given those before it.

amax has no rounding, scales follow from it; codes are right for the scales that were returned, values for the codes and scales. With
`scale_arithmetic` "division", the default, each has one right value. Where "reciprocal" is declared and scales are no powers of two, a
scale may be two roundings off on either side, and codes near a midpoint decided the other way (`judge.codes`). 4over6 chooses by a sum
of errors and noise decides to the last bit, so both are exact always.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.judge import Bounded, Exact, Expectation, Given, Outputs
from conformance.judge.codes import RECIPROCAL, Codes
from moe_ref.config.quantization import BLOCK
from moe_ref.quantization.formats import E4M3, Format, decode, encode
from moe_ref.quantization.quantize import Form, Quantized, turned
from moe_ref.quantization.recipes import FLOAT32_MAX, Scaled, Scheme, block_amax, each_row, spread, values

ROUNDING = 2.0**-24  # of float32
LEAST = 2.0**-149  # the smallest float32


@dataclass(frozen=True)
class RightForm:
    """What is right of one form: the reference's own, given what the implementation returned before."""

    form: Form
    noise: bool
    names: dict[str, str]  # of the outputs
    right: dict[str, Any]  # what the reference returned, by name
    reciprocal: bool  # whether scales may be off

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
        codes = self._right("codes")
        right: dict[str, Expectation] = {
            self.names["amax"]: Exact(self._right("amax")),
            self.names["scales"]: self._scales() if self.loose else Exact(self._right("scales")),
            self.names["codes"]: Given(codes, self._codes),
            self.names["values"]: Given(self._right("values"), self._values),
        }
        if self.names["scales.gemm"] in self.right:
            right[self.names["scales.gemm"]] = Given(self._right("scales.gemm"), self._for_gemm)
        return right

    def _right(self, what: str) -> Tensor:
        value: Tensor = self.right[self.names[what]].detach()
        return value

    def _whole(self, parts: list[Tensor]) -> Tensor:
        """[M,N] in logical orientation, 0 behind the last group."""
        whole = torch.cat([turned(part, self.form.columnwise) for part in parts])
        return torch.cat([whole, whole.new_zeros(len(self.form.source_MN) - len(whole), whole.shape[1])])

    def _sources(self) -> list[Tensor]:
        """What was quantised, group by group, in float32 and the form's own orientation."""
        sizes = [turned(group.codes, self.form.columnwise).shape[0] for group in self.form.groups]
        rows = self.form.source_MN.detach().float()[: sum(sizes)].split(sizes)
        return [turned(own, self.form.columnwise) for own in rows]

    def returned(self, outputs: Outputs) -> list[Scaled]:
        """Each group as the implementation returned it."""
        parts = {name: by_group(self.form, name, outputs[self.names[name]]) for name in ("codes", "scales", "amax")}
        turn = self.form.columnwise
        return [
            Scaled(turned(codes, turn).to(torch.uint8), turned(scale, turn), turned(amax, turn))
            for codes, scale, amax in zip(parts["codes"], parts["scales"], parts["amax"], strict=True)
        ]

    def _scales(self) -> Expectation:
        scale = self._right("scales")
        if not self.two_levels:
            return nearly(scale, 5)  # 1/(FMAX/a) here; FMAX · (1/a), and one more reciprocal, there
        wanted = [
            each_row(block_amax(own, self.form.scheme.block), self.form.scheme).double()
            / 6
            * _encoding(group.amax, self.form.scheme)
            for own, group in zip(self._sources(), self.form.groups, strict=True)
        ]
        scaled = torch.cat([turned(part, self.form.columnwise) for part in wanted]).clamp(max=E4M3.max)
        return Codes(scale, scaled=scaled, table=_meanings(E4M3), window=RECIPROCAL)

    def _codes(self, outputs: Outputs) -> Exact:
        """The codes that are nearest to what was quantised, over the scales that were returned."""
        if not self.loose or self.noise:
            return Exact(self._any_nan(self._right("codes"), outputs), "integers")
        pairs = zip(self._sources(), self.returned(outputs), strict=True)
        scaled = self._whole([own.double() * self._multiplier(group, own) for own, group in pairs])
        nearest = self._any_nan(encode(scaled, self.form.scheme.format), outputs)
        return Codes(nearest, scaled=scaled, table=_meanings(self.form.scheme.format), window=RECIPROCAL)

    def _any_nan(self, right: Tensor, outputs: Outputs) -> Tensor:
        """The codes with the NaN that was returned in the place of the format's own: a format may have several, and they mean the same."""
        observed = outputs.get(self.names["codes"])
        if not isinstance(observed, Tensor) or observed.shape != right.shape or observed.is_floating_point():
            return right
        got, meaning = observed.to(torch.int64) & 0xFF, _meanings(self.form.scheme.format).isnan()
        return torch.where(meaning[got] & meaning[right.long()] & (got == observed), got.to(torch.uint8), right)

    def _multiplier(self, group: Scaled, own: Tensor) -> Tensor:
        """What each element is multiplied by, in float64."""
        if not self.two_levels:
            return spread(1 / group.scale.double(), self.form.scheme.block, own)
        factor = (_encoding(group.amax, self.form.scheme) / decode(group.scale, E4M3, dtype=torch.float64)).clamp(
            max=FLOAT32_MAX
        )
        return spread(factor, (1, BLOCK["nvfp4"]), own)

    def _values(self, outputs: Outputs) -> Exact | Bounded:
        """What the codes that were returned stand for, with the scales that were returned."""
        value, dtype = (
            self._whole([values(group, self.form.scheme) for group in self.returned(outputs)]),
            self.form.source_MN.dtype,
        )
        if not (self.loose and self.two_levels):
            return Exact(one_nan(value.to(dtype)))
        bound = value.double().abs() * (4 * ROUNDING + torch.finfo(dtype).eps / 2) + torch.finfo(dtype).smallest_normal
        return Bounded(value.double(), torch.where(value.isfinite(), bound, 0.0), dtype, torch.float32)

    def _for_gemm(self, outputs: Outputs) -> Exact:
        """The scales that were returned, in their places; what stands elsewhere is padding, and is right whatever it is."""
        right = self._laid_out(self.returned(outputs))
        is_scale = self._laid_out([group._replace(scale=torch.ones_like(group.scale)) for group in self.form.groups])
        observed = outputs.get(self.names["scales.gemm"])
        if not isinstance(observed, Tensor) or observed.shape != right.shape or observed.dtype != right.dtype:
            return Exact(right)
        return Exact(torch.where(is_scale == 1, right, observed))

    def _laid_out(self, groups: list[Scaled]) -> Tensor:
        form = replace(self.form, groups=tuple(groups))
        whole = Quantized(None, form) if form.columnwise else Quantized(form, None)
        return torch.cat([part.flatten() for part in moe_ref.scales(whole, columnwise=form.columnwise, layout="gemm")])


def nearly(scale: Tensor, roundings: int) -> Bounded:
    """Scales of which so many roundings may be others."""
    return Bounded(scale.double(), scale.double() * (roundings * ROUNDING) + LEAST, torch.float32, torch.float32)


def one_nan(x: Tensor) -> Tensor:
    """x with one kind of NaN: which bits a conversion makes of one depends on the machine."""
    return torch.where(x.isnan(), torch.nan, x)


def by_group(form: Form, name: str, whole: Tensor) -> list[Tensor]:
    """What was read of a form, group by group: views in logical orientation, [rows, columns]."""
    own = {"codes": "codes", "values": "codes", "scales": "scale", "amax": "amax"}[name]
    shapes = [turned(getattr(group, own), form.columnwise).shape for group in form.groups]
    matrix = whole.reshape(-1, 1) if whole.dim() == 1 else whole
    return list(matrix[: sum(shape[0] for shape in shapes)].split([shape[0] for shape in shapes]))


def _meanings(format: Format) -> Tensor:
    """What each of 256 codes means."""
    return decode(torch.arange(256, dtype=torch.uint8), format, dtype=torch.float64)


def _encoding(amax: Tensor, scheme: Scheme) -> Tensor:
    """S of NVFP4 in float64."""
    encoding = (6 * scheme.scale_max / amax.double()).clamp(max=FLOAT32_MAX)
    return torch.where((amax == 0) | (encoding == 0), 1.0, encoding)
