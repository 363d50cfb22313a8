"""quantize and dequantize: a tensor as codes of a low-precision format and scales, group by group.

Groups are the experts' segments of a permuted buffer; each is quantised as if it were alone. Rows
past the last group have code 0, enter no amax, have no scale, and come back as 0.

Mirrors the quantizers of transformer_engine.pytorch: Float8Quantizer,
Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, and their
grouped forms. Differs: docs/differences.md#quantization.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import Quantization, QuantizerState, Recipe, check_quantize, check_splits, require
from moe_ref.config.quantization import SCALE_LAYOUTS
from moe_ref.quantization.recipes import RULES, Scaled, Scheme, scheme, values
from moe_ref.rounding import round_to

# TE get_wgrad_sign_vector: "random", but always the same
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Form:
    """A tensor quantised along one direction."""

    scheme: Scheme
    columnwise: bool
    source_MN: Tensor  # the quantised values: x, or its transform; rows past the last group are 0
    groups: tuple[Scaled, ...]


@dataclass(frozen=True)
class Quantized:
    """The result of `quantize`; see `codes`, `scales`, `amax` and `dequantize`."""

    rowwise: Form | None
    columnwise: Form | None

    def form(self, columnwise: bool) -> Form:
        """The form of that direction."""
        chosen = self.columnwise if columnwise else self.rowwise
        require(chosen is not None, "columnwise", columnwise, "a direction that quantize was asked for")
        assert chosen is not None
        return chosen


def quantize(
    x_MN: Tensor, recipe: Recipe,
    *, role: str = "input", splits: Tensor | None = None, rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None, noise: Tensor | None = None,
) -> Quantization:  # fmt: skip
    """Quantise each group of rows by itself.

        for each group, direction and block:  scale = rule(max |x|),  code = encode(x · scale)

    The rules are in `moe_ref.quantization.recipes`, the blocks in its `scheme`. Blocks start at
    each group's first row and column. Both directions are made from x.

    Args:
        x_MN: float64, float32, bfloat16 or float16. float64 is rounded to float32 first: all rules
            are float32.
        recipe: the rule of scales, the formats and the blocks.
        role: "input", "weight" or "grad_output", which decides format, block and rounding.
        splits: [G] integers, rows of each group, in order; None: all rows are one group. MXFP8
            needs multiples of 32, NVFP4 of 16.
        state: delayed scaling's, of G groups: scales come from it, and max |x| goes into it.
        noise: [2,M,N] uniform in [0, 1), rowwise and columnwise, for gradients of NVFP4 with
            stochastic rounding. None: drawn from torch's generator of x's device.

    Returns:
        `Quantization`. The gradient of `dequantize(quantize(x))` is straight through, or the
        transpose of the Hadamard transform; 0 for rows past the last group.

    Raises:
        ValueError: see `moe_ref.config.check_quantize`, and `check_splits` for the values of
            splits, which an implementation that must not read the device may declare unchecked.
    """
    check_quantize(x_MN, recipe, role, splits, rowwise, columnwise, state, noise)
    sizes = [len(x_MN)] if splits is None else splits.tolist()
    check_splits(sizes, len(x_MN), recipe)
    if noise is None and scheme(recipe, role).stochastic:
        noise = torch.rand(2, *x_MN.shape, device=x_MN.device)

    def form(columnwise: bool) -> Form:
        return _form(
            x_MN,
            scheme(recipe, role, columnwise=columnwise),
            columnwise,
            sizes,
            state,
            None if noise is None else noise[int(columnwise)],
        )

    quantized = Quantized(form(False) if rowwise else None, form(True) if columnwise else None)
    if state is not None:
        amax_G1 = torch.cat([group.amax for group in quantized.form(not rowwise).groups])
        latest_G1 = torch.maximum(state.amax_history[:, :1], amax_G1)  # a step may quantise several times
        state = QuantizerState(torch.cat([latest_G1, state.amax_history[:, 1:]], 1), state.scale)
    return Quantization(quantized, state)


def _form(
    x_MN: Tensor,
    scheme: Scheme,
    columnwise: bool,
    sizes: list[int],
    state: QuantizerState | None,
    noise_MN: Tensor | None,
) -> Form:
    """One direction of all groups."""
    groups, sources, start = [], [], 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        group_MN = turned(x_MN[rows], columnwise)
        if scheme.hadamard:
            group_MN = hadamard(group_MN)
        noise = None if noise_MN is None or not scheme.stochastic else turned(noise_MN[rows], columnwise)
        scale = None if state is None else state.scale[g]
        groups.append(RULES[scheme.recipe.scaling](group_MN.detach(), scheme, scale, noise))
        sources.append(turned(group_MN, columnwise))
        start += size
    tail = torch.zeros_like(x_MN[start:])
    return Form(scheme, columnwise, torch.cat([*sources, tail]), tuple(groups))


def turned(x: Tensor, columnwise: bool) -> Tensor:
    """From logical orientation to the form's own, and back."""
    return x.T if columnwise else x


