"""Cases of fused stages: rows from a routing map or an activation, and their quantiser."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import choice, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.lists import parts
from conformance.core.tensors import DTYPES, hashed, payload
from conformance.families.experts.activations import activation_settings
from conformance.families.experts.cases import ActivationCase, hidden_of, probs_of
from conformance.families.permutation.cases import FLOATS, RoutingCase
from conformance.families.permutation.permute import Permute
from conformance.families.quantization import cases as quantization
from conformance.families.quantization.cases import (
    DIRECTIONS,
    MORE_VARIANTS,
    RECIPES,
    ROLES,
    SCALINGS,
    TAIL,
    VARIANTS,
    QuantizeCase,
    RecipeFields,
    recipe_of,
    splits_of,
)
from moe_ref.config import Recipe


@dataclass(frozen=True, kw_only=True)
class PermutedQuantizationCase(RecipeFields, RoutingCase):
    """A routing map, and a quantiser of its rows. `hidden`, `align` and `capacity` are in UNITs."""

    dtype: str = dtypes(*FLOATS, also=("float64",))
    values: str = choice(*quantization.VALUES, also=quantization.MORE_VALUES, data=True)
    scaling: str = choice(*SCALINGS)
    variant: int = choice(*range(VARIANTS), also=MORE_VARIANTS, turns=True)
    role: str = choice(*ROLES, argument="role")
    direction: str = choice(*DIRECTIONS)
    gemm: bool = flag(argument="scales.layout")  # scales also read in GEMM layout
    unused: str = choice("", "rows", "probs", of=("probs",))  # rows: the values of both directions

    def clash(self) -> str | None:
        quantized = _quantizing(self)
        if self.no_recipe():
            return self.no_recipe()
        if quantization.is_random(quantized):
            return "a gradient that is permuted in the same step has no noise to be rounded with"
        return permuting(self).clash() or quantized.clash()

    def arguments(self) -> tuple[str, ...]:
        aligned = self.unit > 1 and not self.capacity
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
    """The quantisation without permutation: one row per token, and up to a unit more."""
    names = ("scaling", "variant", "role", "direction", "hidden", "dtype", "values", "seed")
    common = {name: getattr(case, name) for name in names}
    return QuantizeCase(function="quantize", tokens=-(-case.tokens // case.unit), **common)


PERMUTED = RoutingCase(function=Permute.function)


def permuting(case: PermutedQuantizationCase) -> RoutingCase:
    """The permutation, in rows; block scalings without a capacity set an alignment."""
    unit = case.unit
    align = case.align or (1 if unit > 1 and not case.capacity else 0)
    changes = {"function": Permute.function, "values": "dyadic", "align": unit * align}
    changes |= {"hidden": unit * case.hidden, "capacity": unit * case.capacity}
    return PERMUTED.taking({name: getattr(case, name) for name in PERMUTED.__dict__} | changes)


def tokens_of(case: PermutedQuantizationCase, token_P: Tensor) -> Tensor:
    """Values as in `quantize`. Tokens without a row hold garbage, which must enter no amax."""
    tokens = quantization.x_of(_quantizing(case))[: case.tokens].clone()
    without = torch.ones(case.tokens, dtype=torch.bool)
    without[token_P[token_P >= 0]] = False
    strange = torch.tensor(TAIL, dtype=tokens.dtype)[(torch.arange(case.tokens) + case.seed) % len(TAIL)]
    return torch.where(without[:, None], strange[:, None], tokens)


def state_of(case: PermutedQuantizationCase) -> dict[str, Tensor]:
    """A different scale per expert, and its amax history."""
    length = recipe_of(case).amax_history_len
    assert length is not None
    history = payload(case.seed, "amax_history", (case.experts, length), "float32").abs()
    exponent = torch.from_numpy(hashed(case.seed, "scale", case.experts).astype("int64")) % 9 - 4
    return {"amax_history": history, "scale": (torch.exp2(exponent.double()) * 1.25).float()}


# by scaling and variant; without 4over6, whose choice by sums of errors needs exact values to judge
ACTIVATION_RECIPES: dict[str, tuple[Recipe, ...]] = RECIPES | {
    "nvfp4": (
        Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
        Recipe("nvfp4"),
        Recipe("nvfp4", hadamard=False, stochastic_rounding=False, row_scaled_activation=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class _ScalingCase(RecipeFields, Case):
    """Fields before the activation's, whose blocks of columns must divide a width in UNITs."""

    scaling: str = choice(*SCALINGS)
    variant: int = choice(*range(VARIANTS), also=(3, 4), turns=True)  # 3, 4: of current and block scaling


