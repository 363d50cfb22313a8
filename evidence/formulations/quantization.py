"""Quantisers in a second formulation: codes by a search in a list of values, scales block by block.

All arithmetic of scales is in float32, as the rules ask. numpy rounds each operation.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evidence.formulations.number_formats import LARGEST, decode, encode
from moe_ref.config import Quantization, QuantizerState, Recipe
from moe_ref.config.quantization import BLOCK
from moe_ref.config.state import new_quantizer_state as new_quantizer_state

F32 = np.float32
FLOAT32_MAX = np.finfo(F32).max
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)  # signs of the Hadamard transform
Array = np.ndarray


def nearest(x: Tensor, name: str) -> Tensor:
    """The values of x's codes in a format, in the dtype of x."""
    codes = encode(x.float().double().numpy(), name)
    return torch.from_numpy(decode(codes, name)).to(x.dtype)


@dataclass(frozen=True)
class Rule:
    """What the recipe, the role and the direction say about a form."""

    recipe: Recipe
    role: str
    columnwise: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The format of the codes."""
        if self.recipe.scaling == "nvfp4":
            return "e2m1"
        return "e5m2" if self.recipe.fp8_format == "hybrid" and self.role == "grad_output" else "e4m3"

    @property
    def square(self) -> bool:
        return bool(self.recipe.two_dimensional_weights) and self.role == "weight"

    @property
    def transformed(self) -> bool:
        return bool(self.recipe.hadamard) and self.role != "weight" and self.columnwise

    @property
    def by_rows(self) -> bool:
        return bool(self.recipe.row_scaled_activation) and self.role == "input"

    def within(self, scope: str | None) -> bool:
        """Whether a scope of the recipe holds this role."""
        return scope in {"input": ("activations", "all"), "weight": ("weights", "all"), "grad_output": ()}[self.role]


@dataclass
class Group:
    """One group of rows, in the orientation of its form."""

    codes: Array
    scale: Array
    amax: Array
    values: Array


@dataclass
class Form:
    """A tensor along one direction."""

    rule: Rule
    groups: list[Group] = field(default_factory=list)
    source: Any = None  # the tensor whose gradient is that of the result


@dataclass
class Quantized:
    """Both forms, and the shape."""

    forms: dict[bool, Form]
    shape: tuple[int, int]


def amax_of(x: Array) -> Any:
    """The maximum of |x|, ignoring NaN; 0 if there are no values."""
    return np.fmax.reduce(np.abs(x).ravel(), initial=0.0)


def blocks(shape: tuple[int, int], rows: int, columns: int) -> list[tuple[int, int, slice, slice]]:
    """(i, j, rows, columns) of each block."""
    return [
        (i, j, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        for i in range(-(-shape[0] // rows))
        for j in range(-(-shape[1] // columns))
    ]


def by_amax(x: Array, rule: Rule, delayed_scale: Any) -> Group:
    """A float32 scale for each block, or for all values."""
    recipe = rule.recipe
    size = BLOCK.get(recipe.scaling)
    shape = (max(len(x), 1), max(x.shape[1], 1)) if size is None else (size if rule.square else 1, size)
    cuts = [(0, 0, slice(None), slice(None))] if size is None else blocks(x.shape, *shape)
    counts = (1, 1) if size is None else (-(-len(x) // shape[0]), -(-x.shape[1] // shape[1]))
    half = recipe.scaling == "block" and rule.dtype in (torch.bfloat16, torch.float16)
    most = F32(torch.finfo(rule.dtype).max) if half else FLOAT32_MAX
    out = Group(np.zeros(x.shape, np.uint8), np.zeros(counts, F32), np.zeros(counts, F32), np.zeros(x.shape, F32))
    for i, j, rows, columns in cuts:
        block = x[rows, columns]
        out.amax[i, j] = amax_of(block)
        if delayed_scale is None:
            a = max(out.amax[i, j], F32(recipe.amax_epsilon or 0.0))
            scale = F32(1) if a == 0 or np.isinf(a) else min(F32(LARGEST[rule.name]) / a, most)
            if np.isinf(scale):
                scale = most
            if recipe.power_of_two_scales:
                scale = F32(2.0 ** (int(np.frexp(scale)[1]) - 1))
        else:
            scale = F32(delayed_scale)
        out.codes[rows, columns] = encode((block * scale).astype(np.float64), rule.name)
        out.scale[i, j] = F32(1) / scale
        out.values[rows, columns] = decode(out.codes[rows, columns], rule.name).astype(F32) * out.scale[i, j]
    return out


def by_exponent(x: Array, rule: Rule) -> Group:
    """A power of two per block of 32."""
    counts = (len(x), x.shape[1] // 32)
    out = Group(np.zeros(x.shape, np.uint8), np.zeros(counts, np.uint8), np.zeros(counts, F32), np.zeros(x.shape, F32))
    height = 32 if rule.square else 1
    for _, j, rows, columns in blocks(x.shape, height, 32):
        block, amax = x[rows, columns], F32(amax_of(x[rows, columns]))
        code = encode(np.array(amax * F32(1 / LARGEST[rule.name]), np.float64), "e8m0")
        out.amax[rows, j], out.scale[rows, j] = amax, code
        codes = encode((block * F32(2.0 ** (127 - int(code)))).astype(np.float64), rule.name)
        out.codes[rows, columns] = codes
        out.values[rows, columns] = decode(codes, rule.name).astype(F32) * F32(2.0 ** (int(code) - 127))
    return out


def by_two_levels(x: Array, rule: Rule, noise: Array | None) -> Group:
    """An E4M3 scale per block of 16, within a float32 scale of the group or of the row."""
    four = rule.within(rule.recipe.four_over_six)
    bound = F32(256 if four and rule.within(rule.recipe.four_over_six_bound_256) else 448)
    group_amaxes = np.array([[amax_of(row)] for row in x] if rule.by_rows else [[amax_of(x)]], F32).reshape(-1, 1)
    counts = (len(x), x.shape[1] // 16)
    out = Group(np.zeros(x.shape, np.uint8), np.zeros(counts, np.uint8), group_amaxes, np.zeros(x.shape, F32))
    height = 16 if rule.square else 1
    for i, j, rows, columns in blocks(x.shape, height, 16):
        block, amax = x[rows, columns], F32(amax_of(x[rows, columns]))
        total = group_amaxes[i if rule.by_rows else 0, 0]
        encoding = F32(1) if total == 0 else min(F32(6) * bound / total, FLOAT32_MAX)
        encoding = F32(1) if encoding == 0 else encoding
        if four:
            base = amax / F32(6) * encoding
            tried = [_e4m3(base), _e4m3(base * F32(1.5))]
            coded = [_codes(block, d, encoding) for d in tried]
            errors = [_error(block, q, d, total, bound, rule) for q, d in zip(coded, tried, strict=True)]
            best = int(errors[1] < errors[0])
            d, q = tried[best], coded[best]
        else:
            d = _e4m3(min(amax * (encoding * F32(1 / 6)), FLOAT32_MAX))
            q = _codes(block, d, encoding, None if noise is None else noise[rows, columns])
        out.scale[rows, j], out.codes[rows, columns] = d, q
        level = F32(decode(d, "e4m3")) * total * F32(1 / (6 * float(bound)))
        out.values[rows, columns] = decode(q, "e2m1").astype(F32) * level
    return out


def _e4m3(x: Any) -> Array:
    return encode(np.array(x, np.float64), "e4m3")


def _codes(block: Array, d: Array, encoding: Any, noise: Array | None = None) -> Array:
    multiplier = min(F32(1) / (F32(decode(d, "e4m3")) * (F32(1) / encoding)), FLOAT32_MAX)
    return encode((block * multiplier).astype(np.float64), "e2m1", noise)


def _error(block: Array, q: Array, d: Array, total: Any, bound: Any, rule: Rule) -> Any:
    """The error of a block: summed along each row, then by adding halves of the rows to each
    other.
    """
    values = decode(q, "e2m1").astype(F32) * F32(decode(d, "e4m3")) * total / (F32(6) * bound)
    off = values - block
    sizes = off * off if rule.recipe.four_over_six_error == "mse" else np.abs(off)
    sums = []
    for row in sizes:
        partial = F32(0)
        for size in row:
            partial = partial + size
        sums.append(partial)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def hadamard_matrix() -> Array:
    """The matrix [16,16]: signs · H / 4, with H by doubling."""
    h = np.ones((1, 1), F32)
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return (SIGNS[:, None] * h / 4).astype(F32)


def hadamard(x: Array) -> Array:
    """Each 16 neighbours of a row, ascending in the inputs."""
    matrix, out = hadamard_matrix(), np.zeros_like(x)
    with np.errstate(all="ignore"):
        for i in range(16):
            out += np.repeat(x[:, i::16], 16, 1) * np.tile(matrix[i], x.shape[1] // 16)
    return out


def quantize(
    x_MN: Tensor, recipe: Recipe, *, role: str = "input", splits: Tensor | None = None, rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None, noise: Tensor | None = None,
) -> Quantization:  # fmt: skip
    """Each group by itself, in each direction."""
    sizes = [len(x_MN)] if splits is None else splits.tolist()
    stochastic = recipe.scaling == "nvfp4" and recipe.stochastic_rounding and role == "grad_output"
    if noise is None and stochastic:
        noise = torch.rand(2, *x_MN.shape)
    forms = {}
    for turned in (turned for turned, wanted in ((False, rowwise), (True, columnwise)) if wanted):
        rule = Rule(recipe, role, turned, x_MN.dtype)
        form, begin = Form(rule), 0
        for g, size in enumerate(sizes):
            rows = slice(begin, begin + size)
            x = x_MN.detach()[rows].float().numpy()
            group_noise = None if noise is None else noise[int(turned)][rows].double().numpy()
            x, group_noise = (x.T, None if group_noise is None else group_noise.T) if turned else (x, group_noise)
            if rule.transformed:
                x = torch.from_numpy(hadamard(x)).to(x_MN.dtype).float().numpy()
            delayed_scale = None if state is None else float(state.scale[g])
            group_noise = group_noise if stochastic else None
            with np.errstate(all="ignore"):
                form.groups.append(_group(np.ascontiguousarray(x), rule, delayed_scale, group_noise))
            begin += size
        form.source = _source(x_MN, rule, begin)
        forms[turned] = form
    if state is not None:
        amaxes = torch.tensor([float(group.amax[0, 0]) for group in next(iter(forms.values())).groups])
        history = state.amax_history.clone()
        history[:, 0] = torch.maximum(history[:, 0], amaxes)
        state = QuantizerState(history, state.scale)
    return Quantization(Quantized(forms, (x_MN.shape[0], x_MN.shape[1])), state)


def _group(x: Array, rule: Rule, delayed_scale: Any, noise: Array | None) -> Group:
    if rule.recipe.scaling == "mxfp8":
        return by_exponent(x, rule)
    return by_two_levels(x, rule, noise) if rule.recipe.scaling == "nvfp4" else by_amax(x, rule, delayed_scale)


def _source(x_MN: Tensor, rule: Rule, rows: int) -> Tensor:
    """The tensor to which a gradient goes: the rows of all groups, or their transform along
    tokens.
    """
    group_rows = x_MN[:rows]
    if rule.transformed:
        matrix = torch.from_numpy(hadamard_matrix()).to(x_MN.dtype)
        blocks = group_rows.unflatten(0, (rows // 16, 16))
        group_rows = torch.einsum("bin,ij->bjn", blocks, matrix).flatten(0, 1)
    return torch.cat([group_rows, torch.zeros_like(x_MN[rows:])])


def _joined_groups(quantized: Quantized, columnwise: bool, name: str) -> Tensor:
    """[M,N] of codes or values, zeros past the last group."""
    form = quantized.forms[columnwise]
    rows = _rows_of([getattr(group, name) for group in form.groups], columnwise)
    return torch.cat([rows, rows.new_zeros(quantized.shape[0] - len(rows), quantized.shape[1])])


def codes(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """A code per element."""
    return _joined_groups(quantized, columnwise, "codes")


def scales(quantized: Quantized, *, columnwise: bool = False, layout: str = "compact") -> Any:
    """The scales one after the other, or for each group as a product reads them."""
    form = quantized.forms[columnwise]
    if layout == "gemm":
        return tuple(torch.from_numpy(_for_products(group.scale, form.rule)) for group in form.groups)
    all_scales = _rows_of([group.scale for group in form.groups], columnwise)
    return all_scales.flatten() if form.rule.recipe.scaling in ("delayed", "current") else all_scales


def _rows_of(groups: list[Array], columnwise: bool) -> Tensor:
    """The values of all groups one below the other, in the orientation of the tensor."""
    return torch.from_numpy(np.concatenate([x.T if columnwise else x for x in groups]).copy())


def _for_products(scale: Array, rule: Rule) -> Array:
    scaling = rule.recipe.scaling
    if scaling in ("delayed", "current"):
        return scale.ravel()
    if scaling == "block":
        turned = scale if rule.square else scale.T
        return np.concatenate([turned, np.zeros((len(turned), -turned.shape[1] % 4), scale.dtype)], 1)
    rows, columns = -(-len(scale) // 128) * 128, -(-scale.shape[1] // 4) * 4
    out = np.zeros(rows * columns, scale.dtype)
    for r in range(len(scale)):
        for c in range(scale.shape[1]):
            tile, row_in_tile = r // 128 * (columns // 4) + c // 4, r % 128
            out[tile * 512 + row_in_tile % 32 * 16 + row_in_tile // 32 * 4 + c % 4] = scale[r, c]
    return out


def amax(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The amax of each block; for NVFP4 of each group, or of each row."""
    form = quantized.forms[columnwise]
    all_amaxes = _rows_of([group.amax for group in form.groups], columnwise)
    is_per_block = form.rule.recipe.scaling in ("block", "mxfp8") or (form.rule.by_rows and columnwise)
    return all_amaxes if is_per_block else all_amaxes.flatten()


