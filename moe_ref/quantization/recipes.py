"""Recipes: formats and blocks of each tensor, and the rules for scales.

A *form* of a tensor is its codes and scales along one direction: rowwise (blocks along a row) or
columnwise (blocks along a column). The columnwise form of x is the rowwise form of xᵀ, so every
rule below is for rows; only block shapes and the Hadamard transform differ. All arithmetic is
float32, each operation rounded once; a maximum has no rounding.

Mirrors transformer_engine/common: recipe/recipe_common.cuh and delayed_scaling.cu, cast/mxfp8,
cast/nvfp4. Differs: docs/differences.md#quantization.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ref.config import Operand, QuantizerState, Recipe, check_role, check_state, require
from moe_ref.config.quantization import BLOCK, GEMMS
from moe_ref.quantization.formats import E2M1, E4M3, E5M2, E8M0, Format, decode, encode
from moe_ref.rounding import round_to

FLOAT32_MAX = torch.finfo(torch.float32).max
EVERYTHING = (None, None)  # a block that covers the whole of a group


@dataclass(frozen=True)
class Scheme:
    """The recipe of one form: resolved for a role and a direction."""

    recipe: Recipe
    format: Format
    block: tuple[int | None, int | None]  # (rows, columns) that share a scale, in the form's own orientation; None: all
    hadamard: bool = False  # transformed along tokens first
    stochastic: bool = False
    row_scaled: bool = False  # NVFP4: a global amax for each row of the form
    four_over_six: bool = False
    scale_max: float = E4M3.max  # NVFP4: what the largest block's scale becomes


def scheme(recipe: Recipe, role: str, *, columnwise: bool = False) -> Scheme:
    """The scheme of one form.

        scaling  | format                                 | block, in the form's own orientation
        delayed  | E4M3; hybrid: grad_output E5M2         | the group
        current  | the same                               | the group
        block    | the same                               | 1×128; weights 128×128
        mxfp8    | the same                               | 1×32; two_dimensional_weights 32×32
        nvfp4    | E2M1                                   | 1×16; weights 16×16

    NVFP4: columnwise inputs and gradients are transformed first; gradients are rounded
    stochastically in both directions.

    Raises:
        ValueError: an unknown role.

    Source: `make_quantizers` of the recipe states in transformer_engine/pytorch/quantization.py.
    """
    check_role(role)
    square = bool(recipe.two_dimensional_weights) and role == "weight"
    size = BLOCK.get(recipe.scaling)
    block = EVERYTHING if size is None else (size if square else 1, size)
    if recipe.scaling != "nvfp4":
        return Scheme(recipe, E5M2 if recipe.fp8_format == "hybrid" and role == "grad_output" else E4M3, block)
    scopes = {"input": ("activations", "all"), "weight": ("weights", "all"), "grad_output": ()}[role]
    four_over_six = recipe.four_over_six in scopes
    return Scheme(
        recipe,
        E2M1,
        block,
        hadamard=bool(recipe.hadamard) and role != "weight" and columnwise,
        stochastic=bool(recipe.stochastic_rounding) and role == "grad_output",
        row_scaled=bool(recipe.row_scaled_activation) and role == "input",
        four_over_six=four_over_six,
        scale_max=256.0 if four_over_six and recipe.four_over_six_bound_256 in scopes else E4M3.max,
    )


def operands(gemm: str, recipe: Recipe) -> tuple[Operand, Operand]:
    """The two forms that a matrix product of a linear layer y = x Wᵀ reads; their blocks lie along
    the contraction.

        fprop  y  = x Wᵀ    weight rowwise      input rowwise            contraction: in features
        dgrad  dx = dy W    weight columnwise   grad_output rowwise      contraction: out features
        wgrad  dW = dyᵀ x   input columnwise    grad_output columnwise   contraction: tokens

    Each form is made from the high-precision tensor, never from another form. Blocks along tokens
    start at each expert's first row, so wgrad depends on the grouping; rows of zeros change
    nothing.

    With backward_override the gradients read no columnwise form, and grad_output is never
    quantised:

        high_precision   dgrad  weight stored    wgrad  input stored          and grad_output stored
        dequantized      the same, of weight and input rowwise, dequantized

    Dequantized: the values of fprop's codes, rounded once to the dtype of the tensor.

    Raises:
        ValueError: an unknown gemm; wgrad with a row-scaled activation and four_over_six, which has
            no columnwise form.

    Source: transformer_engine/pytorch/module/grouped_linear.py.
    """
    require(gemm in GEMMS, "gemm", repr(gemm), f"one of {', '.join(GEMMS)}")
    if gemm == "fprop":
        return Operand("weight", False), Operand("input", False)
    if recipe.backward_override is not None:
        form = {"high_precision": "stored", "dequantized": "dequantized"}[recipe.backward_override]
        return Operand("weight" if gemm == "dgrad" else "input", False, form), Operand("grad_output", False, "stored")
    if gemm == "dgrad":
        return Operand("weight", True), Operand("grad_output", False)
    impossible = recipe.row_scaled_activation and recipe.four_over_six in ("activations", "all")
    require(not impossible, "gemm", "'wgrad' with a row-scaled activation and four_over_six", "fprop or dgrad")
    return Operand("input", True), Operand("grad_output", True)


# ---- arithmetic


def over(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """The quotient, rounded once. (A tensor over a number multiplies by a reciprocal: two
    roundings.)
    """
    top = numerator if isinstance(numerator, Tensor) else torch.full_like(denominator, numerator)
    return torch.div(top, denominator)


@cache
def nearest32(x: float) -> float:
    """x rounded to float32."""
    return float(round_to(torch.tensor(x, dtype=torch.float64), torch.float32))


def block_amax(x_MN: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """max |x| per block. NaN is ignored, missing elements of a partial block count as 0, and the
    amax of nothing is 0.
    """
    counts = [1 if size is None else -(-length // size) for size, length in zip(block, x_MN.shape, strict=True)]
    sizes = [max(length, 1) if size is None else size for size, length in zip(block, x_MN.shape, strict=True)]
    missing = [count * size - length for count, size, length in zip(counts, sizes, x_MN.shape, strict=True)]
    magnitude = torch.where(torch.isnan(x_MN), 0, x_MN.abs())
    padded = torch.nn.functional.pad(magnitude, (0, missing[1], 0, missing[0]))
    return padded.reshape(counts[0], sizes[0], counts[1], sizes[1]).amax((1, 3))


def spread(scale: Tensor, block: tuple[int | None, int | None], like: Tensor) -> Tensor:
    """Each block's scale at each of its elements."""
    rows, columns = (max(length, 1) if size is None else size for size, length in zip(block, like.shape, strict=True))
    block_scales = scale[:, None, :, None].expand(-1, rows, -1, columns)
    return block_scales.reshape(scale.shape[0] * rows, scale.shape[1] * columns)[: like.shape[0], : like.shape[1]]


