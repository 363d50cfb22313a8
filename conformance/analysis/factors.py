"""What a factor of a product stands for where the numbers that are quantised are known in part: each element lies between two numbers.

    amax    between the largest of the least magnitudes and the largest of the most, of each block
    scales  between what the recipe's rule makes of both; where it must be a power of two, or a code, each that lies there
    values  between the least and the most that the codes of both ends stand for, by any of these scales

Encoding is monotonic, so this holds whatever the numbers are; and between two numbers that have one code and one scale there is one value:
nothing is forgiven for being near. Weights are always known, so blocks lie along rows here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.analysis.inexact_form import Known
from conformance.analysis.running import Running
from conformance.families.experts.precision import SCALED_BY_RECIPROCALS, Factor, may_be_others
from conformance.judge.bound import ROUNDOFF
from conformance.judge.codes import RECIPROCAL
from moe_ref.quantization.formats import E4M3, E8M0, decode, encode
from moe_ref.quantization.quantize import turned
from moe_ref.quantization.recipes import FLOAT32_MAX, Scheme, block_amax, nearest32, over, scale_from_amax, spread
from moe_ref.rounding import round_to

SLACK = 1 + 2.0**-50  # of half a range, which float64 rounds
ANY = 1 + 2.0**-10  # times the largest number of a block, the largest that it may come to by whatever scale
ROUNDED = 2.0**-20  # of sums of errors, which are taken in float32


@dataclass(frozen=True)
class Scales:
    """Scales that may have been chosen, a block an element: what values are multiplied by and codes are, each between two numbers."""

    by: tuple[Tensor, Tensor]
    back: tuple[Tensor, Tensor]
    chosen: Tensor  # bool: blocks of which this is a choice


@dataclass(frozen=True)
class Between:
    """What each element comes to lies between two numbers; and the largest scale that it may have."""

    low: Tensor
    high: Tensor
    scale: Tensor

    @classmethod
    def nothing(cls, like: Tensor) -> "Between":
        return cls(torch.full_like(like, torch.inf), torch.full_like(like, -torch.inf), torch.zeros_like(like))

    def or_else(self, other: "Between", where: Tensor) -> "Between":
        """What it is by another choice, too."""
        pairs = (torch.minimum(self.low, other.low), self.low), (torch.maximum(self.high, other.high), self.high)
        low, high = (torch.where(where, both, one) for both, one in pairs)
        return Between(low, high, torch.where(where, torch.maximum(self.scale, other.scale), self.scale))

    def rounded(self, dtype: torch.dtype, reciprocal: bool) -> "Between":
        """What it comes back as in a dtype: a monotonic rounding, after that of `values` to float32."""
        off = SCALED_BY_RECIPROCALS * ROUNDOFF[torch.float32] if reciprocal else 0.0
        ends = (
            (side, end, torch.where(end.isfinite(), off * end.abs(), 0.0))
            for side, end in ((-1, self.low), (1, self.high))
        )
        low, high = (round_to((end + side * own).float(), dtype).double() for side, end, own in ends)
        return Between(low, high, self.scale)


@dataclass(frozen=True)
class InexactGroup:
    """One group in one form, in the form's own orientation."""

    own: Known
    scheme: Scheme
    given: Tensor | None  # delayed scaling's scale
    noise: Tensor | None  # what rounds it
    infinity: float  # what a scale becomes that overflows
    loose: bool  # scales by reciprocals

    @property
    def block(self) -> tuple[int | None, int | None]:
        return self.scheme.block

    def between(self) -> Between:
        """All that an honest quantiser may have made of it."""
        found = Between.nothing(self.own.low)
        if self.scheme.four_over_six:
            six, four = (self._by(list(self._of_two_levels(times))) for times in (1.0, 1.5))
            either = self._better(six, four)
            found = found.or_else(six, ~either[1]).or_else(four, ~either[0])
        else:
            rule = {"mxfp8": self._of_exponents, "nvfp4": self._of_two_levels}.get(
                self.scheme.recipe.scaling, self._of_amax
            )
            found = self._by(list(rule()))
        return self._where_open(found)

    def _by(self, choices: list[Scales]) -> Between:
        found = Between.nothing(self.own.low)
        for choice in choices:
            by, back = (
                [spread(end, self.block, self.own.low).double() for end in pair] for pair in (choice.by, choice.back)
            )
            codes = [self._code(side, x, by) for side, x in ((-1, self.own.low), (1, self.own.high))]
            low, high = (
                torch.minimum(*(codes[0] * end for end in back)),
                torch.maximum(*(codes[1] * end for end in back)),
            )
            found = found.or_else(
                Between(low, high, torch.maximum(*back)), spread(choice.chosen, self.block, self.own.low)
            )
        return found

    def _code(self, side: int, x: Tensor, by: list[Tensor]) -> Tensor:
        """What the code of an end means, by whichever scale takes it further to its side."""
        scaled = (torch.minimum if side < 0 else torch.maximum)(*((x * end).float().double() for end in by))
        if self.loose:
            scaled = scaled + side * RECIPROCAL * scaled.abs()
        format = self.scheme.format
        return decode(encode(scaled, format, noise=self.noise), format, dtype=torch.float64)

    def _amax(self, block: tuple[int | None, int | None]) -> tuple[Tensor, Tensor]:
        least, most = (block_amax(side.float(), block) for side in self.own.magnitudes())
        return least, most

    def _of_amax(self) -> Iterator[Scales]:
        """Delayed, current and block scaling."""
        recipe, format = self.scheme.recipe, self.scheme.format
        if self.given is not None:
            one = self.given.reshape(1, 1)
            yield Scales((one, one), (over(1.0, one), over(1.0, one)), torch.ones_like(one, dtype=torch.bool))
            return
        epsilon, power = recipe.amax_epsilon or 0.0, bool(recipe.power_of_two_scales)
        high, low = (
            scale_from_amax(amax, format.max, epsilon=epsilon, infinity=self.infinity, power_of_two=power)
            for amax in self._amax(self.block)
        )
        if not power:
            yield Scales((low, high), (over(1.0, high), over(1.0, low)), torch.ones_like(low, dtype=torch.bool))
            return
        while bool((high >= low).any()):
            yield Scales((high, high), (over(1.0, high), over(1.0, high)), high >= low)
            high = high / 2

    def _of_exponents(self) -> Iterator[Scales]:
        """MXFP8."""
        first, last = (
            encode(amax * nearest32(1 / self.scheme.format.max), E8M0).int() for amax in self._amax(self.block)
        )
        while bool((first <= last).any()):
            code = first.clamp(max=254).to(torch.uint8)
            by, back = decode(254 - code, E8M0), decode(code, E8M0)
            yield Scales((by, by), (back, back), first <= last)
            first = first + 1

    def _of_two_levels(self, times: float = 1.0) -> Iterator[Scales]:
        """NVFP4; `times` 1.5 where the largest value of a block becomes 4."""
        amax = self._amax((1 if self.scheme.row_scaled else None, None))
        encoding = [over(6 * self.scheme.scale_max, end).clamp(max=FLOAT32_MAX) for end in amax[::-1]]
        encoding = [
            torch.where((end == 0) | (own == 0), 1.0, end) for end, own in zip(encoding, amax[::-1], strict=True)
        ]
        widened = (1 - RECIPROCAL, 1 + RECIPROCAL) if self.loose else (1.0, 1.0)
        ends = []
        for block, end, way in zip(self._amax(self.block), encoding, widened, strict=True):
            base = (
                over(block, torch.full_like(block, 6.0)) * end * times
                if self.scheme.four_over_six
                else block * (end * nearest32(1 / 6))
            )
            ends.append(encode((base.double() * way).clamp(max=FLOAT32_MAX), E4M3).int())
        code, last = ends
        share = nearest32(1 / (6 * self.scheme.scale_max))
        while bool((code <= last).any()):
            level = decode(code.clamp(max=E4M3.max_code).to(torch.uint8), E4M3)
            by = [over(1.0, level * over(1.0, end)).clamp(max=FLOAT32_MAX) for end in encoding]
            back = [level * end * share for end in amax]
            yield Scales((by[0], by[1]), (back[0], back[1]), code <= last)
            code = code + 1

    def _better(self, six: Between, four: Between) -> tuple[Tensor, Tensor]:
        """Where 4over6 is bound to choose the first, and the second."""
        least, most = [], []
        for made in (six, four):
            middle = ((made.low + made.high) - (self.own.low + self.own.high)).abs() / 2
            half = ((made.high - made.low) + (self.own.high - self.own.low)) / 2
            ends = [(middle + side * half).clamp(min=0) for side in (-1, 1)]
            if self.scheme.recipe.four_over_six_error == "mse":
                ends = [end.square() for end in ends]
            size = self.own.low.abs().maximum(self.own.high.abs())
            lost = ROUNDED * (size.square() if self.scheme.recipe.four_over_six_error == "mse" else size)
            sums = [end.unflatten(1, (-1, self.block[1])).sum(2) for end in (*ends, lost)]  # type: ignore[arg-type]
            least.append(sums[0] - sums[2])
            most.append(sums[1] + sums[2])
        return spread(most[0] <= least[1], self.block, six.low), spread(most[1] < least[0], self.block, six.low)

    def _where_open(self, found: Between) -> Between:
        """Anything up to the largest number, where there may be nothing but zeros, whose scale is 1."""
        recipe = self.scheme.recipe
        if self.given is not None or recipe.scaling == "mxfp8":
            return found
        block = (1 if self.scheme.row_scaled else None, None) if recipe.scaling == "nvfp4" else self.block
        least, most = (spread(amax, block, found.low) for amax in self._amax(block))
        open_ = (least == 0) & (most > 0) & (not recipe.amax_epsilon) | most.isinf()
        most = most.double() * ANY
        return Between(
            torch.where(open_, -most, found.low),
            torch.where(open_, most, found.high),
            torch.where(open_, most, found.scale),
        )


