"""Cases of the experts, and the tensors made from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.analysis.curves import interleave_halves
from conformance.core.axes import Changes, Choice, choice, declared, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.lists import Parts
from conformance.core.signature import Signature
from conformance.core.space import LOGIT_DTYPES
from conformance.core.tensors import (
    DTYPES,
    STRANGE,
    every_pattern,
    hashed,
    payload,
    probabilities,
    row_scales,
    with_ends,
)
from conformance.families.experts.precision import (
    LOW_VALUES,
    factor_of,
    fits,
    may_override,
    other_override,
    recipe_of,
    rounds_gradients,
)
from conformance.families.quantization.cases import MORE_VARIANTS, RECIPES, TAIL, UNIT, VARIANTS
from moe_ref.config import GATED, PLAIN, Recipe
from moe_ref.config.experts import SIGMOID_GATED
from moe_ref.config.quantization import OVERRIDES

# nine rows: no empty expert; empty first, middle and last; all but one empty; one full tile
COUNTS = ((4, 2, 3), (0, 5, 0, 4, 0), (0, 0, 9), (8, 0, 1))
USUAL_RECIPES = {scaling: recipes[:VARIANTS] for scaling, recipes in RECIPES.items()}  # at sizes of models
GROUPED_VALUES = ("dyadic", "rows", "special")  # values of the case, and LOW_VALUES if it has a scaling
INFINITE, NO_INFINITY = (
    (torch.nan, torch.inf, -torch.inf),
    (torch.nan,) * 3,
)  # an infinity in one row of NVFP4 makes the whole expert undefined

VALUES = ("dyadic", "rows", "bounds", "saturated", "special")
WEIGHTS = ("plain", "zeros", "signed")
PROB_DTYPES = ("float32", "bfloat16", "float64")
GATES = ("", "geglu", "geglu_erf", "quick_geglu", "reglu")  # empty: the function's default
CURVES = ("", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu")
# numbers for which σ is 1, exp(-x) is subnormal or overflows, and x³ is large in float32
FAR = (17.0, 30.0, 88.0, 89.0, 104.0, 200.0, 5000.0)
HUGE = (0.3, 0.4, 0.6)  # powers of the largest number, of which x⁴, x³ or x² overflow


@dataclass(kw_only=True)
class Name(Choice):
    """A choice whose values are equally simple, except for the default."""

    def smaller(self, case: Any) -> Iterator[Changes]:
        yield from ()


@dataclass(kw_only=True)
class Kind(Name):
    """An activation's name: a gate where the function has a `clamp`, else a curve."""

    def allowed(self, signature: Signature) -> tuple[str, ...]:
        return GATES if "clamp" in signature.settings else CURVES

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return st.sampled_from(self.allowed(signature)).map(lambda kind: {self.name: kind})

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: kind} for kind in self.allowed(signature)]

    def other(self, case: Any) -> Changes:
        kinds = GATES if case.gated else CURVES
        return {self.name: kinds[kinds.index(case.kind) - 1] if case.kind in kinds else ""}


@dataclass(frozen=True, kw_only=True)
class ActivationCase(Case):
    """Input rows of an activation."""

    tokens: int = size("T", more=1)
    experts: int = size("E", at_least=1)  # not used, because activations have no experts
    width: int = size("F", more=3)  # half the columns of h if gated
    kind: str = declared(Kind(default="", values=GATES + CURVES[1:], also=("swiglu", "squared_relu"), argument="kind"))
    dtype: str = dtypes(*LOGIT_DTYPES)
    probs: str = dtypes("", *PROB_DTYPES, also=("float16",))  # empty: not given
    weights: str = choice(*WEIGHTS, of=("probs",), data=True)  # of the probs: see `probs_of`
    values: str = choice(*VALUES, also=(*STRANGE[1:], "huge", "tiny", "peak"), data=True)  # of h: see `hidden_of`
    offset: int = number(0, 8, -4, 3, pairs=(8, -4), argument="offset", given=True)  # in eighths
    clamp: int = number(0, 4, 8, 56, pairs=(6, 56), argument="clamp", given=True)  # in eighths; 0: none
    # pairs: values that are no default of a kind
    alpha: int = number(0, 1000, 1702, 250, pairs=(250,), argument="alpha", given=True)  # in thousandths; 0: none
    interleave: int = number(0, 1, 2, 3, 8, 16, 32, pairs=(1, 2), argument="interleave")  # 0: none
    early: bool = flag(argument="round_before_probs")
    stored: bool = flag(argument="fp8_input_store")

    @property
    def gated(self) -> bool:
        return self.function.startswith("glu")

    @property
    def features(self) -> int:
        """F."""
        return self.width

    def clash(self) -> str | None:
        if self.kind and self.kind not in (GATED if self.gated else PLAIN):
            return f"kind is {self.kind!r}, no activation of {self.function}"
        if self.weights != "plain" and not self.probs:
            return f"weights is {self.weights!r} without probs"
        if self.alpha and self.kind not in ("", *SIGMOID_GATED):
            return f"kind {self.kind!r} has no alpha"
        if self.interleave and self.features % self.interleave:
            return f"interleave is {self.interleave}; it must divide the {self.features} features"
        if self.stored and self.kind not in ("", "swiglu"):
            return f"kind {self.kind!r} has no fp8_input_store"
        return None


