"""All honest results of quantising one group, for an input bounded by an interval.

    amax    per block, from the maximum of the least magnitudes to that of the largest ones
    scales  the recipe's rule for both ends; of powers of two and codes, each in between
    codes   from encode(low · s) to encode(high · s): encoding is monotonic
    values  code · decoding scale, over all of these scales

An exact input is an interval of width 0, with one amax, one scale, one code and one value. In a
quantiser that multiplies by rounded reciprocals, v = x · s is up to RECIPROCAL · |v| off the exact
product, and so are NVFP4's block scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.judge.codes import RECIPROCAL
from conformance.judge.ranges import SLACK, Interval
from moe_ref.quantization.formats import E4M3, E8M0, Format, decode, encode
from moe_ref.quantization.quantize import HADAMARD_SIGNS
from moe_ref.quantization.recipes import (
    FLOAT32_MAX,
    Scaled,
    Scheme,
    block_amax,
    nearest32,
    over,
    scale_from_amax,
    spread,
)

Block = tuple[int | None, int | None]
SUM_ROUNDINGS = 16 * 2.0**-24  # of a transform's sum of sixteen, in any order
ANY_SCALE = 1 + 2.0**-10  # times a block's amax: the largest value of its codes with any scale
ERROR_ROUNDINGS = 2.0**-20  # of 4over6's float32 sums of errors


@dataclass(frozen=True)
class Scales:
    """A choice of scales, one interval per block."""

    by: tuple[Tensor, Tensor]  # multipliers of values
    back: tuple[Tensor, Tensor]  # multipliers of codes
    block: Block
    chosen: Tensor  # bool: blocks that may have these scales


@dataclass(frozen=True)
class Quantizer:
    """A scheme and its further inputs, in the form's orientation."""

    scheme: Scheme
    dtype: torch.dtype  # of the tensor
    given: Tensor | None = None  # delayed scaling's scale
    noise: Tensor | None = None  # of stochastic rounding
    reciprocal: bool = False  # whether multiplication by reciprocals is allowed, and matters

    @property
    def two_levels(self) -> bool:
        return self.scheme.recipe.scaling == "nvfp4"

    @property
    def whole(self) -> Block:
        """The block of NVFP4's amax."""
        return 1 if self.scheme.row_scaled else None, None

    # ---- the rules, for one tensor; float64 and unrounded where reciprocals matter

    def fitting(self, amax: Tensor) -> Tensor:
        """The multiplier of values in delayed, current and block scaling."""
        recipe = self.scheme.recipe
        narrow = recipe.scaling == "block" and self.dtype != torch.float64
        options: dict[str, Any] = {
            "epsilon": recipe.amax_epsilon or 0.0,
            "infinity": torch.finfo(self.dtype).max if narrow else FLOAT32_MAX,
            "power_of_two": bool(recipe.power_of_two_scales),
        }
        return scale_from_amax(amax, self.scheme.format.max, **options)

    def exponent(self, amax: Tensor) -> Tensor:
        """The code of MXFP8's scale."""
        return encode(amax * nearest32(1 / self.scheme.format.max), E8M0)

    def encoding(self, amax: Tensor) -> Tensor:
        """S of NVFP4."""
        x = amax.double() if self.reciprocal else amax
        encoding = over(6 * self.scheme.scale_max, x).clamp(max=FLOAT32_MAX)
        return torch.where((x == 0) | (encoding == 0), 1.0, encoding)

    def level(self, amax: Tensor, encoding: Tensor, times: float = 1.0) -> Tensor:
        """NVFP4's block scale before encoding; `times` 1.5 maps the block's amax to 4."""
        if self.reciprocal:
            return amax.double() / 6 * encoding
        if self.scheme.four_over_six:
            return over(amax, torch.full_like(amax, 6.0)) * encoding * times
        return amax * (encoding * nearest32(1 / 6))

    def multiplier(self, code: Tensor, encoding: Tensor) -> Tensor:
        """The multiplier of an NVFP4 block's values, from the code of its scale."""
        if self.reciprocal:
            return (encoding / decode(code, E4M3, dtype=torch.float64)).clamp(max=FLOAT32_MAX)
        return over(1.0, decode(code, E4M3) * over(1.0, encoding)).clamp(max=FLOAT32_MAX)

    # ---- of intervals

    def amax(self, x: Interval, block: Block) -> tuple[Tensor, Tensor]:
        """The bounds of each block's amax, in float32."""
        least, most = (block_amax(side.float(), block) for side in x.magnitudes())
        return least, most

    def levels(self, blocks: tuple[Tensor, Tensor], encodings: tuple[Tensor, Tensor], times: float = 1.0) -> Interval:
        """The codes of NVFP4's block scales."""
        window = RECIPROCAL if self.reciprocal else 0.0
        low, high = (
            encode((self.level(block, end, times).double() * (1 + side * window)).clamp(max=FLOAT32_MAX), E4M3)
            for side, block, end in zip((-1, 1), blocks, encodings, strict=True)
        )
        nowhere = torch.zeros_like(blocks[0], dtype=torch.bool)
        return Interval(low, high, nowhere, nowhere)

    def of_group(self, group: Scaled) -> Scales:
        """The returned scales of a group."""
        square = self.scheme.recipe.scaling not in ("mxfp8", "nvfp4")  # these store it per row
        block = self.scheme.block if square else (1, self.scheme.block[1])
        if self.two_levels:
            by = self.multiplier(group.scale, self.encoding(group.amax))
        elif self.scheme.recipe.scaling == "mxfp8":
            by = decode(254 - group.scale, E8M0)
        elif self.given is not None:
            by = self.given.reshape(1, 1)
        else:
            by = 1 / group.scale.double() if self.reciprocal else self.fitting(group.amax)
        decoding_scale = decoding(group, self.scheme)
        return Scales(
            (by, by), (decoding_scale, decoding_scale), block, torch.ones_like(decoding_scale, dtype=torch.bool)
        )

    def scaled(self, x: Interval, scales: Scales) -> Interval:
        """The scaled input before encoding, at each end by the extreme scale."""

        def furthest(end: Tensor, side: int) -> Tensor:
            product = (torch.minimum if side < 0 else torch.maximum)(*(self.product(end, scales, i) for i in (0, 1)))
            window = RECIPROCAL * torch.where(product.isfinite(), product.abs(), 0.0)
            return torch.where(x.nan, torch.nan, product + side * window if self.reciprocal else product.float())

        return x.mapped(lambda low: furthest(low, -1), lambda high: furthest(high, 1))

    def product(self, x: Tensor, scales: Scales, end: int = 0) -> Tensor:
        """x · s, not rounded."""
        return x.double() * spread(scales.by[end], scales.block, x).double()

    def codes(self, x: Interval, scales: Scales) -> Interval:
        return self.scaled(x, scales).mapped(lambda end: encode(end, self.scheme.format, noise=self.noise))

    def values(self, x: Interval, choices: list[Scales] | None = None) -> "Decoded":
        """The dequantised values of x.

        Args:
            choices: the possible scales; None: by the recipe's rule.
        """
        if choices is not None:
            return self._decoded(x, choices)
        if self.scheme.four_over_six:
            six, four = (self._decoded(x, list(self._of_two_levels(x, times))) for times in (1.0, 1.5))
            only_six, only_four = self._better(x, six.values, four.values)
            either = Decoded.nothing(x, self.scheme.format).or_else(six, ~only_four).or_else(four, ~only_six)
        else:
            rules = {"mxfp8": self._of_exponents, "nvfp4": self._of_two_levels}
            either = self._decoded(x, list(rules.get(self.scheme.recipe.scaling, self._of_amax)(x)))
        return self._where_open(x, either)

    def _decoded(self, x: Interval, choices: list[Scales]) -> "Decoded":
        format = self.scheme.format
        decoded = Decoded.nothing(x, format)
        for choice in choices:
            codes = self.codes(x, choice).mapped(lambda code: decode(code, format, dtype=torch.float64))
            decoding_scales = [spread(end, choice.block, x.low).double() for end in choice.back]
            values = codes.mapped(
                lambda low: torch.minimum(*(low * end for end in decoding_scales)),  # noqa: B023  (called here)
                lambda high: torch.maximum(*(high * end for end in decoding_scales)),  # noqa: B023
            )
            decoded_choice = Decoded(values, torch.maximum(*decoding_scales))
            decoded = decoded.or_else(decoded_choice, spread(choice.chosen, choice.block, x.low))
        return decoded

    def _of_amax(self, x: Interval) -> Iterator[Scales]:
        """Delayed, current and block scaling."""
        block = self.scheme.block
        if self.given is not None:
            delayed_scale = self.given.reshape(1, 1)
            yield Scales(
                (delayed_scale, delayed_scale),
                (over(1.0, delayed_scale), over(1.0, delayed_scale)),
                block,
                torch.ones_like(delayed_scale, dtype=torch.bool),
            )
            return
        high, low = (self.fitting(amax) for amax in self.amax(x, block))
        if not self.scheme.recipe.power_of_two_scales:
            all_blocks = torch.ones_like(low, dtype=torch.bool)
            yield Scales((low, high), (over(1.0, high), over(1.0, low)), block, all_blocks)
            return
        while bool((high >= low).any()):
            yield Scales((high, high), (over(1.0, high), over(1.0, high)), block, high >= low)
            high = high / 2

    def _of_exponents(self, x: Interval) -> Iterator[Scales]:
        """MXFP8."""
        first, last = (self.exponent(amax).int() for amax in self.amax(x, self.scheme.block))
        while bool((first <= last).any()):
            code = first.clamp(max=254).to(torch.uint8)
            by, decoding_scale = decode(254 - code, E8M0), decode(code, E8M0)
            yield Scales((by, by), (decoding_scale, decoding_scale), self.scheme.block, first <= last)
            first = first + 1

    def _of_two_levels(self, x: Interval, times: float = 1.0) -> Iterator[Scales]:
        """NVFP4."""
        amax = self.amax(x, self.whole)
        encodings = self.encoding(amax[1]), self.encoding(amax[0])
        codes = self.levels(self.amax(x, self.scheme.block), encodings, times)
        code, last = codes.low.int(), codes.high.int()
        share = nearest32(1 / (6 * self.scheme.scale_max))
        while bool((code <= last).any()):
            level = code.clamp(max=E4M3.max_code).to(torch.uint8)
            by = [self.multiplier(level, end) for end in encodings]
            decoding_scales = [decode(level, E4M3) * end * share for end in amax]
            yield Scales((by[0], by[1]), (decoding_scales[0], decoding_scales[1]), self.scheme.block, code <= last)
            code = code + 1

    def _better(self, x: Interval, six: Interval, four: Interval) -> tuple[Tensor, Tensor]:
        """Where 4over6 must choose `six`, and where `four`."""
        squared, least, most = self.scheme.recipe.four_over_six_error == "mse", [], []
        for values in (six, four):
            middle = ((values.low + values.high) - (x.low + x.high)).abs() / 2
            half = ((values.high - values.low) + (x.high - x.low)) / 2
            magnitudes = [(middle - half).clamp(min=0), middle + half, x.low.abs().maximum(x.high.abs())]
            sums = [
                (magnitude.square() if squared else magnitude).unflatten(1, (-1, self.scheme.block[1])).sum(2)  # type: ignore[arg-type]
                for magnitude in magnitudes
            ]
            least.append(sums[0] - ERROR_ROUNDINGS * sums[2])
            most.append(sums[1] + ERROR_ROUNDINGS * sums[2])
        only_six, only_four = most[0] <= least[1], most[1] < least[0]
        return spread(only_six, self.scheme.block, x.low), spread(only_four, self.scheme.block, x.low)

    def _where_open(self, x: Interval, decoded: "Decoded") -> "Decoded":
        """Any value up to the amax is allowed in a block that may be all zeros, because its scale
        is then 1.
        """
        recipe = self.scheme.recipe
        if self.given is not None or recipe.scaling == "mxfp8" or x.is_exact:
            return decoded
        least, most = (
            spread(amax, self.whole if self.two_levels else self.scheme.block, x.low)
            for amax in self.amax(x, self.whole if self.two_levels else self.scheme.block)
        )
        open_ = (least == 0) & (most > 0) & (not recipe.amax_epsilon) | most.isinf()
        most = most.double() * ANY_SCALE
        values = decoded.values.mapped(
            lambda end: torch.where(open_, -most, end), lambda end: torch.where(open_, most, end)
        )
        return Decoded(values, torch.where(open_, most, decoded.scale))


