"""Cases of quantisation: recipes by name, rows in groups, and values that lie where a quantiser decides."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.tensors import DTYPES, hashed, payload, row_scales
from moe_ref.config import Recipe
from moe_ref.quantization.formats import Format, decode
from moe_ref.quantization.recipes import scheme

RECIPES: dict[str, tuple[Recipe, ...]] = {  # by scaling and variant
    "delayed": (
        Recipe("delayed", amax_history_len=3),
        Recipe("delayed", fp8_format="e4m3", amax_history_len=2, amax_compute_algo="most_recent", margin=2),
        Recipe("delayed", amax_history_len=1),
    ),
    "current": (
        Recipe("current"),
        Recipe("current", fp8_format="e4m3", power_of_two_scales=True),
        Recipe("current", amax_epsilon=1.5),
    ),
    "block": (
        Recipe("block"),
        Recipe("block", fp8_format="hybrid", power_of_two_scales=False, two_dimensional_weights=False),
        Recipe("block", fp8_format="hybrid", amax_epsilon=1.5),
    ),
    "mxfp8": (
        Recipe("mxfp8"),
        Recipe("mxfp8", fp8_format="hybrid"),
        Recipe("mxfp8", fp8_format="hybrid", two_dimensional_weights=True),
    ),
    "nvfp4": (
        Recipe("nvfp4"),
        Recipe(
            "nvfp4",
            hadamard=False,
            stochastic_rounding=False,
            two_dimensional_weights=False,
            row_scaled_activation=True,
        ),
        Recipe("nvfp4", hadamard=False, stochastic_rounding=False, four_over_six="all", four_over_six_error="mse"),
    ),
}
VARIANTS = 3
UNIT = {"mxfp8": 32, "nvfp4": 16}  # what rows of a group and columns are multiples of; 1 for the others
ROLES = ("input", "weight", "grad_output")
DIRECTIONS = ("rowwise", "columnwise", "both")
STEPS = ("quantize", "update", "reduced", "reload")
VALUES = ("dyadic", "rows", "wide", "bounds", "midpoints", "tiny", "huge", "zeros", "special")
# where sums of sixteen are exact in float32 whatever their order; the transform may add in any
TRANSFORMED = ("dyadic", "midpoints", "tiny", "zeros", "special")
LAYOUTS = ("contiguous", "transposed", "strided", "shifted", "expanded", "wide_rows", "wide_columns", "wide_depth")
ZERO_BLOCK, ZERO_BAND = 16, 128  # sides of blocks and widths of bands that are zero
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
TAIL = (
    torch.inf,
    -torch.inf,
    torch.nan,
)  # rows that nobody may read; a maximum may pass over NaN, but over no infinity


@dataclass(frozen=True, kw_only=True)
class QuantizeCase(Case):
    """A tensor, or for delayed scaling one after the other, and what happens to it step by step."""

    scaling: str = "current"
    variant: int = 0  # of the scaling, in RECIPES
    role: str = "input"
    direction: str = "rowwise"
    steps: str = "quantize"  # joined by +; more than one for delayed scaling only, or with repeats
    repeats: int = (
        0  # the implementation draws the noise itself, for the same rows so often in each step; 0: noise is given
    )
    tokens: int = 1  # rows of the groups together, in UNITs
    experts: int = 0  # groups; 0: no splits are given, all rows are one
    counts: tuple[int, ...] = ()  # rows of each group in UNITs; empty: as even as can be
    tail: int = 0  # rows behind the last group
    hidden: int = 1  # columns, in UNITs
    dtype: str = "float32"
    values: str = "dyadic"  # see `x_of`
    gemm: bool = False  # whether scales are read in the layout of matrix products, too
    index_dtype: str = "int64"
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "scaling": tuple(RECIPES),
        "role": ROLES,
        "direction": DIRECTIONS,
        "values": VALUES,
        "layout": LAYOUTS,
        "dtype": ("float32", "bfloat16", "float16"),
    }

    def __post_init__(self) -> None:
        if min(self.tokens, self.tail, self.hidden, self.experts) < 0 or not 0 <= self.variant < VARIANTS:
            sizes = f"{self.tokens}, {self.tail}, {self.hidden}, {self.experts}, {self.variant}"
            raise ValueError(f"tokens, tail, hidden, experts ≥ 0 and variant < {VARIANTS} are needed; they are {sizes}")
        if self.counts and (
            len(self.counts) != self.experts or min(self.counts) < 0 or sum(self.counts) != self.tokens
        ):
            raise ValueError(
                f"counts is {self.counts}; it must have {self.experts} numbers ≥ 0 that sum to {self.tokens}"
            )
        if self.tail and not self.experts:
            raise ValueError(f"tail is {self.tail}; without groups (experts 0) no row is behind the last one")
        steps = self.steps.split("+")
        if any(step not in STEPS for step in steps) or steps[0] != "quantize":
            raise ValueError(
                f"steps is {self.steps!r}; it must be some of {', '.join(STEPS)}, joined by +, and begin with quantize"
            )
        if len(steps) > 1 and self.scaling != "delayed" and not self.repeats:
            raise ValueError(f"steps is {self.steps!r}; only delayed scaling remembers anything")
        if self.repeats and (not is_random(self) or self.experts or self.grads):
            raise ValueError(
                f"repeats is {self.repeats}; it must be 0 but for gradients with stochastic rounding, without groups and gradients of their own"
            )


QuantizeCase.serves("quantize")


def recipe_of(case: QuantizeCase) -> Recipe:
    return RECIPES[case.scaling][case.variant]


def unit_of(case: QuantizeCase) -> int:
    return UNIT.get(case.scaling, 1)


def splits_of(case: QuantizeCase) -> tuple[int, ...]:
    """Rows of each group."""
    even = (case.tokens // case.experts + (e < case.tokens % case.experts) for e in range(case.experts))
    return tuple(unit_of(case) * count for count in case.counts or even)


def is_transformed(case: QuantizeCase) -> bool:
    """Whether a Hadamard transform is taken."""
    return bool(recipe_of(case).hadamard) and case.role != "weight" and case.direction != "rowwise"


def is_random(case: QuantizeCase) -> bool:
    """Whether rounding is by a noise tensor."""
    return bool(recipe_of(case).stochastic_rounding) and case.role == "grad_output"


def fits(case: QuantizeCase) -> bool:
    """Whether the reference takes the call, and its result is the same in whatever order it adds."""
    recipe = recipe_of(case)
    both_levels = recipe.row_scaled_activation and recipe.four_over_six in ("activations", "all")
    if both_levels and case.role == "input" and case.direction != "rowwise":
        return False
    return not is_transformed(case) or (case.dtype == "bfloat16" and case.values in TRANSFORMED)


def x_of(case: QuantizeCase, name: str = "x") -> Tensor:
    """[M,N] by `values`, and behind the last group what must reach no amax.

    dyadic, wide  as in `payload`
    rows          dyadic, each row times a power of two
    bounds        what decides a scale is the format's largest number, or 1, times a power of two, or the number next to it
    midpoints     halfway between two codes, where a block has the format's largest number, times a power of two
    tiny          multiples of the smallest subnormal number
    huge          up to the largest number of the dtype
    zeros         dyadic, with blocks, bands and groups of rows that are ±0
    special       dyadic, with NaN, infinities and -0 in every third row
    """
    rows, columns = (case.tokens * unit_of(case) + case.tail, case.hidden * unit_of(case))
    kind = DTYPES[case.dtype]
    plain = payload(case.seed, name, (rows, columns), case.dtype).double()
    noise = torch.from_numpy(hashed(case.seed, f"{name} kinds", rows * columns).astype(np.int64)).reshape(rows, columns)
    made = {
        "dyadic": lambda: plain,
        "rows": lambda: plain * row_scales(case.seed, rows),
        "wide": lambda: payload(case.seed, name, (rows, columns), case.dtype, "wide").double(),
        "bounds": lambda: _bounds(case, plain, noise),
        "midpoints": lambda: _midpoints(case, noise),
        "tiny": lambda: (
            (noise >> 8)
            % 300
            * torch.where(noise % 2 == 0, 1.0, -1.0)
            * float(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)
        ),
        "huge": lambda: plain / 2 * torch.finfo(kind).max,
        "zeros": lambda: _zeros(case, plain),
        "special": lambda: _special(case, plain, noise),
    }[case.values]()
    x = made.to(kind)
    x = torch.where(
        x.isnan(), torch.nan, x
    )  # the same bytes everywhere: which NaN a conversion makes depends on the machine
    for i in range(case.tail):
        x[rows - case.tail + i] = TAIL[(i + case.seed) % len(TAIL)]
    return x


def _format(case: QuantizeCase) -> Format:
    return scheme(recipe_of(case), case.role).format


def _cells(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cell of 16 × 16 of each element: its number, and whether the element is on its diagonal, so that each row and column has one."""
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    number = rows // ZERO_BLOCK * 1000 + columns // ZERO_BLOCK
    return number, (rows + number) % ZERO_BLOCK == columns % ZERO_BLOCK


