"""An FP8 quantiser in the style of other teams: codes by integer arithmetic on the bits of float32,
scales by frexp, blocks as views of a padded tensor. No NVFP4.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref import config
from tests.honest.experts import Shown

LARGEST = torch.finfo(torch.float32).max
FORMATS = {"e4m3": (3, 7, 448.0, torch.float8_e4m3fn), "e5m2": (2, 15, 57344.0, torch.float8_e5m2)}


def encoded(x: Tensor, name: str) -> Tensor:
    """The nearest codes: half of the last place, less one if the place is even, is added to the
    bits, and what is below the smallest normal number is counted in its spacing.
    """
    mantissa, bias, largest, _ = FORMATS[name]
    bits, shift = x.contiguous().view(torch.int32), 23 - mantissa
    magnitude = (bits & 0x7FFFFFFF).long()
    near = magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
    normal = (near >> shift) - ((127 - bias) << mantissa)
    small = torch.round(x.abs().double() * 2.0 ** (bias + mantissa - 1)).nan_to_num(posinf=0).long()
    code = torch.where(x.abs() < 2.0 ** (1 - bias), small, normal)
    most = int(torch.tensor(largest).to(FORMATS[name][3]).view(torch.uint8))
    return torch.where(x.isnan(), 0x7F, code.clamp(max=most) + ((bits >> 24) & 0x80)).to(torch.uint8)


def largest_of(x: Tensor, rows: int, columns: int) -> Tensor:
    """max |x| of each block; NaN counts as 0."""
    padded = F.pad(x.abs().nan_to_num(nan=0.0, posinf=torch.inf), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    down, across = padded.shape[0] // rows, padded.shape[1] // columns
    if not padded.numel():
        return x.new_zeros(down, across)
    return padded.view(down, rows, across, columns).amax(3).amax(1)


def over_blocks(scale: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    expanded = scale[:, None, :, None].expand(-1, rows, -1, columns)
    return expanded.reshape(scale.shape[0] * rows, scale.shape[1] * columns)[: like.shape[0], : like.shape[1]]


def power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()


@dataclass
class Group:
    """A group in the orientation of its form."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    values: Tensor


def by_exponent(x: Tensor, square: bool, name: str) -> Group:
    """MXFP8: the least power of two that lets the largest value fit."""
    rows = 32 if square else 1
    amax = largest_of(x, rows, 32).repeat_interleave(rows, 0)
    fraction, exponent = torch.frexp((amax * torch.tensor(1 / FORMATS[name][2])).double())
    code = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, 127) + 127
    code = torch.where(fraction == 0, 0, torch.where(amax == torch.inf, 254, code))
    codes = encoded(x * over_blocks(power_of_two(127 - code), 1, 32, x), name)
    values = codes.view(FORMATS[name][3]).float() * over_blocks(power_of_two(code - 127), 1, 32, x)
    return Group(codes, code.to(torch.uint8), amax, values)


def by_amax(
    x: Tensor, recipe: config.Recipe, square: bool, name: str, fixed: Tensor | None, dtype: torch.dtype
) -> Group:
    full_shape = max(x.shape[0], 1), max(x.shape[1], 1)
    rows, columns = full_shape if recipe.scaling != "block" else (128 if square else 1, 128)
    amax = torch.zeros(1, 1) if recipe.scaling != "block" and not x.numel() else largest_of(x, rows, columns)
    if fixed is not None:
        scale = fixed.reshape(1, 1)
    else:
        least = amax.maximum(torch.tensor(recipe.amax_epsilon, dtype=torch.float32))
        infinite = LARGEST if recipe.scaling == "current" or dtype.itemsize > 2 else torch.finfo(dtype).max
        scale = torch.tensor(FORMATS[name][2]) / least
        scale = torch.where(scale == torch.inf, infinite, scale)
        scale = torch.where((least == 0) | (least == torch.inf), 1.0, scale)
        scale = power_of_two(torch.frexp(scale).exponent - 1) if recipe.power_of_two_scales else scale
    codes, inverse = encoded(x * over_blocks(scale, rows, columns, x), name), scale.reciprocal()
    values = codes.view(FORMATS[name][3]).float() * over_blocks(inverse, rows, columns, x)
    return Group(codes, inverse, amax, values)


@dataclass
class Form:
    """One direction of a tensor: its groups, and the source of its gradient."""

    recipe: config.Recipe
    source: Tensor
    groups: list[Group]
    columnwise: bool

    def rows_of(self, field: str) -> Tensor:
        """[M,N] of a field with an entry per element, 0 past the last group."""
        elements = torch.cat([self.turned(getattr(group, field)) for group in self.groups])
        return F.pad(elements, (0, 0, 0, len(self.source) - len(elements)))

    def per_block(self, field: str) -> Tensor:
        elements = torch.cat([self.turned(getattr(group, field)) for group in self.groups])
        return elements.flatten() if self.recipe.scaling in ("delayed", "current") else elements.contiguous()

    def turned(self, x: Tensor) -> Tensor:
        return x.T if self.columnwise else x


def quantize(
    x, recipe, *, noise=None, state=None, columnwise=False, rowwise=True, splits=None, role="input"
) -> config.Quantization:
    config.check_quantize(x, recipe, role, splits, rowwise, columnwise, state, noise)
    sizes = [len(x)] if splits is None else splits.tolist()
    config.check_splits(sizes, len(x), recipe)
    name = "e5m2" if recipe.fp8_format == "hybrid" and role == "grad_output" else "e4m3"
    square = bool(recipe.two_dimensional_weights) and role == "weight"
    used, forms = x[: sum(sizes)], {}
    for direction in [False] * rowwise + [True] * columnwise:
        groups = []
        for g, rows in enumerate(used.detach().float().split(sizes)):
            oriented, fixed = rows.T if direction else rows, None if state is None else state.scale[g]
            by_block = recipe.scaling == "mxfp8"
            groups.append(
                by_exponent(oriented, square, name)
                if by_block
                else by_amax(oriented, recipe, square, name, fixed, x.dtype)
            )
        source = torch.cat([used, torch.zeros_like(x[len(used) :])])
        forms[direction] = Form(recipe, source, groups, direction)
    if state is not None:
        latest = torch.stack([group.amax.reshape(()) for group in forms[not rowwise].groups])
        history = state.amax_history.clone()
        history[:, 0] = history[:, 0].maximum(latest)
        state = config.QuantizerState(history, state.scale.clone())
    return config.Quantization(forms, state)


def form_of(quantized: dict[bool, Form], columnwise: bool) -> Form:
    if columnwise not in quantized:
        raise ValueError(f"columnwise is {columnwise}; quantize was not asked for it")
    return quantized[columnwise]


def codes(quantized, *, columnwise=False):
    return form_of(quantized, columnwise).rows_of("codes").contiguous()


def scales(quantized, *, columnwise=False):
    return form_of(quantized, columnwise).per_block("scales")


def amax(quantized, *, columnwise=False):
    return form_of(quantized, columnwise).per_block("amax")


def dequantize(quantized, *, columnwise=False):
    form = form_of(quantized, columnwise)
    return Shown.apply(form.source, form.rows_of("values").to(form.source.dtype))


def supports(function: str, *, recipe: config.Recipe, **settings: Any) -> str | None:
    return "no NVFP4" if recipe.scaling == "nvfp4" else None


Bits = SimpleNamespace(
    quantize=quantize, codes=codes, scales=scales, amax=amax, dequantize=dequantize, supports=supports
)