def hadamard(x_MN: Tensor) -> Tensor:
    """Transform each 16 neighbours of a row: y_j = Σ_i x_i · sign_i · H_ij / 4, H_ij = (-1)^(number
    of ones in i & j).

    Orthogonal: Σ_j y_j · z_j = Σ_i x_i · z'_i for the transforms of both, so wgrad, which contracts
    two transformed tensors, needs no inverse.

    Rounding: products are exact, sums in float32 in ascending i, one rounding to x's dtype.
    Hardware may add in another order.

    Source: hadamard_transform of transformer_engine/common; NVFP4QuantizerRef._apply_rht.
    """
    size = len(HADAMARD_SIGNS)
    x = round_to(x_MN, torch.float32).reshape(x_MN.shape[0], x_MN.shape[1] // size, size)
    total = torch.zeros_like(x)
    for i, sign in enumerate(HADAMARD_SIGNS):
        row = torch.tensor(
            [sign * (-1) ** (i & j).bit_count() / 4 for j in range(size)], dtype=torch.float32, device=x_MN.device
        )
        total = total + x[:, :, i : i + 1] * row
    return round_to(total.reshape(x_MN.shape), x_MN.dtype)


def codes(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The codes, [M,N] uint8, one per element and never transposed; 0 in rows past the last group.

    An E2M1 code is in the low four bits.

    Raises:
        ValueError: a direction that `quantize` was not asked for; `scales`, `amax` and `dequantize`
            raise it too.
    """
    form = quantized.form(columnwise)
    return _rows(form, lambda group: group.codes).to(torch.uint8)


def _rows(form: Form, what: Callable[[Scaled], Tensor]) -> Tensor:
    """[M,N] of a field of the groups, in logical orientation; 0 past the last group."""
    group_rows = [turned(what(group), form.columnwise) for group in form.groups]
    padding_rows = len(form.source_MN) - sum(len(rows) for rows in group_rows)
    return torch.cat([*group_rows, group_rows[0].new_zeros(padding_rows, form.source_MN.shape[1])])


def scales(quantized: Quantized, *, columnwise: bool = False, layout: str = "compact") -> Any:
    """The scales to decode with: float32 1/s, uint8 codes of E8M0 (MXFP8) or E4M3 (NVFP4).

    compact: one tensor, in logical orientation, of valid scales only (R: rows of all groups):

        delayed, current    [G]
        block 1×128         [R, ⌈N/128⌉]            columnwise  [Σ_g ⌈M_g/128⌉, N]
        block 128×128       [Σ_g ⌈M_g/128⌉, ⌈N/128⌉], in both directions
        MXFP8, B = 32       [R, N/B]                columnwise  [R/B, N]
        NVFP4, B = 16       [R, N/B]                columnwise  [R/B, N]

    gemm: a tuple of a tensor per group, as matrix products read them, padded with zeros. With m, n
    the sides in the form's own orientation, transposed for columnwise, and ⌈·⌉ₐ the next multiple
    of a:

        delayed, current    [1]
        block 1×128         [⌈n/128⌉, ⌈m⌉₄], transposed
        block 128×128       [⌈m/128⌉, ⌈⌈n/128⌉⌉₄]
        MXFP8, NVFP4        [⌈m⌉₁₂₈ · ⌈n/B⌉₄], 128×4 tiles; rows r, r+32, r+64, r+96 are neighbours

    Raises:
        ValueError: an unknown layout.

    Source: get_scale_shape of the quantizers; common/swizzle/swizzle.cu.
    """
    require(layout in SCALE_LAYOUTS, "layout", repr(layout), f"one of {', '.join(SCALE_LAYOUTS)}")
    form = quantized.form(columnwise)
    if layout == "gemm":
        return tuple(_for_gemm(group.scale, form.scheme) for group in form.groups)
    stacked = torch.cat([turned(group.scale, columnwise) for group in form.groups])
    return stacked.flatten() if form.scheme.block == (None, None) else stacked


def _for_gemm(scale: Tensor, scheme: Scheme) -> Tensor:
    """One group's scales, as a matrix product reads them."""
    scaling = scheme.recipe.scaling
    if scaling in ("delayed", "current"):
        return scale.flatten()
    if scaling == "block":
        return _padded(scale.T if scheme.block[0] == 1 else scale, 1, 4)
    tiles = _padded(scale, 128, 4)
    rows, columns = tiles.shape
    return tiles.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def _padded(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros after the last row and column, up to multiples."""
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % columns, 0, -scale.shape[0] % rows))


def amax(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """max |x| from which the scales were computed, float32; of the transform if there is one.

    delayed, current, NVFP4: [G] · NVFP4 row-scaled: [R], columnwise [G,N] · block, MXFP8: of the
    shape of the compact scales. For delayed scaling it is this step's maximum, not the one the
    scale came from.
    """
    form = quantized.form(columnwise)
    stacked = torch.cat([turned(group.amax, columnwise) for group in form.groups])
    per_row = form.scheme.row_scaled and columnwise
    return stacked if form.scheme.recipe.scaling in ("block", "mxfp8") or per_row else stacked.flatten()


class _StraightThrough(torch.autograd.Function):
    """value in the forward, source's gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None]:
        return dvalue, None


def dequantize(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The values of the codes, [M,N] in x's dtype; 0 in rows past the last group.

    Columnwise gradients and inputs of NVFP4 with a Hadamard transform come back transformed, as
    wgrad uses them.

    Rounding: code · scale in float32 (see `moe_ref.quantization.recipes.values`), then once to x's
    dtype. The gradient is straight through.
    """
    form = quantized.form(columnwise)
    value = _rows(form, lambda group: values(group, form.scheme))
    return _StraightThrough.apply(form.source_MN, round_to(value, form.source_MN.dtype))
