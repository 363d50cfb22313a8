"""Grouped products of quantised factors: recipes and what goes with them, what the codes of a factor stand for, and how far an honest
factor may be from there.

Codes are exact, as `quantize` has them: a product is judged by what the reference's codes stand for. Where `scale_arithmetic`
"reciprocal" is declared, codes near a midpoint, and NVFP4's scales of blocks, may have been decided the other way (see
`quantized_form`): the product may be as far away as that takes it, and its row is not compared with the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.core.tensors import hashed, payload, row_scales
from conformance.families.quantization.cases import (
    RECIPES,
    ROLES,
    TRANSFORMED,
    UNIT,
    VARIANTS,
    QuantizeCase,
    noise_of,
    x_of,
)
from conformance.interface import named_outputs
from conformance.judge.bound import FLOAT32, ROUNDOFF, Accumulator
from conformance.judge.codes import RECIPROCAL
from moe_ref.config import LinearState, Operand, QuantizerState, Recipe
from moe_ref.config.quantization import BLOCK, OVERRIDES
from moe_ref.quantization.formats import E4M3, Format, decode, encode
from moe_ref.quantization.quantize import Form, quantize, turned
from moe_ref.quantization.recipes import (
    FLOAT32_MAX,
    Scaled,
    Scheme,
    block_amax,
    each_row,
    operands,
    scheme,
    spread,
    values,
)
from moe_ref.rounding import round_to

LOW_VALUES = (
    "columns",
    "patches",
    "bounds",
    "midpoints",
    "zeros",
)  # as `factor_of` makes them, where a quantiser decides
PATCH, PATCH_SPREAD = (
    32,
    6,
)  # side of a patch where scales belong to no blocks, and by how many powers of two it is above or below 1
SCALED = 8  # roundings of float32 in what scales do to a product: three in each value of NVFP4's, or in one factor for both, and the product with it
SCALED_BY_RECIPROCALS = 16  # and each scale up to five roundings off
MOST_SEEN = 3.0  # what the steps before saw lies between 1 and this; a payload goes up to 2: some groups are cut off, others lose a bit


# ---- cases


def recipe_of(case: Any) -> Recipe | None:
    if not case.scaling:
        return None
    recipe = RECIPES[case.scaling][case.variant]
    return replace(recipe, backward_override=case.override) if case.override else recipe


def unit_of(case: Any) -> int:
    """What rows of an expert and columns of a case are counted in."""
    return UNIT.get(case.scaling, 1)


def check_scaling(case: Any) -> None:
    if not 0 <= case.variant < (VARIANTS if case.scaling else 1):
        raise ValueError(f"variant is {case.variant}; it must be from 0 to {VARIANTS - 1}, and 0 without a scaling")
    if case.override and not may_override(case.scaling):
        raise ValueError(
            f"override is {case.override!r} with scaling {case.scaling!r}; it must be empty, or the scaling one that remembers nothing"
        )
    if case.values in LOW_VALUES and not case.scaling:
        raise ValueError(f"values is {case.values!r}; that is made for a scaling")


def may_override(scaling: str) -> bool:
    """Whether there are recipes of this scaling with a backward_override."""
    return scaling not in ("", "delayed")


def other_override(override: str) -> str:
    """Another one, where there is one."""
    return override and next(word for word in OVERRIDES if word != override)


def transforms_rows(recipe: Recipe | None) -> bool:
    """Whether the weight's gradient takes a Hadamard transform of the rows."""
    return recipe is not None and bool(recipe.hadamard) and recipe.backward_override is None


def rounds_gradients(recipe: Recipe | None) -> bool:
    """Whether a backward takes noise."""
    return recipe is not None and bool(recipe.stochastic_rounding) and recipe.backward_override is None


def fits(case: Any) -> bool:
    """Whether the reference takes the call, and quantises alike in whatever order it adds."""
    if case.values == "bounds" and case.dtype == "float64":
        return False  # the numbers next to a float64 one are no others in float32
    transformed = transforms_rows(recipe_of(case)) and (
        case.function == "grouped_wgrad" or "weight" in case.grads.split("+")
    )
    return not transformed or (case.dtype == "bfloat16" and case.values in (*TRANSFORMED, "columns"))