def hidden_of(case: ActivationCase, columns: int) -> Tensor:
    """h: dyadic · rows, dyadic times a power of two per row · bounds, near 0 and the clamp (or
    the offset, or 1) · saturated, where curves are flat · huge, where powers of h overflow ·
    tiny, from 8 times the smallest normal number to twice that · peak, small but for one
    feature of the last row: by the seed the first, a third on, two thirds on, or the last ·
    special, dyadic with a NaN or an infinity in some rows · edges, dyadic with these and
    subnormal numbers at the ends of every second row · every, all bit patterns; of a gated
    activation those of the gate, times dyadic values.
    """
    shape, kind = (case.tokens, columns), DTYPES[case.dtype]
    dyadic = payload(case.seed, "h", shape, case.dtype)
    noise = hashed(case.seed, "h kinds", case.tokens * columns).reshape(shape)
    sign = torch.from_numpy(np.where(noise >> 30 & 1, -1.0, 1.0))
    if case.values == "rows":
        return (dyadic.double() * row_scales(case.seed, case.tokens)).to(kind)
    if case.values == "bounds":
        bound, step = case.clamp / 8 or abs(case.offset) / 8 or 1.0, torch.finfo(kind).eps
        near = torch.tensor(
            [0.0, bound, bound * (1 + step), bound * (1 - step), bound / 2, torch.finfo(kind).tiny, bound, 2 * bound],
            dtype=torch.float64,
        )
        return (near[torch.from_numpy((noise >> 8).astype(np.int64) % len(near))] * sign).to(kind)
    if case.values == "saturated":
        far = torch.tensor(FAR, dtype=torch.float64)
        return torch.where(
            torch.from_numpy(noise % 2 == 0),
            far[torch.from_numpy((noise >> 8).astype(np.int64) % len(far))] * sign,
            dyadic.double(),
        ).to(kind)
    if case.values == "huge":
        power = torch.tensor(HUGE, dtype=torch.float64)[torch.from_numpy((noise >> 8).astype(np.int64) % len(HUGE))]
        large = float(torch.finfo(kind).max) ** power * sign
        return torch.where(torch.from_numpy(noise % 2 == 0), large, dyadic.double()).to(kind)
    if case.values == "tiny":
        return ((1 + dyadic.double().abs() / 2) * sign * (8 * torch.finfo(kind).tiny)).to(kind)
    if case.values == "peak":
        x, column = dyadic / 16, (case.features - 1) * (case.seed % 4) // 3
        x[-1:, column :: case.features or 1] = 4  # of a gated activation its gate and its value
        return x
    if case.values == "special":
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=kind)
        hit = torch.from_numpy((noise % 4 == 0) & (np.arange(case.tokens) % 2 == case.seed % 2)[:, None])
        return torch.where(hit, strange[torch.from_numpy((noise >> 8).astype(np.int64) % 3)], dyadic)
    if case.values == "edges":
        return torch.where(
            torch.arange(case.tokens)[:, None] % 2 == case.seed % 2, with_ends(dyadic, case.seed), dyadic
        )
    if case.values == "every":
        narrow = torch.float32 if kind == torch.float64 else kind  # no oracle is wider than float64
        gate = every_pattern(case.seed, (case.tokens, case.features), narrow).to(kind)
        return interleave_halves(gate, dyadic[:, : case.features], activation_blocks(case)) if case.gated else gate
    return dyadic