@dataclass(frozen=True, kw_only=True)
class QuantizedActivationCase(ActivationCase, _ScalingCase):
    """Rows for an activation or its gradient, and the quantiser of the result."""

    experts: int = size("E", default=0)  # groups; 0: no splits, one group
    dtype: str = dtypes(*FLOATS)
    rounded: bool = flag(argument="round_before_quantize")
    direction: str = choice(*DIRECTIONS)
    counts: tuple[int, ...] = parts(  # rows per group; like tokens and width in UNITs
        total="tokens", number="experts", written_out=lambda case: tuple(n // case.unit for n in splits_of(case))
    )
    tail: int = number(0, 1, 4, 5, pairs=(4,), given=True)  # rows past the last group
    index_dtype: str = dtypes("int64", "int32")
    gemm: bool = flag(argument="scales.layout")  # scales also read in GEMM layout

    recipes: ClassVar[dict[str, tuple[Recipe, ...]]] = ACTIVATION_RECIPES

    @property
    def backward(self) -> bool:
        return "backward" in self.function

    @property
    def features(self) -> int:
        return self.width * self.unit

    @property
    def only_columnwise(self) -> bool:
        return not self.rowwise

    @property
    def transformed(self) -> bool:
        """Whether a Hadamard transform is applied."""
        return self.no_recipe() is None and bool(recipe_of(self).hadamard) and self.columnwise

    @property
    def noisy(self) -> bool:
        """Whether rounding uses a noise tensor."""
        return self.no_recipe() is None and bool(recipe_of(self).stochastic_rounding) and self.backward

    def clash(self) -> str | None:
        if self.no_recipe():
            return self.no_recipe()
        if self.tail and not self.experts:
            return f"tail is {self.tail}; without groups (experts 0) no row is past the last one"
        if self.transformed and not (self.dtype == "bfloat16" and self.rounded):
            return "a Hadamard transform needs bfloat16 and rounding before it"
        if self.transformed and self.grads and not self.rowwise:
            return "the gradient of a columnwise form alone would pass through the Hadamard transform"
        return super().clash()


def inputs_of(case: QuantizedActivationCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The required inputs, and the settings without the state. Rows past the last group hold
    garbage.
    """
    rows, features = case.tokens * case.unit + case.tail, case.features
    columns = 2 * features if case.gated else features
    required: dict[str, Any] = {"h": _spoilt(case, hidden_of(replace(case, tokens=rows), columns), 0)}
    required["recipe"] = recipe_of(case)
    if case.backward:
        cotangent = payload(case.seed, "d_out", (rows, features), case.dtype)
        required = {"d_out": _spoilt(case, cotangent, 1)} | required
    if case.stateful:
        required |= history_of(case)
    settings: dict[str, Any] = {}
    if case.probs:
        settings["probs"] = _spoilt(case, probs_of(case.seed, rows, case.probs, case.weights), 2)
    settings |= activation_settings(case)
    settings |= {"splits": torch.tensor(splits_of(case), dtype=DTYPES[case.index_dtype])} if case.experts else {}
    settings |= case.direction_settings
    settings |= {"noise": noise_of(case, (rows, columns))} if case.noisy else {}
    return required, settings | ({"round_before_quantize": True} if case.rounded else {})


def history_of(case: QuantizedActivationCase) -> dict[str, Tensor]:
    """A scale per group, and a history of amaxes.

    The history of every third group has larger numbers.
    """
    groups = max(case.experts, 1)
    exponent = torch.from_numpy(hashed(case.seed, "scale", groups).astype(np.int64)) % 9 - 2
    scale = torch.exp2(exponent.float()) * torch.where(torch.arange(groups) % 2 == 1, 1.375, 1.0)
    history = payload(case.seed, "history", (groups, recipe_of(case).amax_history_len or 1), "float32").abs()
    return {"scale": scale, "history": torch.where(torch.arange(groups)[:, None] % 3 == 1, 2.0**14, history)}


def _spoilt(case: QuantizedActivationCase, x: Tensor, shift: int) -> Tensor:
    """x with infinities and NaN past the last group's rows."""
    for i in range(len(x) - case.tail, len(x)):
        x[i] = TAIL[(i + case.seed + shift) % len(TAIL)]
    return x


def noise_of(case: QuantizedActivationCase, shape: tuple[int, int]) -> Tensor:
    """[2,*shape] float32 in (0, 1): odd multiples of 2^-24."""
    bits = hashed(case.seed, "noise", 2 * shape[0] * shape[1]) >> 9
    return torch.from_numpy((2.0 * bits + 1) / 2**24).to(torch.float32).reshape(2, *shape)