# ---- the rules: codes and scales of one group, rowwise


class Scaled(NamedTuple):
    """One group in one form, in the form's own orientation: transposed for a columnwise form."""

    codes: Tensor  # uint8 [m,n]
    scale: Tensor  # what to decode with: float32, or the codes of E8M0 (MXFP8) and E4M3 (NVFP4); a block an element
    amax: Tensor  # float32: of each block; NVFP4: the global one, [1,1], or [m,1] row-scaled


def scale_from_amax(
    amax: Tensor, format_max: float, *, epsilon: float = 0.0, infinity: float = FLOAT32_MAX, power_of_two: bool = False
) -> Tensor:
    """The factor by which `amax` becomes the largest value of the format.

        a = max(amax, ε)
        s = 1 if a is 0 or ∞, else format_max / a, or `infinity` where that overflows
        s = 2^⌊log₂ s⌋ if power_of_two

    Args:
        amax: float32, no NaN.
        infinity: the largest finite value of float32 (current scaling), or of the tensor's dtype
            (block scaling).

    Rounding: the division, once.

    Source: compute_scale_from_amax in recipe_common.cuh.
    """
    a = amax.clamp(min=nearest32(epsilon))
    s = over(format_max, a)
    s = torch.where(torch.isinf(s), infinity, s)
    s = torch.where((a == 0) | torch.isinf(a), 1.0, s)
    return (s.view(torch.int32) & -(1 << 23)).view(torch.float32) if power_of_two else s  # mantissa 0


def by_amax(x: Tensor, scheme: Scheme, earlier_scale: Tensor | None, noise: Tensor | None) -> Scaled:
    """Delayed, current and block scaling: q = encode(x · s), decoded with 1/s.

    Delayed scaling is given the scale of earlier steps; the others take it from the blocks at hand.

    Source: cast/fp8/quantize_fp8.cuh; transpose/quantize_transpose_{vector,square}_blockwise.cu.
    """
    x32 = round_to(x, torch.float32)
    amax = block_amax(x32, scheme.block)
    if earlier_scale is None:
        recipe = scheme.recipe
        infinity = torch.finfo(x.dtype).max if recipe.scaling == "block" and x.dtype != torch.float64 else FLOAT32_MAX
        scale = scale_from_amax(
            amax,
            scheme.format.max,
            epsilon=recipe.amax_epsilon or 0.0,
            infinity=infinity,
            power_of_two=bool(recipe.power_of_two_scales),
        )
    else:
        scale = earlier_scale.reshape(1, 1)
    return Scaled(encode(x32 * spread(scale, scheme.block, x), scheme.format), over(1.0, scale), amax)