def _bounds(case: QuantizeCase, plain: Tensor, noise: Tensor) -> Tensor:
    """Numbers at which the exponent of a power-of-two scale changes, with less beside them than they are."""
    number, decides = _cells(plain)
    kind = DTYPES[case.dtype]
    scale = torch.exp2(((number * 7 + case.seed) % 9 - 9).double())
    top = (torch.where(noise >> 3 & 1 == 1, _format(case).max, 1.0) * scale).to(kind)
    near = (top.view(BITS_OF[kind]) + ((noise >> 8) % 3 - 1).to(BITS_OF[kind])).view(
        kind
    )  # the number below, itself, or the one above
    return torch.where(decides, near.double() * torch.where(noise >> 5 & 1 == 1, 1.0, -1.0), plain / 4 * scale)


def _midpoints(case: QuantizeCase, noise: Tensor) -> Tensor:
    """The mean of a code and the next, times a power of two, and the format's largest number in each cell."""
    format = _format(case)
    positive = decode(torch.arange(format.max_code + 1, dtype=torch.uint8), format, dtype=torch.float64)
    middle = (positive[1:] + positive[:-1]) / 2
    value = middle[(noise >> 8) % len(middle)] * torch.where(noise >> 5 & 1 == 1, 1.0, -1.0)
    _, decides = _cells(value)
    shift = (
        0 if case.scaling == "delayed" else -(case.seed % 4)
    )  # float16 has no room above E5M2's largest, and the first scale is 1
    return torch.where(decides, format.max, value) * 2.0**shift