def quantized_like(case: Any, role: str, columns: int) -> QuantizeCase:
    """The case of a tensor that is quantised on its way into the product; sizes are in units."""
    rows = {"tokens": case.tokens, "counts": case.counts, "tail": case.tail}
    sized: dict[str, Any] = rows if role != "weight" else {"tokens": case.experts * case.width}
    common = {name: getattr(case, name) for name in ("scaling", "variant", "experts", "dtype", "values")}
    seed = 3 * case.seed  # others have a band of zeros, which is often all that there is
    return QuantizeCase(function="quantize", role=role, hidden=columns, seed=seed, **common, **sized)


def factor_of(case: Any, name: str) -> Tensor:
    """[P,N] rows, [P,M] cotangents, or [L,M,N] weights.

    rows, columns  dyadic, each row or column times a power of two: what lies across it must share no scale
    patches        dyadic, each patch as large as a square block times a power of two
    others         as in `x_of`
    """
    role, columns = {
        "rows": ("input", case.hidden),
        "weight": ("weight", case.hidden),
        "d_out": ("grad_output", case.width),
    }[name]
    like = quantized_like(case, role, columns)
    x = _spread_out(case, like, name) if case.values in ("rows", "columns", "patches") else x_of(like, name)
    return x.reshape(case.experts, unit_of(case) * case.width, x.shape[1]) if name == "weight" else x


