"""Cases of quantisation: recipes by name, grouped rows, values at a quantiser's decision points."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import choice, dtypes, flag, number, size, words
from conformance.core.case import Case
from conformance.core.lists import parts
from conformance.core.tensors import DTYPES, hashed, payload, row_scales, with_ends
from moe_ref.config import Recipe
from moe_ref.quantization.formats import E4M3, Format, decode
from moe_ref.quantization.recipes import scheme


def _nvfp4(square: bool = True, **options: Any) -> Recipe:
    """NVFP4 without a transform and stochastic rounding."""
    return Recipe("nvfp4", hadamard=False, stochastic_rounding=False, two_dimensional_weights=square, **options)


RECIPES: dict[str, tuple[Recipe, ...]] = {  # by scaling and variant
    "delayed": (
        Recipe("delayed", amax_history_len=3),
        Recipe("delayed", fp8_format="e4m3", amax_history_len=2, amax_compute_algo="most_recent", margin=2),
        Recipe("delayed", amax_history_len=1),
        Recipe("delayed", fp8_format="e4m3"),
        Recipe("delayed", amax_compute_algo="most_recent", margin=2),
        Recipe("delayed", fp8_format="e4m3", amax_history_len=1, margin=2),
        Recipe("delayed", fp8_format="e4m3", amax_history_len=3, amax_compute_algo="most_recent"),
        Recipe("delayed", amax_history_len=3, margin=2),
        Recipe("delayed", amax_history_len=2),
        Recipe("delayed", amax_history_len=1, amax_compute_algo="most_recent"),
    ),
    "current": (
        Recipe("current"),
        Recipe("current", fp8_format="e4m3", power_of_two_scales=True),
        Recipe("current", amax_epsilon=1.5),
        Recipe("current", fp8_format="e4m3", amax_epsilon=1.5),
        Recipe("current", power_of_two_scales=True, amax_epsilon=1.5),
    ),
    "block": (
        Recipe("block"),
        Recipe("block", fp8_format="hybrid", power_of_two_scales=False, two_dimensional_weights=False),
        Recipe("block", fp8_format="hybrid", amax_epsilon=1.5),
        Recipe("block", power_of_two_scales=False, amax_epsilon=1.5, two_dimensional_weights=False),
        Recipe("block", power_of_two_scales=False),
        Recipe("block", two_dimensional_weights=False),
    ),
    "mxfp8": (
        Recipe("mxfp8"),
        Recipe("mxfp8", fp8_format="hybrid"),
        Recipe("mxfp8", fp8_format="hybrid", two_dimensional_weights=True),
        Recipe("mxfp8", two_dimensional_weights=True),
    ),
    "nvfp4": (
        Recipe("nvfp4"),
        _nvfp4(square=False, row_scaled_activation=True),
        _nvfp4(four_over_six="all", four_over_six_error="mse"),
        # scopes of four over six, and of the bound of its scales
        _nvfp4(square=False, four_over_six="weights", four_over_six_bound_256="none", row_scaled_activation=True),
        _nvfp4(square=False, four_over_six="activations", four_over_six_bound_256="weights"),
        Recipe("nvfp4", four_over_six="weights", four_over_six_bound_256="weights", four_over_six_error="mse"),
        _nvfp4(four_over_six="activations", four_over_six_bound_256="activations", row_scaled_activation=True),
        _nvfp4(square=False, four_over_six="all", four_over_six_bound_256="activations", four_over_six_error="mse"),
        _nvfp4(square=False, four_over_six="all", four_over_six_bound_256="none"),
        # a recipe with the transform and without stochastic rounding, and the other way round
        Recipe("nvfp4", four_over_six="weights", four_over_six_bound_256="activations"),
        Recipe(
            "nvfp4",
            hadamard=False,
            two_dimensional_weights=False,
            row_scaled_activation=True,
            four_over_six="all",
            four_over_six_bound_256="weights",
        ),
        Recipe("nvfp4", two_dimensional_weights=False, four_over_six="weights", four_over_six_error="mse"),
        Recipe(
            "nvfp4",
            hadamard=False,
            row_scaled_activation=True,
            four_over_six="activations",
            four_over_six_bound_256="none",
            four_over_six_error="mse",
        ),
        _nvfp4(four_over_six="activations", row_scaled_activation=True),
        Recipe("nvfp4", stochastic_rounding=False, four_over_six="weights", four_over_six_bound_256="none"),
    ),
}
SCALINGS = ("current", "delayed", "block", "mxfp8", "nvfp4")
VARIANTS = 3  # recipes of each scaling whose pairs with other settings are covered
MORE_VARIANTS = tuple(range(VARIANTS, max(map(len, RECIPES.values()))))  # of some
UNIT = {"mxfp8": 32, "nvfp4": 16}  # rows per group and columns are multiples of this unit; other scalings have 1
ROLES = ("input", "weight", "grad_output")
DIRECTIONS = ("rowwise", "columnwise", "both")
STEPS = ("quantize", "update", "reduced", "reload")
EVERY_STEP = "quantize+quantize+reduced+quantize+reload+update+quantize"
VALUES = ("dyadic", "rows", "wide", "bounds", "midpoints", "tiny", "huge", "zeros", "special")
MORE_VALUES = ("edges", "every", "levels")
PLAIN = ("dyadic", "rows", "wide", "midpoints")  # values of float64, which float32 rounds
NEAR_HALF = 2.0**-40  # a distance from ½ that float32 cannot tell from 0
# sums of 16 are exact in float32 in any order: the transform's order is free
TRANSFORMED = ("dyadic", "midpoints", "tiny", "zeros", "special")
EVERY_SECOND = ("x", "x.2", "x.4")  # tensors of steps
ZERO_BLOCK, ZERO_BAND = 16, 128  # the side of a block of zeros, and the width of a band of zeros
BINADES = 24  # binades below a block's amax: more than any format of codes has
SIGNIFICAND = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
# powers of two that are finite when multiplied by 4, from the smallest subnormal number on
POWERS = {torch.float32: (-149, 126), torch.bfloat16: (-133, 126), torch.float16: (-24, 14)}
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# values of rows that no kernel may read: a maximum may skip NaN, but never an infinity
TAIL = (torch.inf, -torch.inf, torch.nan)


class RecipeFields:
    """What follows from the fields of a case that name a recipe and the directions of its codes."""

    scaling: str
    variant: int  # of the scaling, in `recipes`
    direction: str

    recipes: ClassVar[dict[str, tuple[Recipe, ...]]] = RECIPES

    @property
    def rowwise(self) -> bool:
        return self.direction != "columnwise"

    @property
    def columnwise(self) -> bool:
        return self.direction != "rowwise"

    @property
    def stateful(self) -> bool:
        return self.scaling == "delayed"

    @property
    def unit(self) -> int:
        return UNIT.get(self.scaling, 1)

    @property
    def direction_settings(self) -> dict[str, bool]:
        """The keyword arguments that ask for the directions."""
        return ({} if self.rowwise else {"rowwise": False}) | ({"columnwise": True} if self.columnwise else {})

    def arguments(self) -> tuple[str, ...]:
        return (*self.direction_settings, *(("state",) if self.stateful else ()))

    def no_recipe(self) -> str | None:
        """Why the fields name no recipe, or None."""
        num_recipes = len(self.recipes[self.scaling])
        return (
            f"variant is {self.variant}; {self.scaling} has {num_recipes} recipes"
            if self.variant >= num_recipes
            else None
        )


@dataclass(frozen=True, kw_only=True)
class QuantizeCase(RecipeFields, Case):
    """A tensor and the steps of a call; delayed scaling has several tensors, one after the
    other.
    """

    dtype: str = dtypes("float32", "bfloat16", "float16", also=("float64",))
    values: str = choice(*VALUES, also=MORE_VALUES, data=True)  # see `x_of`
    scaling: str = choice(*SCALINGS)
    variant: int = choice(*range(VARIANTS), also=MORE_VARIANTS, turns=True)
    role: str = choice(*ROLES, argument="role")
    direction: str = choice(*DIRECTIONS)
    # several steps: delayed scaling, or repeats
    steps: str = words("quantize", *STEPS, of=(STEPS[0], EVERY_STEP))
    # copies of the rows per step, with noise that the implementation draws; 0: noise is an argument
    repeats: int = number(0)
    noise_dtype: str = choice("float32", also=("float64",))  # float64 noise: some of it is next to a quotient
    tokens: int = size("M")  # rows in all groups, in UNITs
    experts: int = size("E", default=0)  # groups; 0: no splits, all rows in one group
    counts: tuple[int, ...] = parts(  # rows per group, in UNITs; empty: even
        total="tokens", number="experts", written_out=lambda case: tuple(n // case.unit for n in splits_of(case))
    )
    tail: int = number(0, 1, 4, 5, pairs=(4,), given=True)  # rows past the last group
    hidden: int = size("N")  # columns, in UNITs
    gemm: bool = flag(argument="scales.layout")  # also reads scales in the GEMM layout
    index_dtype: str = dtypes("int64", "int32")

    def clash(self) -> str | None:
        if self.no_recipe():
            return self.no_recipe()
        if self.dtype == "float64" and self.values not in PLAIN:
            return f"values is {self.values!r}; of float64 they are {', '.join(PLAIN)}"
        if self.tail and not self.experts:
            return f"tail is {self.tail}; without groups (experts 0) no row is past the last one"
        if self.steps.split("+")[0] != "quantize":
            return f"steps is {self.steps!r}; it must begin with quantize"
        if self.steps != "quantize" and self.scaling != "delayed" and not self.repeats:
            return f"steps is {self.steps!r}; delayed scaling alone has a state"
        if self.repeats and (not is_random(self) or self.experts or self.grads):
            return f"repeats is {self.repeats}; it needs stochastic rounding of a gradient, without groups and grads"
        if self.noise_dtype != "float32" and not self.noisy:
            return f"noise_dtype is {self.noise_dtype}; no noise is given"
        recipe = recipe_of(self)
        both_levels = recipe.row_scaled_activation and recipe.four_over_six in ("activations", "all")
        if both_levels and self.role == "input" and self.direction != "rowwise":
            return "a recipe with row scaling and four over six has no columnwise input"
        if is_transformed(self) and (self.dtype != "bfloat16" or self.values not in TRANSFORMED):
            return f"a Hadamard transform needs bfloat16 and values whose sums are exact: {', '.join(TRANSFORMED)}"
        return None

    @property
    def noisy(self) -> bool:
        """Whether the call is given a noise tensor."""
        return self.no_recipe() is None and is_random(self) and not self.repeats


def recipe_of(case: RecipeFields) -> Recipe:
    return case.recipes[case.scaling][case.variant]


def splits_of(case: Any) -> tuple[int, ...]:
    """Rows of each group."""
    even = (case.tokens // case.experts + (e < case.tokens % case.experts) for e in range(case.experts))
    return tuple(case.unit * count for count in case.counts or even)


def is_transformed(case: QuantizeCase) -> bool:
    """Whether the Hadamard transform applies."""
    return bool(recipe_of(case).hadamard) and case.role != "weight" and case.direction != "rowwise"


def is_random(case: QuantizeCase) -> bool:
    """Whether rounding is stochastic."""
    return bool(recipe_of(case).stochastic_rounding) and case.role == "grad_output"


def x_of(case: QuantizeCase, name: str = "x") -> Tensor:
    """[M,N] by `values`; rows past the last group hold TAIL and must not enter any amax.

    dyadic, wide  as in `payload`
    rows          dyadic, each row times a power of two
    bounds        each block's amax is FMAX or 1 times a power of two, ±1 ulp
    midpoints     halfway between two codes, times a power of two; each block's amax is FMAX
    tiny          multiples of the smallest subnormal number
    huge          up to the largest number of the dtype
    zeros         dyadic, with blocks, bands and row groups of ±0
    special       dyadic, with NaN, infinities and -0 in every third row, in every second step
    edges         dyadic, with these and subnormal numbers at both ends of every third row, and with
                  columns of zeros
    levels        each cell's amax is 6, or halfway between two scales under an amax of 6, ±1 ulp
    every         all significands and BINADES below each cell's largest, in blocks of all exponents
    """
    rows, columns = (case.tokens * case.unit + case.tail, case.hidden * case.unit)
    kind = DTYPES[case.dtype]
    dyadic = payload(case.seed, name, (rows, columns), case.dtype).double()
    noise = torch.from_numpy(hashed(case.seed, f"{name} kinds", rows * columns).astype(np.int64)).reshape(rows, columns)
    values = {
        "dyadic": lambda: dyadic,
        "rows": lambda: dyadic * row_scales(case.seed, rows),
        "wide": lambda: payload(case.seed, name, (rows, columns), case.dtype, "wide").double(),
        "bounds": lambda: _bounds(case, dyadic, noise),
        "midpoints": lambda: _midpoints(case, noise),
        "tiny": lambda: (
            (noise >> 8)
            % 300
            * torch.where(noise % 2 == 0, 1.0, -1.0)
            * float(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)
        ),
        "huge": lambda: dyadic / 2 * torch.finfo(kind).max,
        "zeros": lambda: _zeros(case, dyadic),
        "special": lambda: _special(case, dyadic, noise) if name in EVERY_SECOND else dyadic,
        "edges": lambda: _edges(case, dyadic.to(kind)),
        "every": lambda: _all_patterns(case, dyadic),
        "levels": lambda: _levels(case, dyadic, noise),
    }[case.values]()
    x = values.to(kind)
    x = torch.where(x.isnan(), torch.nan, x)  # one payload for all NaNs, because conversions differ by machine
    for i in range(case.tail):
        x[rows - case.tail + i] = TAIL[(i + case.seed) % len(TAIL)]
    return x


def _format(case: QuantizeCase) -> Format:
    return scheme(recipe_of(case), case.role).format


def _cells(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each element's 16 × 16 cell number, and whether it lies on the cell's (shifted) diagonal."""
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    number = rows // ZERO_BLOCK * 1000 + columns // ZERO_BLOCK
    return number, (rows + number) % ZERO_BLOCK == columns % ZERO_BLOCK