def by_exponent(x: Tensor, scheme: Scheme, earlier_scale: Tensor | None, noise: Tensor | None) -> Scaled:
    """MXFP8: a power of two for each block, the least that lets amax fit.

        e = E8M0(amax · (1/format_max)),  q = encode(x · 2^(127 - e))

    A block of zeros has e = 0; one with an infinity e = 254, which leaves its finite values 2^-127
    of themselves. A square block's exponent is stored for each of its rows.

    Rounding: 1/format_max, the product with amax, x · 2^(127 - e) where it is subnormal, and the
    code.

    Source: cast/mxfp8/quantize_mxfp8.cuh.
    """
    x32 = round_to(x, torch.float32)
    amax = each_row(block_amax(x32, scheme.block), scheme)
    exponent = encode(amax * nearest32(1 / scheme.format.max), E8M0)
    multiplier = decode(254 - exponent, E8M0)  # 2^(127 - e); NaN never enters amax, so e is at most 254
    return Scaled(encode(x32 * spread(multiplier, (1, scheme.block[1]), x), scheme.format), exponent, amax)


def by_two_levels(x: Tensor, scheme: Scheme, earlier_scale: Tensor | None, noise: Tensor | None) -> Scaled:
    """NVFP4: an E4M3 scale for each block, within a float32 scale for the group (or for each row).

        A = max |x|,  S = 6 · 448 / A        (1 if A is 0 or ∞; at most the largest float32)
        d = E4M3(amax · (S · (1/6))),  m = 1 / (d · (1/S))        (both at most the largest float32)
        q = E2M1(x · m),   decoded as q · d · A / 2688

    Each operation is rounded, in that order. A square block's d is stored for each of its rows. NaN
    becomes +6, -0 stays -0.

    Source: cast/nvfp4/core_nvfp4.cuh, quantize_transpose_nvfp4.cuh.
    """
    x32 = round_to(x, torch.float32)
    amax = block_amax(x32, (1 if scheme.row_scaled else None, None))
    block = each_row(block_amax(x32, scheme.block), scheme)
    encoding = over(6 * scheme.scale_max, amax).clamp(max=FLOAT32_MAX)
    encoding = torch.where((amax == 0) | (encoding == 0), 1.0, encoding)
    if scheme.four_over_six:
        return _better_of_two(x32, block, amax, encoding, scheme)
    scale = encode((block * (encoding * nearest32(1 / 6))).clamp(max=FLOAT32_MAX), E4M3)
    return Scaled(_two_level_codes(x32, scale, encoding, noise), scale, amax)


def _two_level_codes(x32: Tensor, scale: Tensor, encoding: Tensor, noise: Tensor | None = None) -> Tensor:
    """The codes of x · m, m = 1 / (d · (1/S))."""
    multiplier = over(1.0, decode(scale, E4M3) * over(1.0, encoding)).clamp(max=FLOAT32_MAX)
    return encode(x32 * spread(multiplier, (1, BLOCK["nvfp4"]), x32), E2M1, noise=noise)


def _better_of_two(x32: Tensor, block: Tensor, amax: Tensor, encoding: Tensor, scheme: Scheme) -> Scaled:
    """4over6: map each block's largest value to 6, or to 4 by a scale 1.5 times as large: the
    smaller error, 6 if equal.

        d₆ = E4M3(amax / 6 · S),  d₄ = E4M3(amax / 6 · S · 1.5),   S = 6 · 256 / A, or 6 · 448 / A

    Source: cast/nvfp4/quantize_4over6_nvfp4.cuh, with errors in the original domain.
    """
    base = over(block, torch.full_like(block, 6.0)) * encoding
    scale6, scale4 = encode(base, E4M3), encode(base * 1.5, E4M3)
    codes6, codes4 = (_two_level_codes(x32, scale, encoding) for scale in (scale6, scale4))
    error6, error4 = (_errors(x32, codes, scale, amax, scheme) for codes, scale in ((codes6, scale6), (codes4, scale4)))
    pick4 = error4 < error6  # False where an error is NaN
    return Scaled(
        torch.where(spread(pick4, (1, BLOCK["nvfp4"]), x32), codes4, codes6), torch.where(pick4, scale4, scale6), amax
    )