def _zeros(case: QuantizeCase, plain: Tensor) -> Tensor:
    rows, columns = torch.arange(plain.shape[0])[:, None], torch.arange(plain.shape[1])[None]
    number, _ = _cells(plain)
    block = torch.from_numpy(hashed(case.seed, "zero blocks", 997).astype(np.int64))[number % 997] % 2 == 0
    band = columns // ZERO_BAND % 3 == case.seed % 3 - 1
    first = splits_of(case)[:1] or (0,)
    group = (rows < first[0]) & (case.seed % 4 == 0)
    zero = torch.where((rows + columns) % 2 == 0, 0.0, -0.0)
    return torch.where(block | band | group, zero, plain)


def _special(case: QuantizeCase, plain: Tensor, noise: Tensor) -> Tensor:
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=torch.float64)
    hit = (noise % 8 == 0) & (torch.arange(len(plain))[:, None] % 3 == case.seed % 3)
    return torch.where(hit, strange[(noise >> 8) % 4], plain)


def noise_of(case: QuantizeCase) -> Tensor:
    """[2,M,N] float32 in (0, 1): odd multiples of 2^-24, which no quotient of a dyadic number meets."""
    shape = (2, case.tokens * unit_of(case) + case.tail, case.hidden * unit_of(case))
    bits = hashed(case.seed, "noise", int(np.prod(shape))) >> 9
    return torch.from_numpy((2.0 * bits + 1) / 2**24).to(torch.float32).reshape(shape)


def inputs_of(case: QuantizeCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The required inputs and the settings of the call."""
    quantized = case.steps.split("+").count("quantize")
    required: dict[str, Any] = {"x": x_of(case), "recipe": recipe_of(case)}
    for i in range(1, quantized):  # other sizes in every step, so that scales move
        required[f"x.{i}"] = (x_of(case, f"x.{i}").double() * 2.0 ** (3 * i % 5 - 2)).to(DTYPES[case.dtype])
    if case.repeats:
        required |= {name: required["x"].repeat(case.repeats, 1) for name in required if name != "recipe"}
    if "reduced" in case.steps:
        known = payload(case.seed, "reduced amax", (max(case.experts, 1),), "float32").abs()
        required["reduced_amax"] = torch.where(torch.arange(len(known)) % 3 == 2, 0.0, known * 16)  # 0: none was given
    settings: dict[str, Any] = {"role": case.role} if case.role != "input" else {}
    if case.experts:
        settings["splits"] = torch.tensor(splits_of(case), dtype=DTYPES[case.index_dtype])
    settings |= {"rowwise": False} if case.direction == "columnwise" else {}
    settings |= {"columnwise": True} if case.direction != "rowwise" else {}
    settings |= {"noise": noise_of(case)} if is_random(case) and not case.repeats else {}
    return required, settings
