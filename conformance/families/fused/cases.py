"""Cases of fused stages: rows that a routing map or an activation makes, and how they are quantised."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import LAYOUTS, choice, dtypes, flag
from conformance.core.case import Case
from conformance.core.tensors import DTYPES, hashed, payload
from conformance.families.experts.cases import VALUES, WEIGHTS, ActivationCase, hidden_of, probs_of
from conformance.families.permutation.cases import FLOATS, RoutingCase
from conformance.families.quantization import cases as quantization
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    SCALINGS,
    TAIL,
    VARIANTS,
    QuantizeCase,
    RecipeFields,
    recipe_of,
    splits_of,
    unit_of,
)
from moe_ref.config import GATED, PLAIN, Recipe


@dataclass(frozen=True, kw_only=True)
class PermutedQuantizationCase(RecipeFields, RoutingCase):
    """A routing map, and how the permuted rows are quantised. `hidden`, `align` and `capacity` are in the scaling's units."""

    dtype: str = dtypes(*FLOATS)
    values: str = choice(*quantization.VALUES)
    scaling: str = choice(*SCALINGS)
    variant: int = choice(*range(VARIANTS), turns=True)
    role: str = choice(*ROLES, argument="role")
    direction: str = choice(*DIRECTIONS)
    gemm: bool = flag()  # whether scales are also read in the layout of matrix products
    unused: str = choice("", "rows", "probs", of=("probs",))  # rows: the values of both directions

    def clash(self) -> str | None:
        quantized = _quantizing(self)
        if quantization.is_random(quantized):
            return "rows that are permuted in the same step have no noise to be rounded with"
        return permuting(self).clash() or quantized.clash()

    def arguments(self) -> tuple[str, ...]:
        aligned = unit_of(self) > 1 and not self.capacity
        return (*super().arguments(), *(("align",) if aligned else ()))

    @property
    def sized(self) -> bool:
        return bool(self.capacity) or self.slack is not None

    @property
    def uses_rowwise(self) -> bool:
        return self.rowwise and self.unused != "rows"

    @property
    def uses_columnwise(self) -> bool:
        return self.columnwise and self.unused != "rows"