def _errors(x32: Tensor, codes: Tensor, scale: Tensor, amax: Tensor, scheme: Scheme) -> Tensor:
    """Σ |q·d·A/denominator - x| per block, or of squares: ascending along a row, then a tree over a
    square block's rows.
    """
    size = BLOCK["nvfp4"]
    product = decode(codes, E2M1) * spread(decode(scale, E4M3), (1, size), x32) * amax
    difference = over(product, torch.full_like(product, 6 * scheme.scale_max)) - x32
    error = difference * difference if scheme.recipe.four_over_six_error == "mse" else difference.abs()
    total = torch.zeros_like(error[:, ::size])
    for i in range(size):
        total = total + error[:, i::size]
    if scheme.block[0] == 1:
        return total
    tree = total.reshape(len(total) // size, size, total.shape[1])
    while tree.shape[1] > 1:  # row r and row r + half, as a warp adds its lanes
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    return each_row(tree[:, 0], scheme)


def each_row(blocks: Tensor, scheme: Scheme) -> Tensor:
    """A row for each row of the tensor, where square blocks gave one for several."""
    return blocks.repeat_interleave(scheme.block[0] or 1, 0)


RULES = {"delayed": by_amax, "current": by_amax, "block": by_amax, "mxfp8": by_exponent, "nvfp4": by_two_levels}


def values(scaled: Scaled, scheme: Scheme) -> Tensor:
    """The values of a group's codes, in float32 and the form's own orientation.

        delayed, current, block  q · (1/s)   MXFP8  q · 2^(e - 127)   NVFP4  q · (d · A · (1/2688))

    Rounding: each operation. With A = ∞ NVFP4 gives ∞, and NaN where q or d is 0, as its kernel
    does.
    """
    element = decode(scaled.codes, scheme.format)
    if scheme.recipe.scaling == "mxfp8":
        return element * spread(decode(scaled.scale, E8M0), (1, scheme.block[1]), element)
    if scheme.recipe.scaling == "nvfp4":
        scale = decode(scaled.scale, E4M3) * scaled.amax * nearest32(1 / (6 * scheme.scale_max))
        return element * spread(scale, (1, scheme.block[1]), element)
    return element * spread(scaled.scale, scheme.block, element)


# ---- the state of delayed scaling


def update_scales(
    state: QuantizerState, recipe: Recipe, *, role: str = "input", reduced_amax: Tensor | None = None
) -> QuantizerState:
    """The state of the next step, for each group:

        last = reduced_amax if that was given and is not 0, else history[0]
        A = max(last, history[1:]), which passes over NaN, or last for "most_recent"
        scale = FMAX · 2^-margin / A, at most the largest float32, if 0 < A < ∞; else unchanged
        history = [0, history[2], …, history[L-1], last] if last is not 0; else unchanged, and A = 0

    An infinite amax stays in the history for L - 1 steps, during which the scale does not move
    ("max"). With L = 1 the history is empty.

    Args:
        role: of the tensor; grad_output has another FMAX under hybrid.
        reduced_amax: [G], the maximum over the ranks that share the scale.

    Rounding: the division, once.

    Raises:
        ValueError: a state that is not this recipe's, or a reduced_amax of another shape.

    Source: kernel_bulk of delayed_scaling.cu.
    """
    require(recipe.scaling == "delayed", "recipe", f"of scaling {recipe.scaling!r}", "delayed: only that has a state")
    check_state(recipe, state, len(state.scale))
    history_GL, last_G = state.amax_history, state.amax_history[:, 0]
    if reduced_amax is not None:
        shape = tuple(reduced_amax.shape)
        requirement = f"of shape {tuple(state.scale.shape)}"
        require(shape == tuple(state.scale.shape), "reduced_amax", f"of shape {shape}", requirement)
        last_G = torch.where(reduced_amax != 0, reduced_amax, last_G)
    seen_G = last_G != 0
    older_GL = history_GL[:, 1:]
    rolled_GL = torch.cat([torch.zeros_like(last_G)[:, None], older_GL[:, 1:], last_G[:, None]], 1)[
        :, : history_GL.shape[1]
    ]
    amax_G = last_G
    if recipe.amax_compute_algo == "max":
        all_GL = torch.cat([last_G[:, None], older_GL], 1)
        amax_G = torch.where(seen_G, torch.where(torch.isnan(all_GL), 0, all_GL).amax(1), 0)
    assert recipe.margin is not None
    proposed_G = over(scheme(recipe, role).format.max * 2.0**-recipe.margin, amax_G).clamp(max=FLOAT32_MAX)
    usable_G = torch.isfinite(amax_G) & (amax_G > 0)
    return QuantizerState(
        torch.where(seen_G[:, None], rolled_GL, history_GL), torch.where(usable_G, proposed_G, state.scale)
    )