def activation_blocks(case: Any) -> dict[str, Any]:
    """The setting that interleaves gates and values."""
    return {"interleave": case.interleave} if case.interleave else {}


def probs_of(seed: int, rows: int, dtype: str, weights: str) -> Tensor:
    """[rows]: in (0, 1]; a quarter zeros; or in [-2, 2] with a quarter zeros of both signs."""
    if weights != "signed":
        return probabilities(seed, "probs", (rows,), dtype, zeros=weights == "zeros")
    noise = hashed(seed, "zero probs", rows)
    signed = payload(seed, "probs", (rows,), dtype)
    return torch.where(
        torch.from_numpy(noise % 4 == 0), torch.from_numpy(np.where(noise >> 8 & 1, -0.0, 0.0)).to(signed.dtype), signed
    )


@dataclass(kw_only=True)
class Scaling(Name):
    """A recipe's scaling, with its variant and override; a Hadamard transform needs bfloat16."""

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        recipe = {name: getattr(case, name) for name in ("scaling", "variant", "override")}
        yield from (recipe, recipe | {"dtype": "bfloat16"}, {"scaling": case.scaling}, {"scaling": ""})

    def other(self, case: Any) -> Changes:
        variant = (case.variant + 1) % VARIANTS
        return {"variant": variant, "override": other_override(case.override)} if case.scaling else {}


@dataclass(kw_only=True)
class Segments(Parts):
    """Rows per expert, if the function has several experts."""

    def live(self, signature: Signature) -> bool:
        return "tokens_per_expert" in signature.names

    def smaller(self, case: Any) -> Iterator[Changes]:
        """Explicit counts, or fewer rows, if there are several experts."""
        if case.function != "latent_projection" and (case.counts or case.experts > 1):
            yield from super().smaller(case)

    def other(self, case: Any) -> Changes:
        """Two more experts, one of them without rows."""
        return self.changes((0, *counts_of(case)[::-1], 2))


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    """Rows grouped by expert, one matrix per expert. Sizes but the tail are in UNITs."""

    tokens: int = size(more=2)  # rows of all experts
    experts: int = size("L", at_least=1)
    counts: tuple[int, ...] = declared(  # rows per expert; empty: even, remainder to the first experts
        Segments(default=(), total="tokens", number="experts", written_out=lambda case: counts_of(case))
    )
    tail: int = number(0, 1, 7, pairs=(3,), of=("tokens_per_expert",))  # rows past the last segment
    hidden: int = size("N", more=1)  # columns in
    width: int = size("M", more=1)  # columns out
    dtype: str = dtypes(*LOGIT_DTYPES)
    # of the recipe; empty: high precision
    scaling: str = declared(Scaling(default="", values=("", *RECIPES), argument="recipe"))
    variant: int = choice(*range(VARIANTS), also=MORE_VARIANTS)  # of the scaling, in RECIPES
    override: str = declared(Name(default="", values=("", *OVERRIDES)))  # the recipe's backward_override
    bias: str = dtypes("", "float32", "bfloat16", also=("float64", "float16"))  # empty: not given
    into: str = dtypes("", "float32", "float64")  # of accumulate_into; empty: none is given
    accumulator: str = choice("", "float64", argument="accumulator")
    # rows: a power of two per row; special: NaN and infinities in some rows and weights
    # cancelling: of float16, halves of the terms add up to more than its largest number
    # outgrown: earlier steps' amaxes of delayed scaling are so large that all codes are 0
    values: str = choice(*GROUPED_VALUES, also=(*LOW_VALUES, "cancelling", "outgrown"), data=True)
    index_dtype: str = dtypes("int64", "int32")

    recipes: ClassVar[dict[str, tuple[Recipe, ...]]] = USUAL_RECIPES

    @property
    def unit(self) -> int:
        return UNIT.get(self.scaling, 1)

    def clash(self) -> str | None:
        if self.variant and not self.scaling:
            return f"variant is {self.variant}; without a scaling it must be 0"
        if self.scaling and self.variant >= len(RECIPES[self.scaling]):
            return f"variant is {self.variant}; {self.scaling} has {len(RECIPES[self.scaling])} recipes"
        if self.override and not may_override(self.scaling):
            return f"override is {self.override!r} with scaling {self.scaling!r}, which has no backward_override"
        if self.values in LOW_VALUES and not self.scaling:
            return f"values is {self.values!r}; that is made for a scaling"
        if self.values == "cancelling" and (self.scaling or self.dtype != "float16"):
            return f"values {self.values!r} are for products of float16 in high precision"
        if self.values == "outgrown" and self.scaling != "delayed":
            return f"values {self.values!r} are for the scales of delayed scaling"
        return None if fits(self) else f"no exact quantiser of {self.dtype} has values {self.values!r} in this call"

    @property
    def noisy(self) -> bool:
        """Whether the call has noise."""
        return rounds_gradients(recipe_of(self)) and (
            bool(self.grads) or self.function in ("grouped_dgrad", "grouped_wgrad")
        )

    def arguments(self) -> tuple[str, ...]:
        needed_arguments = {"state": self.scaling == "delayed", "noise": rounds_gradients(recipe_of(self))}
        return tuple(name for name, is_needed in needed_arguments.items() if is_needed)


