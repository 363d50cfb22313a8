"""Cases of two-layer experts, and the tensors made from them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.core.axes import choice, declared, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.contract import Problem
from conformance.core.shared_out import counts as tokens_of_ranks
from conformance.core.space import LOGIT_DTYPES
from conformance.core.tensors import DTYPES, hashed, payload, row_scales
from conformance.families.experts.cases import (
    GROUPED_VALUES,
    PROB_DTYPES,
    USUAL_RECIPES,
    WEIGHTS,
    Name,
    Scaling,
    Segments,
)
from conformance.families.experts.precision import may_override, recipe_of, rounds_gradients, transforms_rows
from conformance.families.experts.precision_mlp import of_experts, rows_unit
from conformance.families.quantization.cases import RECIPES, TRANSFORMED, UNIT, VARIANTS
from moe_ref.config import GATED, PLAIN, RECOMPUTED, Recipe
from moe_ref.config.experts import SIGMOID_GATED
from moe_ref.config.quantization import OVERRIDES

SPREAD = 4  # exponents of the rows' scales: no stage overflows in float16
OVERFLOW = "overflow"
FACTORS = (0, 14, 10, 6, 0)  # exponents of the rows of `overflow`, in turn: h overflows, or h · h does
BACK = (0, 0, 0, 6, 15)  # and of their cotangents
GATE, VALUE = 2.0**-20, 4.0  # factors of weights with which values overflow, but not gate times value


@dataclass(frozen=True, kw_only=True)
class LayersCase(Case):
    """Two layers with an activation between them. Columns are in UNITs of the scaling."""

    hidden: int = size("H", more=1)
    width: int = size("F", more=1)
    dtype: str = dtypes(*LOGIT_DTYPES)
    # of the recipe; empty: high precision
    scaling: str = declared(Scaling(default="", values=("", *RECIPES), argument="recipe"))
    variant: int = choice(*range(VARIANTS))  # of the scaling, in RECIPES
    override: str = declared(Name(default="", values=("", *OVERRIDES)))  # the recipe's backward_override
    values: str = choice(*GROUPED_VALUES, also=(OVERFLOW,), data=True)  # see `rows_of`
    kind: str = declared(Name(default="", values=("", *GATED, *PLAIN), argument="kind"))  # empty: the function's own
    offset: int = number(0, 8, -4, pairs=(8, -4), argument="offset", given=True)  # in eighths
    clamp: int = number(0, 4, 8, 56, pairs=(6, 56), argument="clamp", given=True)  # in eighths; 0: none
    # pairs: values that are no default of a kind
    alpha: int = number(0, 1702, 250, pairs=(250,), argument="alpha", given=True)  # in thousandths; 0: none
    interleave: int = number(0, 1, 2, 3, pairs=(1, 2), argument="interleave")  # 0: none
    stored: bool = flag(argument="fp8_input_store")

    recipes: ClassVar[dict[str, tuple[Recipe, ...]]] = USUAL_RECIPES

    @property
    def unit(self) -> int:
        return UNIT.get(self.scaling, 1)

    def clash(self) -> str | None:
        gates = self.offset or self.clamp or self.alpha or self.interleave
        features = self.width * self.unit
        if self.kind in PLAIN and gates:
            return f"kind {self.kind!r} has no gate, and so no offset, clamp, alpha or interleave"
        if self.alpha and self.kind not in ("", *SIGMOID_GATED):
            return f"kind {self.kind!r} has no alpha"
        if self.interleave and features % self.interleave:
            return f"interleave is {self.interleave}; it must divide the {features} features"
        if self.stored and self.kind not in ("", "swiglu"):
            return f"kind {self.kind!r} has no fp8_input_store"
        return self.unquantised()

    def unquantised(self) -> str | None:
        """Why the recipe does not fit the case; None: it fits, or there is none."""
        if self.override and not may_override(self.scaling):
            return f"scaling {self.scaling!r} has no backward_override"
        recipe = recipe_of(self)
        if self.values == OVERFLOW and (self.dtype != "float16" or recipe is not None):
            return f"values {self.values!r} are for stages of float16 in high precision"
        if recipe is None:
            return f"variant is {self.variant} without a scaling" if self.variant else None
        if self.values == "special" or self.dtype == "float64":
            return "a recipe needs finite values in at most 32 bits"
        weights = {"fc1_weight", "fc2_weight"} & set(self.grads.split("+"))
        if transforms_rows(recipe) and weights and (self.dtype != "bfloat16" or self.values not in TRANSFORMED):
            return f"a Hadamard transform needs bfloat16 and values of exact sums: {', '.join(TRANSFORMED)}"
        return None

    @property
    def noisy(self) -> bool:
        """Whether the call has noise."""
        return rounds_gradients(recipe_of(self)) and bool(self.grads)

    def arguments(self) -> tuple[str, ...]:
        needed_arguments = {"state": self.scaling == "delayed", "noise": self.noisy}
        return tuple(name for name, is_needed in needed_arguments.items() if is_needed)


@dataclass(frozen=True, kw_only=True)
class MlpCase(LayersCase):
    """Rows grouped by expert, through two layers. Rows are in UNITs unless `align` pads them."""

    tokens: int = size("P")  # rows of all experts
    experts: int = size("L", at_least=1)
    counts: tuple[int, ...] = declared(  # rows per expert; empty: even, remainder to the first experts
        Segments(default=(), total="tokens", number="experts")
    )
    tail: int = number(0, 1, 7, pairs=(3,))  # rows past the last segment
    probs: str = dtypes("", *PROB_DTYPES, also=("float16",))  # empty: not given
    weights: str = choice(*WEIGHTS, data=True)  # of the probs: see `probs_of`
    early: bool = flag(argument="round_before_probs")
    on_input: bool = flag(argument="probs_on_input")
    bias1: str = dtypes("", *PROB_DTYPES, also=("float16",))  # empty: not given
    bias2: str = dtypes("", *PROB_DTYPES, also=("float16",))
    align: int = number(0, 1, 3, 8, 16, 32, 64, 256, pairs=(4, 32), argument="align")  # 0: not given
    recompute: str = declared(Name(default="", values=("", *RECOMPUTED), argument="recompute"))
    index_dtype: str = dtypes("int64", "int32")

    @property
    def row_unit(self) -> int:
        return rows_unit(self)

    def clash(self) -> str | None:
        if not self.probs and (self.weights != "plain" or self.early or self.on_input):
            return "weights, early and on_input describe probs, which are not given"
        if self.function == "sequential_mlp" and (self.scaling == "delayed" or self.noisy):
            return "sequential_mlp takes no state and no noise"
        if self.align % self.unit:
            return f"align is {self.align}; with scaling {self.scaling!r} it must be a multiple of {self.unit}"
        return super().clash()


@dataclass(frozen=True, kw_only=True)
class SharedCase(LayersCase):
    """Tokens of the shared experts: all of them."""

    tokens: int = size("T", more=1)
    experts: int = size("E", at_least=1)  # not used: shared experts form one MLP
    gate: bool = flag()
    again: bool = flag(argument="recompute")
    counts: tuple[int, ...] = tokens_of_ranks()  # tokens per rank, weights shared; empty: one process

    early: ClassVar[bool] = False  # there are no probs
    tail: ClassVar[int] = 0  # nor a tail, nor padding
    align: ClassVar[int] = 0

    def clash(self) -> str | None:
        if self.counts and (self.layout != "contiguous" or self.scaling or self.values == OVERFLOW):
            return "ranks have contiguous inputs in high precision, and no stage that overflows"
        if self.layout_of == "gate_weight" and self.layout == "wide_rows":
            return "a gate has one row"
        return super().clash()


def rows_of(case: Any, name: str, tail: int = 0) -> Tensor:
    """[P,H]: rows by `values`; the tail is NaN.

    overflow: dyadic times powers of two, so that h, the activation, or a gradient is past 65504.
    """
    kind, num_rows = DTYPES[case.dtype], case.tokens * rows_unit(case)
    x = payload(case.seed, name, (num_rows + tail, case.hidden * case.unit), case.dtype)
    if case.values == "rows":
        x = (x.double() * row_scales(case.seed, len(x)).log2().div(SPREAD).round().exp2()).to(kind)
    if case.values == OVERFLOW:
        x = (x.double() * powers(FACTORS, len(x))).to(kind)
    if case.values == "special" and case.hidden:
        noise = torch.from_numpy(hashed(case.seed, f"{name} kinds", len(x)).astype("int64"))
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=kind)
        hit = (noise % 4 == 0)[:, None] & (torch.arange(case.hidden)[None] == (noise >> 8)[:, None] % case.hidden)
        x = torch.where(hit, strange[(noise >> 20) % 3][:, None], x)
    x[num_rows:] = torch.nan
    return x


def powers(exponents: tuple[int, ...], rows: int) -> Tensor:
    """Powers of two [rows,1], in turn."""
    return torch.exp2(torch.tensor(exponents, dtype=torch.float64))[torch.arange(rows) % len(exponents)][:, None]


def with_large_cotangents(case: Any, problem: Problem) -> Problem:
    """The call. For the values `overflow`, its cotangents are multiplied by powers of two."""
    if case.values != OVERFLOW:
        return problem
    large = {name: (x.double() * powers(BACK, len(x))).to(x.dtype) for name, x in problem.cotangents.items()}
    return replace(problem, cotangents=large)


def weight_of(case: Any, name: str, rows: int, columns: int) -> Tensor:
    """Weights [L, rows, columns]: a payload scaled by a power of two, so that outputs are as large
    as inputs.
    """
    weight = payload(case.seed, name, (case.experts * rows, columns), case.dtype).reshape(case.experts, rows, columns)
    weight = weight * 2.0 ** -(max(columns - 1, 1).bit_length() // 2)
    if getattr(case, "values", "") == OVERFLOW:
        gated = name == "fc1_weight" and case.kind not in PLAIN
        factor = torch.where((torch.arange(rows) < rows // 2) & gated, GATE, VALUE)
        weight = (weight.double() * factor[:, None]).to(weight.dtype)
    return of_experts(case, weight)


def fc1_columns(case: Any) -> int:
    """Columns of fc1."""
    return (1 if case.kind in PLAIN else 2) * case.width * case.unit