def _quantizing(case: PermutedQuantizationCase) -> QuantizeCase:
    """The quantisation, as if nothing were permuted: a row for each token, and up to a unit more."""
    names = ("scaling", "variant", "role", "direction", "hidden", "dtype", "values", "seed")
    common = {name: getattr(case, name) for name in names}
    return QuantizeCase(function="quantize", tokens=-(-case.tokens // unit_of(case)), **common)


def permuting(case: PermutedQuantizationCase) -> RoutingCase:
    """The permutation, in rows; a scaling of whole blocks has an alignment where no capacity is asked for."""
    unit = unit_of(case)
    align = case.align or (1 if unit > 1 and not case.capacity else 0)
    changes = {"function": "permute", "values": "dyadic", "align": unit * align}
    changes |= {"hidden": unit * case.hidden, "capacity": unit * case.capacity}
    return RoutingCase(**{field.name: getattr(case, field.name) for field in fields(RoutingCase)} | changes)


def tokens_of(case: PermutedQuantizationCase, token_P: Tensor) -> Tensor:
    """Values as `quantize` has them; tokens without a row hold what must reach no amax."""
    tokens = quantization.x_of(_quantizing(case))[: case.tokens].clone()
    without = torch.ones(case.tokens, dtype=torch.bool)
    without[token_P[token_P >= 0]] = False
    strange = torch.tensor(TAIL, dtype=tokens.dtype)[(torch.arange(case.tokens) + case.seed) % len(TAIL)]
    return torch.where(without[:, None], strange[:, None], tokens)


def state_of(case: PermutedQuantizationCase) -> dict[str, Tensor]:
    """Another scale for each expert, and what its history holds so far."""
    length = recipe_of(case).amax_history_len
    assert length is not None
    history = payload(case.seed, "amax_history", (case.experts, length), "float32").abs()
    exponent = torch.from_numpy(hashed(case.seed, "scale", case.experts).astype("int64")) % 9 - 4
    return {"amax_history": history, "scale": (torch.exp2(exponent.double()) * 1.25).float()}


# by scaling and variant, without 4over6, which chooses by sums of errors: that is for exact values to show
RECIPES_HERE: dict[str, tuple[Recipe, ...]] = RECIPES | {
    "nvfp4": (
        Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
        Recipe("nvfp4"),
        Recipe("nvfp4", hadamard=False, stochastic_rounding=False, row_scaled_activation=True),
    )
}
BACKWARD = ("glu_backward_and_quantize", "activation_backward_and_quantize")
OF_GATES = ("glu_and_quantize", "glu_backward_and_quantize")
FUNCTIONS = ("glu_and_quantize", "activation_and_quantize", *BACKWARD)


@dataclass(frozen=True, kw_only=True)
class QuantizedActivationCase(RecipeFields, Case):
    """Rows that an activation, or its gradient, is applied to, and how the result is quantised."""

    scaling: str = "current"
    variant: int = 0  # of the scaling, in RECIPES_HERE
    direction: str = "rowwise"
    rounded: bool = False  # round_before_quantize
    tokens: int = 1  # rows of the groups together, in UNITs
    experts: int = 0  # groups; 0: no splits are given, all rows are one
    counts: tuple[int, ...] = ()  # rows of each group in UNITs; empty: as even as can be
    tail: int = 0  # rows behind the last group
    width: int = 1  # F, in UNITs
    kind: str = ""  # empty: the function's own
    dtype: str = "float32"
    probs: str = ""  # their dtype; empty: none are given
    weights: str = "plain"  # of the probs
    values: str = "dyadic"  # of h; both as in ActivationCase
    offset: int = 0  # in eighths
    clamp: int = 0  # in eighths; 0: none
    alpha: int = 0  # in thousandths; 0: none
    interleave: int = 0  # 0: none
    index_dtype: str = "int64"
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    recipes: ClassVar[dict[str, tuple[Recipe, ...]]] = RECIPES_HERE
    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "scaling": SCALINGS,
        "direction": DIRECTIONS,
        "values": VALUES,
        "weights": WEIGHTS,
        "kind": GATED + PLAIN,
        "layout": LAYOUTS,
        "dtype": ("float32", "bfloat16", "float16"),
    }

    def __post_init__(self) -> None:
        least = min(self.tokens, self.tail, self.width, self.experts, self.clamp, self.alpha, self.interleave)
        if least < 0 or not 0 <= self.variant < VARIANTS:
            sizes = f"{self.tokens}, {self.tail}, {self.width}, {self.experts}, {self.clamp}, {self.alpha}, {self.interleave}, {self.variant}"
            raise ValueError(
                f"tokens, tail, width, experts, clamp, alpha, interleave ≥ 0 and variant < {VARIANTS} are needed; they are {sizes}"
            )
        if self.counts and (
            len(self.counts) != self.experts or min(self.counts) < 0 or sum(self.counts) != self.tokens
        ):
            raise ValueError(
                f"counts is {self.counts}; it must have {self.experts} numbers ≥ 0 that sum to {self.tokens}"
            )
        if self.tail and not self.experts:
            raise ValueError(f"tail is {self.tail}; without groups (experts 0) no row is behind the last one")


QuantizedActivationCase.serves(*FUNCTIONS)


def is_transformed(case: QuantizedActivationCase) -> bool:
    """Whether a Hadamard transform is taken."""
    return bool(recipe_of(case).hadamard) and case.direction != "rowwise"


def is_random(case: QuantizedActivationCase) -> bool:
    """Whether rounding is by a noise tensor."""
    return bool(recipe_of(case).stochastic_rounding) and case.function in BACKWARD


def fits(case: QuantizedActivationCase) -> bool:
    """Whether the reference takes the call, and what is asked of the gradients passes through no transform."""
    divides = not case.interleave or (case.width * unit_of(case)) % case.interleave == 0
    right_alpha = not case.alpha or case.kind in ("", "swiglu", "quick_geglu")
    transformed = is_transformed(case)
    plain = case.dtype == "bfloat16" and case.rounded and not (case.grads and case.direction == "columnwise")
    return divides and right_alpha and (not transformed or plain)


def inputs_of(case: QuantizedActivationCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The required inputs and the settings of the call, but for a state. Rows behind the last group hold what must reach nothing."""
    unit = unit_of(case)
    own, width = case.tokens * unit, case.width * unit
    rows = own + case.tail
    plain = ActivationCase(
        function="glu", tokens=rows, dtype=case.dtype, values=case.values, clamp=case.clamp, seed=case.seed
    )
    columns = 2 * width if case.function in OF_GATES else width
    required: dict[str, Any] = {"h": _spoilt(hidden_of(plain, columns), own, case.seed), "recipe": recipe_of(case)}
    if case.function in BACKWARD:
        required = {
            "d_out": _spoilt(payload(case.seed, "d_out", (rows, width), case.dtype), own, case.seed + 1)
        } | required
    if case.scaling == "delayed":
        groups = max(case.experts, 1)
        exponent = torch.from_numpy(hashed(case.seed, "scale", groups).astype(np.int64)) % 9 - 2
        required["scale"] = torch.exp2(exponent.float()) * torch.where(torch.arange(groups) % 2 == 1, 1.375, 1.0)
        length = recipe_of(case).amax_history_len or 1
        history = payload(case.seed, "history", (groups, length), "float32").abs()
        required["history"] = torch.where(
            torch.arange(groups)[:, None] % 3 == 1, 2.0**14, history
        )  # one that has seen more than there is here
    settings: dict[str, Any] = {}
    if case.probs:
        settings["probs"] = _spoilt(probs_of(case.seed, rows, case.probs, case.weights), own, case.seed + 2)
    settings |= {"kind": case.kind} if case.kind else {}
    settings |= {
        name: getattr(case, name) / per
        for name, per in (("offset", 8), ("clamp", 8), ("alpha", 1000))
        if getattr(case, name)
    }
    settings |= {"interleave": case.interleave} if case.interleave else {}
    settings |= {"splits": torch.tensor(splits_of(case), dtype=DTYPES[case.index_dtype])} if case.experts else {}
    settings |= case.direction_settings
    settings |= {"noise": noise_of(case, (rows, columns))} if is_random(case) else {}
    return required, settings | ({"round_before_quantize": True} if case.rounded else {})


def _spoilt(x: Tensor, own: int, seed: int) -> Tensor:
    """x with infinities and NaN behind the rows of all groups."""
    for i in range(own, len(x)):
        x[i] = TAIL[(i + seed) % len(TAIL)]
    return x


def noise_of(case: QuantizedActivationCase, shape: tuple[int, int]) -> Tensor:
    """[2,*shape] float32 in (0, 1): odd multiples of 2^-24."""
    bits = hashed(case.seed, "noise", 2 * shape[0] * shape[1]) >> 9
    return torch.from_numpy((2.0 * bits + 1) / 2**24).to(torch.float32).reshape(2, *shape)