def counts_of(case: Any) -> tuple[int, ...]:
    """Rows per expert, in UNITs."""
    return case.counts or tuple(
        case.tokens // case.experts + (e < case.tokens % case.experts) for e in range(case.experts)
    )


def grouped_rows(case: Any, name: str, columns: int) -> Tensor:
    """[P, columns]: segments by `values`; the tail is NaN, with a scaling also infinities."""
    kind, num_rows = DTYPES[case.dtype], case.tokens * case.unit
    x = (
        factor_of(case, name)
        if case.values in LOW_VALUES
        else payload(case.seed, name, (num_rows + case.tail, columns), case.dtype)
    )
    if case.values == "rows":
        x = (x.double() * row_scales(case.seed, len(x))).to(kind)
    if case.values == "cancelling":
        x = _cancelling(case, name, x)
    if case.values == "special" and columns:
        noise = hashed(case.seed, f"{name} kinds", len(x)).astype(np.int64)
        strange = torch.tensor(INFINITE if case.scaling != "nvfp4" else NO_INFINITY, dtype=kind)
        hit = torch.from_numpy(noise % 4 == 0)[:, None] & (
            torch.arange(columns)[None] == torch.from_numpy((noise >> 8) % columns)[:, None]
        )
        x = torch.where(hit, strange[torch.from_numpy((noise >> 20) % 3)][:, None], x)
    for i in range(case.tail):
        x[num_rows + i] = TAIL[(i + case.seed) % len(TAIL)] if case.scaling else torch.nan
    return x


def _cancelling(case: Any, name: str, x: Tensor) -> Tensor:
    """Halves of a product's terms that cancel each other: halves of the columns, or of each
    expert's rows.
    """
    if case.function != "grouped_wgrad":
        return repeated(x * 2.0**14, -1.0, 1)
    factor = 2.0**14 if name == "d_out" else 1.0
    *segments, tail = x.split([*counts_of(case), case.tail])
    return torch.cat([*(repeated(segment * factor, -1.0 if name == "d_out" else 1.0, 0) for segment in segments), tail])


def repeated(x: Tensor, factor: float, dim: int) -> Tensor:
    """x, with its second half replaced by its first half times the factor. An element in the middle
    stays.
    """
    half = x.shape[dim] // 2
    first, middle = x.narrow(dim, 0, half), x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)
    return torch.cat([first, middle, first * factor], dim)


def weights_of(case: Any, name: str, rows: int, columns: int) -> Tensor:
    """Weights [L, rows, columns].

    With special values, every third expert has a NaN or an infinity.
    """
    if case.values in LOW_VALUES or (case.scaling and case.values == "rows"):
        return factor_of(case, name)
    weight = payload(case.seed, name, (case.experts * rows, columns), case.dtype).reshape(case.experts, rows, columns)
    if case.values == "cancelling":
        weight = repeated(weight, 1.0, 1 if case.function == "grouped_dgrad" else 2)
    if case.values == "special" and rows * columns:
        for e in range(case.seed % 3, case.experts, 3):
            weight[e, e % rows, (e + case.seed) % columns] = (
                (torch.nan, torch.inf)[e % 2] if case.scaling != "nvfp4" else torch.nan
            )
    return weight