def _bounds(case: QuantizeCase, dyadic: Tensor, noise: Tensor) -> Tensor:
    """Cell maxima where the exponent of a power-of-two scale changes; the rest is smaller."""
    number, decides = _cells(dyadic)
    kind = DTYPES[case.dtype]
    scale = torch.exp2(((number * 7 + case.seed) % 9 - 9).double())
    top = (torch.where(noise >> 3 & 1 == 1, _format(case).max, 1.0) * scale).to(kind)
    ulp = ((noise >> 8) % 3 - 1).to(BITS_OF[kind])
    near = (top.view(BITS_OF[kind]) + ulp).view(kind)
    return torch.where(decides, near.double() * torch.where(noise >> 5 & 1 == 1, 1.0, -1.0), dyadic / 4 * scale)


def _levels(case: QuantizeCase, dyadic: Tensor, noise: Tensor) -> Tensor:
    """The maximum of each cell is a decision point of NVFP4's scales; other values are smaller."""
    number, decides = _cells(dyadic)
    kind, middle = DTYPES[case.dtype], _means_of_codes(E4M3)
    below = (middle * 6 / E4M3.max)[(noise >> 8) % len(middle)].to(kind)
    near = (below.view(BITS_OF[kind]) + ((noise >> 20) % 3 - 1).to(BITS_OF[kind])).view(kind)
    top = torch.where((number + case.seed) % 3 == 0, 6.0, near.double())
    sign = torch.where(noise >> 5 & 1 == 1, 1.0, -1.0)
    return torch.where(decides, top * sign, dyadic / 4 * (below.double().min() if below.numel() else 0.0))