def inexact_factors(
    x: Running,
    counts: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    scale_L: Tensor | None,
    noise_PN: Tensor | None,
    reciprocal: bool,
    aligned: bool,
    rounded: bool = False,
) -> list[Factor]:
    """Each expert's rows, in logical orientation.

    Args:
        x: [P,N], what is quantised, wherever it was rounded to `dtype` on its way.
        scheme: of the recipe, for this tensor and direction.
        scale_L: delayed scaling's.
        noise_PN: what rounds this form, where the scheme is stochastic.
        reciprocal: whether scales may be multiplied by.
        aligned: whether the product is by a matrix unit that aligns subnormal codes.
        rounded: whether codes come back in `dtype` before the product.
    """
    infinity = torch.finfo(dtype).max if scheme.recipe.scaling == "block" and dtype != torch.float64 else FLOAT32_MAX
    unknown = x.error.isinf()
    every = Known(x.value - x.error, x.value + x.error, torch.zeros_like(unknown), unknown)
    found, first = [], 0
    for g, count in enumerate(counts.tolist()):
        own = every.rows(first, first + count, columnwise)
        own = own.transformed() if scheme.hadamard else own
        noise = (
            None if noise_PN is None or not scheme.stochastic else turned(noise_PN[first : first + count], columnwise)
        )
        given = None if scale_L is None else scale_L[g]
        made = InexactGroup(own, scheme, given, noise, infinity, reciprocal and may_be_others(scheme)).between()
        made = made.rounded(dtype, reciprocal) if rounded else made
        value, margin = (made.low + made.high) / 2, (made.high - made.low) / 2 * SLACK
        margin = torch.where(own.unknown | margin.isnan(), torch.inf, torch.where(made.low == made.high, 0.0, margin))
        value = torch.where(margin.isinf(), 0.0, torch.where(made.low == made.high, made.low, value))
        smallest = made.scale * 2.0 ** (1 - scheme.format.bias)  # of the normal codes: see `aligned_size`
        size = torch.where((value == 0) & (margin == 0), 0.0, torch.maximum(value.abs(), smallest)) if aligned else None
        found.append(Factor(*(None if part is None else turned(part, columnwise) for part in (value, margin, size))))  # type: ignore[arg-type]
        first += count
    return found
