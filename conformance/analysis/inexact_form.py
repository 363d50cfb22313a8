"""What is right of one quantised form of values that are not known exactly: each element lies between two numbers.

    amax     between the largest of the least magnitudes and the largest of the most, of each block
    scales   what the recipe's rule makes of the amax that was returned; where that is not returned, of some amax in its range
    codes    between the codes of both numbers, each times what the scale that was returned stands for
    values   what the codes and scales that were returned stand for, exactly

So every output is judged given those before it, and no rounding of an activation is forgiven twice. `scale_arithmetic` "reciprocal" is
allowed for as in `quantized_form`. A choice of 4over6 is by sums of errors, of which nothing is said here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.curves import concluded
from conformance.analysis.quantizer import RightForm, _encoding, _meanings, nearly
from conformance.analysis.running import Running
from conformance.judge import Bounded, Exact, Expectation, Given, Outputs
from conformance.judge.codes import RECIPROCAL
from conformance.judge.ranges import LEAST_PLACE, MOST_PLACE, Ranged, code_places
from moe_ref.config.quantization import BLOCK
from moe_ref.quantization.formats import E4M3, E8M0, Format, decode, encode
from moe_ref.quantization.quantize import HADAMARD_SIGNS, Form, Quantized, turned
from moe_ref.quantization.recipes import (
    FLOAT32_MAX,
    Scaled,
    block_amax,
    each_row,
    nearest32,
    over,
    scale_from_amax,
    spread,
)

SLACK = 1 + 2.0**-40  # of half a range, which float64 rounds
SUM_ROUNDINGS = 16 * 2.0**-24  # of a transform's sum of sixteen, in any order


@dataclass(frozen=True)
class Known:
    """Numbers that lie between two, NaN where `nan`; of those that are `unknown` nothing is."""

    low: Tensor  # float64
    high: Tensor
    nan: Tensor  # bool
    unknown: Tensor

    @classmethod
    def of(cls, x: Running, unspecified: Tensor, dtype: torch.dtype) -> "Known":
        """What a computation makes, rounded to `dtype` at last, once or by way of float32."""
        y = concluded(x, dtype)
        low, high = y.ends(dtype)
        unknown = unspecified | (y.error == torch.inf)
        low, high = (
            torch.where(bound == 0, side * 0.0, bound) for side, bound in ((-1, low), (1, high))
        )  # a zero may have either sign
        return cls(low, high, y.value.isnan() & ~unknown, unknown)

    def rows(self, first: int, last: int, columnwise: bool) -> "Known":
        """Some rows, in a form's own orientation."""
        return Known(*(turned(x[first:last], columnwise) for x in (self.low, self.high, self.nan, self.unknown)))

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """The least and the most that |x| may be for a maximum, which passes over NaN."""
        apart = torch.where(self.nan, 0.0, torch.maximum(self.low, -self.high).clamp(min=0))
        most = torch.where(self.nan, 0.0, torch.maximum(self.low.abs(), self.high.abs()))
        return torch.where(self.unknown, 0.0, apart), torch.where(self.unknown, torch.inf, most)

    def transformed(self) -> "Known":
        """The Hadamard transform of each 16 neighbours of a row, rounded to bfloat16."""
        size = len(HADAMARD_SIGNS)
        matrix = torch.tensor(
            [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(size)] for i, sign in enumerate(HADAMARD_SIGNS)],
            dtype=torch.float64,
        )
        odd = self.unknown | self.nan | self.low.isinf() | self.high.isinf()
        middle = torch.where(odd, 0.0, (self.low + self.high) / 2).unflatten(1, (-1, size))
        half = torch.where(odd, 0.0, (self.high - self.low) / 2).unflatten(1, (-1, size))
        off = (half * SLACK + SUM_ROUNDINGS * (middle.abs() + half)).sum(2, keepdim=True) / 4
        low, high = ((middle @ matrix + side * off).flatten(1).to(torch.bfloat16).double() for side in (-1, 1))
        nan = self.nan.unflatten(1, (-1, size)).any(2, keepdim=True).expand(middle.shape).flatten(1)
        unknown = (odd & ~self.nan).unflatten(1, (-1, size)).any(2, keepdim=True).expand(middle.shape).flatten(1)
        low, high = (torch.where(bound == 0, side * 0.0, bound) for side, bound in ((-1, low), (1, high)))
        return Known(low, high, nan & ~unknown, unknown)