def _means_of_codes(format: Format) -> Tensor:
    """The means of neighbouring positive codes, in float64."""
    positive = decode(torch.arange(format.max_code + 1, dtype=torch.uint8), format, dtype=torch.float64)
    return (positive[1:] + positive[:-1]) / 2


def _midpoints(case: QuantizeCase, noise: Tensor) -> Tensor:
    """Means of neighbouring codes and FMAX in each cell, times a power of two."""
    format = _format(case)
    middle = _means_of_codes(format)
    value = middle[(noise >> 8) % len(middle)] * torch.where(noise >> 5 & 1 == 1, 1.0, -1.0)
    if case.dtype == "float64":
        value = value * (1 + NEAR_HALF * ((noise >> 16) % 3 - 1).double())
    _, decides = _cells(value)
    # negative exponents, because float16 ends near E5M2's FMAX; 0: the first delayed scale is 1
    shift = 0 if case.scaling == "delayed" else -(case.seed % 4)
    return torch.where(decides, format.max, value) * 2.0**shift


def _zeros(case: QuantizeCase, dyadic: Tensor) -> Tensor:
    rows, columns = torch.arange(dyadic.shape[0])[:, None], torch.arange(dyadic.shape[1])[None]
    number, _ = _cells(dyadic)
    block = torch.from_numpy(hashed(case.seed, "zero blocks", 997).astype(np.int64))[number % 997] % 2 == 0
    band = columns // ZERO_BAND % 3 == case.seed % 3 - 1
    first = splits_of(case)[:1] or (0,)
    group = (rows < first[0]) & (case.seed % 4 == 0)
    zero = torch.where((rows + columns) % 2 == 0, 0.0, -0.0)
    return torch.where(block | band | group, zero, dyadic)