class Through(torch.autograd.Function):
    """The value; the gradient goes to the source."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, d_value: Tensor) -> tuple[Tensor, None]:
        return d_value, None


def dequantize(quantized: Quantized, *, columnwise: bool = False) -> Tensor:
    """The codes' values in the dtype of x."""
    form = quantized.forms[columnwise]
    return Through.apply(form.source, _joined_groups(quantized, columnwise, "values").to(form.rule.dtype))


def update_scales(
    state: QuantizerState, recipe: Recipe, *, role: str = "input", reduced_amax: Tensor | None = None
) -> QuantizerState:
    """The new scales, group by group."""
    largest = LARGEST[Rule(recipe, role, False, torch.float32).name]
    histories, new_scales = [], []
    for g, scale in enumerate(state.scale.tolist()):
        history = state.amax_history[g].tolist()
        if reduced_amax is not None and float(reduced_amax[g]) != 0:
            history[0] = float(reduced_amax[g])
        last = history[0]
        numbers = [v for v in history if v == v] if recipe.amax_compute_algo == "max" else [last]
        top = max(numbers, default=0.0) if last != 0 else 0.0
        with np.errstate(all="ignore"):
            step = min(F32(largest * 2.0 ** -(recipe.margin or 0)) / F32(top), FLOAT32_MAX)
        new_scales.append(float(step) if 0 < top < np.inf else scale)
        rolled = [0.0, *history[2:], last][: len(history)]
        histories.append(rolled if last != 0 else state.amax_history[g].tolist())
    return QuantizerState(torch.tensor(histories), torch.tensor(new_scales))