def _spread_out(case: Any, like: QuantizeCase, name: str) -> Tensor:
    shape = like.tokens * unit_of(case) + like.tail, like.hidden * unit_of(case)
    x = payload(case.seed, name, shape, case.dtype)
    if case.values != "patches":
        power = row_scales(case.seed, shape[0]) if case.values == "rows" else row_scales(case.seed, shape[1]).T
    else:
        side = BLOCK.get(case.scaling, PATCH)
        tall, wide = (-(-n // side) for n in shape)
        powers = torch.from_numpy(
            np.exp2(hashed(case.seed, f"{name} patches", tall * wide) % (2 * PATCH_SPREAD + 1) - float(PATCH_SPREAD))
        )
        power = powers.reshape(tall, wide).repeat_interleave(side, 0).repeat_interleave(side, 1)[: shape[0], : shape[1]]
    return (x.double() * power).to(x.dtype)


def recipe_settings(case: Any) -> dict[str, Any]:
    """The recipe, and noise where gradients are rounded by it."""
    recipe = recipe_of(case)
    if recipe is None:
        return {}
    random = rounds_gradients(recipe) and (case.function in ("grouped_dgrad", "grouped_wgrad") or case.grads)
    return {"recipe": recipe} | ({"noise": noise_of(quantized_like(case, "grad_output", case.width))} if random else {})


def state_tensors(case: Any, prefix: str = "state") -> dict[str, Tensor]:
    """What delayed scaling remembers of each tensor and expert, by a name that says whose it is; nothing for other scalings."""
    recipe = recipe_of(case)
    if recipe is None or recipe.scaling != "delayed":
        return {}
    found: dict[str, Tensor] = {}
    for role in ROLES:
        largest = scheme(recipe, role).format.max
        noise = hashed(
            case.seed, f"{role} seen{prefix.removeprefix('state')}", case.experts * (recipe.amax_history_len or 1)
        ).reshape(case.experts, -1)
        seen = torch.from_numpy(1 + (MOST_SEEN - 1) * (noise % 1000 / 1000)).float()
        last = torch.full((case.experts,), largest) if case.values == "midpoints" else seen[:, -1]
        found |= {
            f"{prefix}.{role}.amax_history": seen,
            f"{prefix}.{role}.scale": torch.full_like(last, largest * 2.0 ** -(recipe.margin or 0)) / last,
        }
    return found


def state_from(given: Mapping[str, Any], prefix: str = "state") -> LinearState | None:
    """The state that those tensors are of; None where there are none."""
    if f"{prefix}.input.scale" not in given:
        return None
    return LinearState(
        *(QuantizerState(given[f"{prefix}.{role}.amax_history"], given[f"{prefix}.{role}.scale"]) for role in ROLES)
    )


def script_of(
    function: str, arguments: tuple[str, ...], settings: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """The call, with the state put together of its tensors."""

    def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        known = {name: given[name] for name in settings if name in given} | {"state": state_from(given)}
        return named_outputs(implementation.call(function, *(given[name] for name in arguments), **known), outputs)

    return script


# ---- factors


@dataclass(frozen=True)
class Factor:
    """One expert's part of a factor."""

    value: Tensor  # float64, in logical orientation: what its codes stand for
    margin: Tensor | None = None  # float64: how far away another code is that may have been chosen; None: nowhere
    aligned: Tensor | None = None  # float64: the size that a matrix unit takes a number for; None: its own

    @property
    def turned(self) -> "Factor":
        """Transposed."""
        return Factor(self.value.T, *(None if x is None else x.T for x in (self.margin, self.aligned)))


@dataclass(frozen=True)
class Precision:
    """What the factors of a product become before it is taken, and what it is added in: as the call asks, and as is declared."""

    accumulator: Accumulator = FLOAT32
    reciprocal: bool = False
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # of the reference's functions: accumulator, recipe, state, noise
    scaled: bool = True  # with a recipe: whether the product is of codes and scales

    @property
    def recipe(self) -> Recipe | None:
        return self.settings.get("recipe")

    @property
    def sums(self) -> Accumulator:
        """What is added in that is no product of codes."""
        return FLOAT32 if self.accumulator.block else self.accumulator

    @property
    def roundings(self) -> int:
        """Of float32, that scales bring to a product."""
        if self.recipe is None or not self.scaled:
            return 0
        return SCALED_BY_RECIPROCALS if self.reciprocal else SCALED

    def of(self, gemm: str) -> "Precision":
        """The same of one product: that of a backward with a backward_override is one of high precision."""
        scaled = self.recipe is None or gemm == "fprop" or self.recipe.backward_override is None
        return self if scaled else replace(self, accumulator=self.sums, scaled=False)

    def rows(self, x_PN: Tensor, counts: Tensor, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows."""
        operand = None if self.recipe is None else operand_of(gemm, self.recipe, role)
        if self.recipe is None or operand is None or operand.kept == "stored":
            return [Factor(own.double()) for own in x_PN[: int(counts.sum())].split(counts.tolist())]
        columnwise = operand.columnwise
        state = None if self.settings.get("state") is None else getattr(self.settings["state"], role)
        noise = self.settings.get("noise") if role == "grad_output" else None
        made = quantize(
            x_PN.detach(),
            self.recipe,
            role=role,
            splits=counts,
            rowwise=not columnwise,
            columnwise=columnwise,
            state=state,
            noise=noise,
        )
        found = self._of_form(made.quantized.form(columnwise))
        return (
            [dequantised(factor, x_PN.dtype, self.reciprocal) for factor in found]
            if operand.kept == "dequantized"
            else found
        )

    def weights(self, weight_LMN: Tensor, gemm: str) -> list[Factor]:
        """Each expert's weight."""
        experts, width, hidden = weight_LMN.shape
        return self.rows(weight_LMN.reshape(experts * width, hidden), torch.full((experts,), width), "weight", gemm)

    def _of_form(self, form: Form) -> list[Factor]:
        loose = self.reciprocal and may_be_others(form.scheme)
        sizes = [turned(group.codes, form.columnwise).shape[0] for group in form.groups]
        found = []
        for group, own in zip(form.groups, form.source_MN[: sum(sizes)].split(sizes), strict=True):
            value = values(group, form.scheme).double()
            if form.scheme.recipe.scaling == "nvfp4":  # over an infinity codes and scales say nothing
                value = torch.where(group.amax.isinf(), torch.inf, value)
            margin = (
                turned(margin_of(group, turned(own, form.columnwise).detach().float(), form.scheme), form.columnwise)
                if loose
                else None
            )
            aligned = (
                turned(aligned_size(value, group, form.scheme), form.columnwise) if self.accumulator.block else None
            )
            found.append(Factor(turned(value, form.columnwise), margin, aligned))
        return found


def operand_of(gemm: str, recipe: Recipe, role: str) -> Operand:
    """Which form of a tensor a product reads."""
    return next(operand for operand in operands(gemm, recipe) if operand.role == role)


def dequantised(factor: Factor, dtype: torch.dtype, reciprocal: bool) -> Factor:
    """What codes come back as in the dtype of what was quantised: the same for everybody, unless a code or a scale may be another."""
    off = torch.zeros_like(factor.value) if factor.margin is None else factor.margin
    off = off + SCALED_BY_RECIPROCALS * ROUNDOFF[torch.float32] * factor.value.abs() if reciprocal else off
    off = torch.where(factor.value.isfinite(), off, 0.0)
    ends = [round_to((factor.value + side * off).float(), dtype).double() for side in (-1, 0, 1)]
    margin = torch.maximum(ends[1] - ends[0], ends[2] - ends[1])
    return Factor(
        ends[1], None if factor.margin is None and not reciprocal else torch.where(margin.isnan(), 0.0, margin)
    )


def aligned_size(value: Tensor, group: Scaled, scheme: Scheme) -> Tensor:
    """|value|, and for a code that is subnormal what the smallest normal one stands for.

    A matrix unit that keeps so many bits of a sum counts them from the largest exponent of its terms, and the exponent of a subnormal code
    is that of the smallest normal one: measured on an H200, where a product of a subnormal lost three bits more.
    """
    smallest = Scaled(torch.full_like(group.codes, 1 << scheme.format.mantissa_bits), group.scale, group.amax)
    return torch.where(value == 0, 0.0, torch.maximum(value.abs(), values(smallest, scheme).double()))


# ---- codes that may be others


def may_be_others(scheme: Scheme) -> bool:
    """Whether a scale by a reciprocal may decide a code the other way: not where it is a power of two, nor by a sum of errors, nor by noise."""
    recipe = scheme.recipe
    return not (recipe.power_of_two_scales or recipe.scaling == "mxfp8" or scheme.four_over_six or scheme.stochastic)


def margin_of(group: Scaled, own: Tensor, scheme: Scheme) -> Tensor:
    """How far from its value each code's other choices are; 0 where it has none."""
    if scheme.recipe.scaling != "nvfp4":
        scale = spread(group.scale.double(), scheme.block, own)
        return step_across(own / scale, scheme.format) * scale
    encoding = 6 * scheme.scale_max / group.amax.double()
    encoding = torch.where((group.amax == 0) | (encoding == 0), 1.0, encoding.clamp(max=FLOAT32_MAX))
    wanted = (each_row(block_amax(own, scheme.block), scheme).double() / 6 * encoding).clamp(max=E4M3.max)
    first = decode(group.scale, E4M3, dtype=torch.float64)
    step = step_across(wanted, E4M3)
    second = torch.where(wanted < first, first - step, first + step)
    value, far = values(group, scheme).double(), torch.zeros_like(own, dtype=torch.float64)
    for chosen in (first, second):
        scale = spread(chosen / encoding, (1, BLOCK["nvfp4"]), own)
        scaled = torch.where(scale > 0, own / scale, 0.0)
        other = decode(encode(scaled, scheme.format), scheme.format, dtype=torch.float64) * scale
        moved = torch.where(spread(step, (1, BLOCK["nvfp4"]), own) > 0, (other - value).abs(), 0.0)
        far = torch.maximum(far, moved + step_across(scaled, scheme.format) * scale)
    return far.nan_to_num(0.0, 0.0, 0.0)  # where the value is none, so is the product


def step_across(scaled: Tensor, format: Format) -> Tensor:
    """How far apart the two codes are between which `scaled` lies so near the middle that a reciprocal may decide; 0 elsewhere."""
    table = decode(torch.arange(format.max_code + 1, dtype=torch.uint8), format, dtype=torch.float64).numpy()
    middle, size = (table[1:] + table[:-1]) / 2, scaled.abs().nan_to_num(0.0).numpy()
    above = np.clip(np.searchsorted(middle, size), 1, len(middle) - 1)
    nearest = np.where(np.abs(middle[above] - size) < np.abs(middle[above - 1] - size), above, above - 1)
    near = np.abs(middle[nearest] - size) <= RECIPROCAL * size
    return torch.from_numpy(np.where(near, table[nearest + 1] - table[nearest], 0.0))