@dataclass(frozen=True)
class Decoded:
    """The values of codes, and the largest possible scale of each."""

    values: Interval
    scale: Tensor

    @classmethod
    def nothing(cls, x: Interval, format: Format) -> "Decoded":
        low = torch.full_like(x.low, torch.inf, dtype=torch.float64)
        nan = x.nan & (format.nan is not None)
        return cls(Interval(low, -low, nan, x.unknown), torch.zeros_like(low))

    def or_else(self, alternative: "Decoded", where: Tensor) -> "Decoded":
        """The hull with another choice where `where`."""
        scale = torch.where(where, torch.maximum(self.scale, alternative.scale), self.scale)
        return Decoded(self.values.or_else(alternative.values, where), scale)


def decoding(group: Scaled, scheme: Scheme) -> Tensor:
    """The multipliers of a group's codes: one float32 scale per block."""
    if scheme.recipe.scaling == "mxfp8":
        return decode(group.scale, E8M0)
    if scheme.recipe.scaling == "nvfp4":
        return decode(group.scale, E4M3) * group.amax * nearest32(1 / (6 * scheme.scale_max))
    return group.scale


def transformed(x: Interval) -> Interval:
    """The Hadamard transform of each 16 consecutive values of a row, rounded to bfloat16."""
    size = len(HADAMARD_SIGNS)
    matrix = torch.tensor(
        [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(size)] for i, sign in enumerate(HADAMARD_SIGNS)],
        dtype=torch.float64,
    )
    odd = x.unknown | x.nan | x.low.isinf() | x.high.isinf()
    center = torch.where(odd, 0.0, (x.low + x.high) / 2).unflatten(1, (-1, size))
    half = torch.where(odd, 0.0, (x.high - x.low) / 2).unflatten(1, (-1, size))
    off = (half * SLACK + SUM_ROUNDINGS * (center.abs() + half)).sum(2, keepdim=True) / 4
    low, high = ((center @ matrix + side * off).flatten(1).to(torch.bfloat16).double() for side in (-1, 1))
    nan = x.nan.unflatten(1, (-1, size)).any(2, keepdim=True).expand(center.shape).flatten(1)
    unknown = (odd & ~x.nan).unflatten(1, (-1, size)).any(2, keepdim=True).expand(center.shape).flatten(1)
    return Interval(low, high, nan & ~unknown, unknown).either_zero()


def meanings(format: Format) -> Tensor:
    """The values of the 256 codes, in float64."""
    return decode(torch.arange(256, dtype=torch.uint8), format, dtype=torch.float64)
