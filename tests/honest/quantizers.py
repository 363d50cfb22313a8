"""Honest quantisers in plain torch: reshaped blocks, torch's casts, frexp, the transform as a GEMM.

Divides       scales by division, like the reference
Multiplies    scales other than powers of two by reciprocals (declared): some roundings off
"""

from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref.config import Quantization, QuantizerState, check_quantize, check_role, check_splits, check_state, require
from moe_ref.config.quantization import BLOCK
from tests.honest.experts import Shown

LARGEST = torch.finfo(torch.float32).max
SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float64)
ONES = torch.ones(1, 1, dtype=torch.float64)


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix, by the recursion [[H, H], [H, -H]]."""
    h = ONES
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


TRANSFORM = SIGNS[:, None] * sylvester(16) / 4


def transformed(x: Tensor) -> Tensor:
    """The transform of every 16 rows, in float64."""
    return (TRANSFORM.T @ x.double().reshape(len(x) // 16, 16, x.shape[1])).reshape(x.shape).to(x.dtype)


def e2m1(x: Tensor, noise: Tensor | None) -> Tensor:
    a = x.abs().clamp(max=6)
    if noise is None:
        code = (a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    else:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        low = torch.searchsorted(grid, a.double().nan_to_num(), right=True).clamp(max=7) - 1
        code = low + (noise.double() < (a.double() - grid[low]) / (grid[low + 1] - grid[low]))
    return torch.where(x.isnan(), 7, code + 8 * x.signbit()).to(torch.uint8)


def meaning(codes: Tensor, kind: Any) -> Tensor:
    """Decoded codes, float32."""
    if kind is not None:
        return codes.view(kind).float()
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)


def cast(x: Tensor, kind: Any, noise: Tensor | None = None) -> Tensor:
    if kind is None:
        return e2m1(x, noise)
    most = torch.finfo(kind).max
    return x.clamp(-most, most).to(kind).view(torch.uint8)


def blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[row blocks, rows, column blocks, columns], zero-padded."""
    padded = F.pad(x, (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]))
    return padded.reshape(len(padded) // block[0], block[0], padded.shape[1] // block[1], block[1])


def magnitude(x: Tensor) -> Tensor:
    return x.nan_to_num(0, torch.inf, -torch.inf).abs()


def largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    return blocks(magnitude(x), block).amax((1, 3))


def largest_along(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """amax along dims; 0 if empty."""
    return F.pad(magnitude(x), (0, int(1 in dims), 0, int(0 in dims))).amax(dims, keepdim=True)


def grown(scale: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    rows, columns = scale.shape
    elements = scale[:, None, :, None].expand(rows, block[0], columns, block[1])
    return elements.reshape(rows * block[0], columns * block[1])[: like.shape[0], : like.shape[1]]


def exponent_above(x: Tensor) -> Tensor:
    """⌈log₂ x⌉ + 127, clamped to 0 … 254."""
    mantissa, exponent = torch.frexp(x.double())
    code = torch.where(mantissa > 0.5, exponent, exponent - 1) + 127
    return torch.where(x == 0, 0, torch.where(x.isinf(), 254, code)).clamp(0, 254).to(torch.uint8)


@dataclass
class Piece:
    """One quantised group in one direction, in logical orientation."""

    codes: Tensor
    scale: Tensor
    amax: Tensor
    values: Tensor  # float32
    square: bool


def ratio(reciprocal: bool, number: float, x: Tensor, exactly: bool = False) -> Tensor:
    if exactly or not reciprocal:
        return torch.full_like(x, number) / x
    less = torch.where(x > 1, 2.0**-32, 1.0)  # avoids a subnormal reciprocal
    return number * less * torch.reciprocal(x * less)


def scale_of(reciprocal: bool, amax: Tensor, most: float, recipe: Any, ceiling: float) -> Tensor:
    a = torch.maximum(amax, torch.tensor(recipe.amax_epsilon or 0.0))
    s = ratio(reciprocal, most, a, exactly=bool(recipe.power_of_two_scales))
    s = torch.where((a == 0) | a.isinf(), 1.0, torch.where(s.isinf(), ceiling, s))
    if recipe.power_of_two_scales:
        s = torch.ldexp(torch.ones_like(s), torch.frexp(s)[1] - 1)
    return s


def piece(
    reciprocal: bool,
    x: Tensor,
    recipe: Any,
    role: str,
    columnwise: bool,
    state_scale: Tensor | None,
    noise: Tensor | None,
) -> Piece:
    if recipe.scaling == "nvfp4":
        return two_levels(reciprocal, x, recipe, role, columnwise, noise)
    kind = torch.float8_e5m2 if recipe.fp8_format == "hybrid" and role == "grad_output" else torch.float8_e4m3fn
    size, square = BLOCK.get(recipe.scaling, 0), role == "weight" and bool(recipe.two_dimensional_weights)
    block = (size, size) if square else (size, 1) if columnwise else (1, size)
    block = block if size else (max(x.shape[0], 1), max(x.shape[1], 1))
    x32, most = x.float(), torch.finfo(kind).max
    amax = largest(x32, block) if size else largest_along(x32, (0, 1))
    if recipe.scaling == "mxfp8":
        code = exponent_above(amax * torch.tensor(1 / most))
        inverse = torch.ldexp(torch.ones_like(amax, dtype=torch.float64), code.int() - 127).float()
        scale, codes = code, cast(x32 * grown(torch.ldexp(torch.ones_like(amax), 127 - code.int()), block, x), kind)
    else:
        ceiling = torch.finfo(x.dtype).max if size else LARGEST
        s = scale_of(reciprocal, amax, most, recipe, ceiling) if state_scale is None else state_scale.reshape(1, 1)
        scale = inverse = torch.reciprocal(s)
        codes = cast(x32 * grown(s, block, x), kind)
    return Piece(
        codes,
        repeated(scale, square, columnwise, recipe),
        repeated(amax, square, columnwise, recipe),
        meaning(codes, kind) * grown(inverse, block, x),
        square,
    )


def repeated(scale: Tensor, square: bool, columnwise: bool, recipe: Any) -> Tensor:
    """Square blocks of MXFP8 and NVFP4 store their scale once per row (columnwise: column)."""
    is_repeated = square and recipe.scaling != "block"
    return scale.repeat_interleave(BLOCK[recipe.scaling], int(columnwise)) if is_repeated else scale


def two_levels(reciprocal: bool, x: Tensor, recipe: Any, role: str, columnwise: bool, noise: Tensor | None) -> Piece:
    square = role == "weight" and bool(recipe.two_dimensional_weights)
    block, x32 = (16, 16) if square else (16, 1) if columnwise else (1, 16), x.float()
    row_scaled = bool(recipe.row_scaled_activation) and role == "input"
    top = largest_along(x32, (0 if columnwise else 1,) if row_scaled else (0, 1))
    first = ratio(reciprocal, 6 * 448.0, top).clamp(max=LARGEST)
    first = torch.where((top == 0) | (first == 0), 1.0, first)
    amax = repeated(largest(x32, block), square, columnwise, recipe)
    mine = (16, 1) if columnwise else (1, 16)
    code = cast((amax * (first * torch.tensor(1 / 6))).clamp(max=LARGEST), torch.float8_e4m3fn)
    local = meaning(code, torch.float8_e4m3fn)
    multiplier = ratio(reciprocal, 1.0, local * ratio(reciprocal, 1.0, first)).clamp(max=LARGEST)
    codes = cast(x32 * grown(multiplier, mine, x), None, noise)
    scale = local * top * torch.tensor(1 / 2688)
    return Piece(codes, code, top, meaning(codes, None) * grown(scale, mine, x), square)


def quantize(
    reciprocal: bool, x, recipe, *, role="input", splits=None, rowwise=True, columnwise=False, state=None, noise=None
):
    check_quantize(x, recipe, role, splits, rowwise, columnwise, state, noise)
    sizes = [len(x)] if splits is None else splits.tolist()
    check_splits(sizes, len(x), recipe)
    if recipe.stochastic_rounding and noise is None:
        noise = torch.rand(2, *x.shape, dtype=torch.float64)
    held = {}
    for turn in [turn for turn, wanted in ((False, rowwise), (True, columnwise)) if wanted]:
        turning = turn and bool(recipe.hadamard) and role != "weight"
        real = x[: sum(sizes)]
        source = TransformedRows.apply(real) if turning else real
        source = torch.cat([source, torch.zeros_like(x[sum(sizes) :])])
        rows_of_source = source.detach()[: sum(sizes)]
        groups = (rows_of_source.float() if rows_of_source.dtype == torch.float64 else rows_of_source).split(sizes)
        is_random = noise is not None and role == "grad_output"
        random = noise[int(turn)][: sum(sizes)].split(sizes) if is_random else [None] * len(sizes)
        held[turn] = (
            source,
            [
                piece(reciprocal, rows, recipe, role, turn, None if state is None else state.scale[g], random[g])
                for g, rows in enumerate(groups)
            ],
            recipe,
            role,
        )
    if state is not None:
        latest = torch.stack([p.amax.reshape(()) for p in next(iter(held.values()))[1]])
        history = state.amax_history.clone()
        history[:, 0] = torch.maximum(history[:, 0], latest)
        state = QuantizerState(history, state.scale)
    return Quantization(held, state)


def form(held: dict, columnwise: bool):
    require(columnwise in held, "columnwise", columnwise, "a direction that quantize was asked for")
    return held[columnwise]


def codes(held, *, columnwise=False):
    source, groups, *_ = form(held, columnwise)
    out = source.new_zeros(source.shape, dtype=torch.uint8)
    element_codes = torch.cat([p.codes for p in groups])
    out[: len(element_codes)] = element_codes
    return out


def scales(held, *, columnwise=False, layout="compact"):
    _, groups, recipe, _ = form(held, columnwise)
    flat = recipe.scaling in ("delayed", "current")
    if layout == "compact":
        stored_scales = torch.cat([p.scale for p in groups])
        return stored_scales.flatten() if flat else stored_scales
    return tuple(
        p.scale.flatten() if flat else for_gemm(p.scale.T if columnwise else p.scale, recipe, p.square) for p in groups
    )


def for_gemm(scale: Tensor, recipe: Any, square: bool) -> Tensor:
    """The GEMM layout, by explicit indices; padding, never read, is 7."""
    if recipe.scaling == "block":
        rows = scale if square else scale.T
        return F.pad(rows, (0, -rows.shape[1] % 4), value=7)
    rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
    out = scale.new_full((rows * columns,), 7)
    r, c = torch.meshgrid(torch.arange(scale.shape[0]), torch.arange(scale.shape[1]), indexing="ij")
    out[(r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale
    return out


def amax(held, *, columnwise=False):
    _, groups, recipe, role = form(held, columnwise)
    stored_amax = torch.cat([p.amax for p in groups])
    by_column = bool(recipe.row_scaled_activation) and role == "input" and columnwise
    return stored_amax if recipe.scaling in ("block", "mxfp8") or by_column else stored_amax.flatten()


def dequantize(held, *, columnwise=False):
    source, groups, *_ = form(held, columnwise)
    values = torch.cat([p.values for p in groups]).to(source.dtype)
    return Shown.apply(source, torch.cat([values, values.new_zeros(len(source) - len(values), source.shape[1])]))


def new_quantizer_state(recipe, *, num_groups=1, device=None):
    return QuantizerState(torch.zeros(num_groups, recipe.amax_history_len), torch.ones(num_groups))


def update_scales(reciprocal: bool, state, recipe, *, role="input", reduced_amax=None):
    check_role(role)
    check_state(recipe, state, len(state.scale))
    history, scale = state.amax_history.clone(), state.scale.clone()
    most = 57344.0 if recipe.fp8_format == "hybrid" and role == "grad_output" else 448.0
    for g in range(len(scale)):
        last = history[g, 0].clone()
        if reduced_amax is not None and reduced_amax[g] != 0:
            last = reduced_amax[g]
        if last == 0:
            continue
        history_values = torch.cat([last[None], history[g, 1:]]) if recipe.amax_compute_algo == "max" else last
        largest_value = torch.where(history_values.isnan(), 0, history_values).max()
        if largest_value.isfinite() and largest_value > 0:
            scale[g] = ratio(reciprocal, most * 2.0**-recipe.margin, largest_value).clamp(max=LARGEST)
        history[g] = (
            torch.cat([torch.zeros(1), history[g, 2:], last[None]])[: history.shape[1]] if history.shape[1] > 1 else 0
        )
    return QuantizerState(history, scale)


def supports(function, **arguments):
    recipe = arguments.get("recipe")
    return "no 4over6" if recipe is not None and recipe.four_over_six not in (None, "none") else None


def declares(reciprocal: bool, function):
    return {"deterministic": True, "scale_arithmetic": "reciprocal" if reciprocal else "division"}


def make(reciprocal: bool = False) -> SimpleNamespace:
    """The namespace of a variant."""
    functions = {
        function.__name__: MethodType(function, reciprocal) for function in (quantize, update_scales, declares)
    }
    fixed = (codes, scales, amax, dequantize, new_quantizer_state, supports)
    return SimpleNamespace(**functions | {function.__name__: function for function in fixed})


class TransformedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return transformed(x)

    @staticmethod
    def backward(ctx, g):
        return (TRANSFORM @ g.double().reshape(len(g) // 16, 16, g.shape[1])).reshape(g.shape).to(g.dtype)


Divides, Multiplies = make(), make(reciprocal=True)