# ---- factors of products


FORMS = {  # for each product, the role, and whether its form is columnwise
    "fprop": {"weight": False, "input": False},
    "dgrad": {"weight": True, "grad_output": False},
    "wgrad": {"input": True, "grad_output": True},
}


def factor(
    x: Tensor, counts: Tensor | None, role: str, product: str, *, recipe: Recipe | None, state: Any, noise: Any
) -> Tensor:
    """x as a factor, in float64, or its codes' values. Without counts, a weight per expert."""
    if recipe is None:
        return x.double()
    columnwise, override = FORMS[product][role], recipe.backward_override
    if product != "fprop" and override is not None:
        if override == "high_precision" or role == "grad_output":
            return x.double()
        columnwise = False
    flat = x if counts is not None else x.reshape(-1, x.shape[-1])
    splits = counts if counts is not None else torch.full((len(x),), x.shape[1])
    role_state = None if state is None else getattr(state, role)
    directions: dict[str, Any] = {"rowwise": not columnwise, "columnwise": columnwise, "state": role_state}
    directions |= {"noise": noise if role == "grad_output" else None}
    quantized = quantize(flat, recipe, role=role, splits=splits, **directions).quantized
    values = _joined_groups(quantized, columnwise, "values")
    rounds_to_dtype = product != "fprop" and override == "dequantized"
    return (values.to(x.dtype) if rounds_to_dtype else values).double().reshape(x.shape)