def _special(case: QuantizeCase, dyadic: Tensor, noise: Tensor) -> Tensor:
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=torch.float64)
    hit = (noise % 8 == 0) & (torch.arange(len(dyadic))[:, None] % 3 == case.seed % 3)
    return torch.where(hit, strange[(noise >> 8) % 4], dyadic)


def _edges(case: QuantizeCase, dyadic: Tensor) -> Tensor:
    hit = torch.arange(len(dyadic))[:, None] % 3 == case.seed % 3
    x = torch.where(hit, with_ends(dyadic, case.seed), dyadic).double()
    zero = torch.arange(x.shape[1]) % 5 == 2
    zero[-1:] = False
    return torch.where(zero & x.isfinite(), 0.0, x)


def _all_patterns(case: QuantizeCase, dyadic: Tensor) -> Tensor:
    """±(1 + m/2⁷) 2⁻ᵉ below a largest value in [2, 4), times a power of two per 32 columns of a row
    where blocks have scales.
    """
    kind, count = DTYPES[case.dtype], dyadic.numel()
    steps = 2 ** min(SIGNIFICAND[kind], 10)
    number = torch.arange(count).reshape(dyadic.shape) * 40507 + case.seed * 7919  # prime to BINADES
    sign = torch.where(number % 2 == 0, 1.0, -1.0)
    value = sign * (1 + number // 2 % steps / steps) * torch.exp2(-(number // 2 // steps % BINADES).double())
    cell, decides = _cells(dyadic)
    value = torch.where(decides, sign * (2 + 2 * (cell * 37 + case.seed) % steps / steps), value)
    rows, columns = torch.arange(dyadic.shape[0])[:, None], torch.arange(dyadic.shape[1])[None]
    cell_number = rows * -(-dyadic.shape[1] // 32) + columns // 32 + case.seed
    low, high = POWERS[kind] if case.scaling in ("block", "mxfp8") else (-8, 1)
    power = (
        low + cell_number % (high - low)
        if case.scaling not in ("current", "delayed")
        else torch.zeros_like(cell_number)
    )
    return value * torch.exp2(power.double())


def noise_of(case: QuantizeCase) -> Tensor:
    """[2,M,N] in (0, 1): odd multiples of 2^-24, never equal to a dyadic quotient; of float64 every
    second is ½ ± NEAR_HALF.
    """
    shape = (2, case.tokens * case.unit + case.tail, case.hidden * case.unit)
    bits = hashed(case.seed, "noise", int(np.prod(shape))) >> 9
    noise = (2.0 * bits + 1) / 2**24
    if case.noise_dtype == "float64":
        noise = np.where(bits % 2 == 0, noise, 0.5 + (bits // 2 % 2 * 2.0 - 1) * NEAR_HALF)
    return torch.from_numpy(noise).to(DTYPES[case.noise_dtype]).reshape(shape)


def inputs_of(case: QuantizeCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The required inputs and the settings of the call."""
    quantized = case.steps.split("+").count("quantize")
    required: dict[str, Any] = {"x": x_of(case), "recipe": recipe_of(case)}
    for i in range(1, quantized):  # magnitudes differ by step, so that scales move
        required[f"x.{i}"] = (x_of(case, f"x.{i}").double() * 2.0 ** (3 * i % 5 - 2)).to(DTYPES[case.dtype])
    if case.repeats:
        required |= {name: required["x"].repeat(case.repeats, 1) for name in required if name != "recipe"}
    if "reduced" in case.steps:
        amax = payload(case.seed, "reduced amax", (max(case.experts, 1),), "float32").abs()
        # 0: the call has no amax
        required["reduced_amax"] = torch.where(torch.arange(len(amax)) % 3 == 2, 0.0, amax * 16)
    settings: dict[str, Any] = {"role": case.role} if case.role != "input" else {}
    if case.experts:
        settings["splits"] = torch.tensor(splits_of(case), dtype=DTYPES[case.index_dtype])
    settings |= case.direction_settings
    settings |= {"noise": noise_of(case)} if is_random(case) and not case.repeats else {}
    return required, settings