@dataclass(frozen=True)
class InexactForm(RightForm):
    """What is right of one form, of values that are known in part."""

    known: Known  # of the rows of all groups
    given_scale: Tensor | None  # [G], of delayed scaling
    noise_MN: Tensor | None  # what rounds this form
    dtype: torch.dtype  # of what was quantised

    def expectations(self) -> dict[str, Expectation]:
        """As those of values that are known exactly."""
        return {
            self.names["amax"]: self._amax(),
            self.names["scales"]: Given(self._right("scales"), self._given_amax),
            self.names["codes"]: Given(self._right("codes"), self._given_scales),
            self.names["values"]: Given(self._right("values"), self._values),
        }

    def _owns(self) -> list[Known]:
        """What was quantised, group by group, in the form's own orientation."""
        parts, first = [], 0
        for group in self.form.groups:
            last = first + turned(group.codes, self.form.columnwise).shape[0]
            own = self.known.rows(first, last, self.form.columnwise)
            parts.append(own.transformed() if self.form.scheme.hadamard else own)
            first = last
        return parts

    def _blocks(self, magnitudes: Tensor, block: tuple[int | None, int | None]) -> Tensor:
        return (
            each_row(block_amax(magnitudes, block), self.form.scheme)
            if block == self.form.scheme.block
            else block_amax(magnitudes, block)
        )

    def _amax(self) -> Bounded:
        """Of each block, or of all of a group where NVFP4 has one scale above those of the blocks."""
        scheme = self.form.scheme
        block = (1 if scheme.row_scaled else None, None) if self.two_levels else scheme.block
        least, most = (
            self._logical([self._blocks(own.magnitudes()[side], block) for own in self._owns()]) for side in (0, 1)
        )
        middle = torch.where(least == most, least, torch.where(most.isinf(), least, (least + most) / 2))
        half = torch.where(least == most, 0.0, torch.where(most.isinf(), torch.inf, (most - least) / 2 * SLACK))
        return Bounded(middle, half, torch.float32, torch.float32)

    def _logical(self, amaxes: list[Tensor]) -> Tensor:
        """What each group has in the place of its amax, as `amax` returns it."""
        groups = tuple(group._replace(amax=amax) for group, amax in zip(self.form.groups, amaxes, strict=True))
        form = Form(self.form.scheme, self.form.columnwise, self.form.source_MN, groups)
        return moe_ref.amax(
            Quantized(None, form) if form.columnwise else Quantized(form, None), columnwise=form.columnwise
        )

    def _fitting(self, amax: Tensor) -> Tensor:
        """What values are multiplied by, of the amax that was returned."""
        scheme = self.form.scheme
        infinity = torch.finfo(self.dtype).max if scheme.recipe.scaling == "block" else FLOAT32_MAX
        how: dict[str, Any] = {
            "epsilon": scheme.recipe.amax_epsilon or 0.0,
            "infinity": infinity,
            "power_of_two": bool(scheme.recipe.power_of_two_scales),
        }
        return scale_from_amax(amax, scheme.format.max, **how)

    def _given_amax(self, outputs: Outputs) -> Exact | Bounded:
        """The scales that follow from the amax that was returned."""
        scaling, right = self.form.scheme.recipe.scaling, self._right("scales")
        if scaling == "delayed":
            return nearly(right, 2) if self.loose else Exact(right)
        amax = [turned(part, self.form.columnwise) for part in self._parts("amax", outputs)]
        if self.two_levels:
            return self._block_scales(amax)
        if scaling == "mxfp8":
            scales = [encode(part * nearest32(1 / self.form.scheme.format.max), E8M0) for part in amax]
        else:
            scales = [over(1.0, self._fitting(part)) for part in amax]
        whole = torch.cat([turned(part, self.form.columnwise) for part in scales])
        whole = whole.flatten() if right.dim() == 1 else whole
        return nearly(whole, 5) if self.loose else Exact(whole)

    def _parts(self, name: str, outputs: Outputs) -> list[Tensor]:
        """What was returned, group by group, in logical orientation."""
        own = {"amax": "amax", "scales": "scale"}[name]
        whole = outputs[self.names[name]]
        counts = [turned(getattr(group, own), self.form.columnwise).shape[0] for group in self.form.groups]
        return list((whole.reshape(-1, 1) if whole.dim() == 1 else whole).split(counts))

    def _block_scales(self, amax: list[Tensor]) -> Ranged:
        """NVFP4's scales of blocks, of which no amax is returned, within that of the group, which is."""
        ends = []
        for own, group_amax in zip(self._owns(), amax, strict=True):
            encoding = _encoding(group_amax, self.form.scheme).float() * nearest32(1 / 6)
            blocks = (self._blocks(side, self.form.scheme.block) for side in own.magnitudes())
            ends.append(
                [(block.float() * encoding).double() * way for block, way in zip(blocks, self._widened(), strict=True)]
            )
        least, most = (
            torch.cat([turned(encode(pair[side].clamp(max=FLOAT32_MAX), E4M3), self.form.columnwise) for pair in ends])
            for side in (0, 1)
        )
        return _ranged(least, most, least, E4M3)

    def _widened(self) -> tuple[float, float]:
        """What a quantiser that multiplies by reciprocals may be off by."""
        return (1 - RECIPROCAL, 1 + RECIPROCAL) if self.loose else (1.0, 1.0)

    def _multiplied_by(self, g: int, group: Scaled) -> Tensor:
        """What a group's elements are multiplied by, of what was returned; a block an element."""
        if self.two_levels:
            encoding = _encoding(group.amax, self.form.scheme).float()
            return over(1.0, decode(group.scale, E4M3) * over(1.0, encoding)).clamp(max=FLOAT32_MAX)
        if self.form.scheme.recipe.scaling == "mxfp8":
            return decode(254 - group.scale, E8M0)
        if self.given_scale is not None:
            return self.given_scale[g].reshape(1, 1)
        return over(1.0, group.scale) if self.loose else self._fitting(group.amax)

    def _scaled(self, product: Tensor, side: int) -> Tensor:
        """A product as it is encoded: rounded, or as far to a side as one with a reciprocal may be off."""
        if not self.loose:
            return product.float()
        return product + side * RECIPROCAL * torch.where(product.isfinite(), product.abs(), 0.0)

    def _given_scales(self, outputs: Outputs) -> Exact:
        """The codes between those of both ends, for the scales that were returned."""
        scheme, format, ends = self.form.scheme, self.form.scheme.format, []
        rows = 0
        for g, (own, group) in enumerate(zip(self._owns(), self.returned(outputs), strict=True)):
            size = turned(group.codes, self.form.columnwise).shape[0]
            noise = None if self.noise_MN is None else turned(self.noise_MN[rows : rows + size], self.form.columnwise)
            rows += size
            block = (
                (1, BLOCK["nvfp4"] if self.two_levels else scheme.block[1])
                if scheme.recipe.scaling in ("mxfp8", "nvfp4")
                else scheme.block
            )
            factor = spread(self._multiplied_by(g, group), block, own.low).double()
            middle = torch.where(own.low.isinf() | own.high.isinf(), own.low, (own.low + own.high) / 2)
            scaled = (self._scaled(x * factor, side) for x, side in ((own.low, -1), (own.high, 1), (middle, 0)))
            scaled = (torch.where(own.nan, torch.nan, torch.where(own.unknown, 0.0, x)) for x in scaled)
            ends.append([*(encode(x, format, noise=noise) for x in scaled), own.unknown])
        least, most, value, unknown = (self._whole([part[i] for part in ends]) for i in range(4))
        return _ranged(least, most, value, format, unknown)


def _ranged(least: Tensor, most: Tensor, value: Tensor, format: Format, unknown: Tensor | None = None) -> Ranged:
    """Codes from `least` to `most`; any where unknown."""
    places = code_places(_meanings(format)[: 16 if format.name == "e2m1" else 256], format.sign_bit)
    first, last = places[least.long()], places[most.long()]
    if unknown is not None:
        first, last = torch.where(unknown, LEAST_PLACE, first), torch.where(unknown, MOST_PLACE, last)
    return Ranged(value, "integers", least=first, most=last, places=places)
