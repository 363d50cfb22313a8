"""Cases of functions whose contract has no signature yet. It goes away with the last of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.covering import Covered, covering
from conformance.core.space import Space
from conformance.engine.choose import unconverted_far, unconverted_shapes
from conformance.families.dispatch import axes as axes_dispatch
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.dispatch.space import dispatch_cases, law_cases
from conformance.families.experts import axes_mlp
from conformance.families.experts.space_mlp import mlp_cases, shared_cases
from conformance.families.experts.space_recipes import recipe_cases
from conformance.families.fused import axes as axes_permuted_quantization
from conformance.families.fused import axes_activate as axes_quantized_activations
from conformance.families.fused.space import permuted_quantization_cases
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import quantized_activation_cases

Row = dict[str, Any]

STRATEGIES: dict[str, Callable[[str, Space], st.SearchStrategy[Case]]] = {
    **dict.fromkeys(ACTIVATED_AND_QUANTIZED, quantized_activation_cases),
    "permute_and_quantize": permuted_quantization_cases,
    **dict.fromkeys(("grouped_mlp", "sequential_mlp"), mlp_cases),
    "shared_experts": shared_cases,
    **dict.fromkeys(COLLECTIVES, dispatch_cases),
}
# how much of a run a function has: by how much can go wrong in it
WEIGHT = {
    **dict.fromkeys(
        (
            "glu_and_quantize",
            "activation_and_quantize",
            "glu_backward_and_quantize",
            "activation_backward_and_quantize",
        ),
        0.5,
    ),
    "permute_and_quantize": 1,
    **dict.fromkeys(("grouped_mlp", "shared_experts"), 0.5),
    "sequential_mlp": 0.2,
    **dict.fromkeys(COLLECTIVES, 0.25),
}
FLOATS = ("float64", "float32", "bfloat16", "float16")
WORDS = {  # fields that are one of a few words, unless their class says otherwise
    "poison": ("nan", "max", "zero"),
    "values": ("dyadic", "wide", "special"),
    "layout": ("contiguous", "transposed", "strided", "shifted", "expanded", "wide_rows", "wide_columns"),
    "dtype": (*FLOATS, "float8_e4m3fn", "float8_e5m2", "uint8"),
    "probs": FLOATS,
    "map_dtype": ("bool", "uint8", "int16", "int32", "int64"),
    "index_dtype": ("int64", "int32", "int16"),
}
HOMES = (
    axes_mlp,
    axes_dispatch,
    axes_permuted_quantization,
    axes_quantized_activations,
)
AXES = {function: axes for home in HOMES for function, axes in home.AXES.items()}


def _home(function: str) -> Any:
    return next(home for home in HOMES if function in home.AXES)


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    layout, of = row["layout"]
    return (
        not (row.get("grads") and function in space.not_differentiable)
        and not (layout != "contiguous" and function in space.contiguous_only)
        and not (of.startswith("d_") and "grads" in row and not row["grads"])
        and bool(_home(function).legal(function, row, space))
    )


def case_of(function: str, row: Row, index: int) -> Case:
    """The case that the row describes."""
    fields = dict(row)
    fields["layout"], fields["layout_of"] = fields["layout"]
    case: Case = _home(function).case_of(function, fields | {"seed": index})
    return case


def _with_law(case: Case, index: int, space: Space) -> Case:
    laws = space.laws(case)
    return replace(case, law=laws[index % len(laws)])


class Unconverted:
    """What `core.scope.Scope` is for converted functions."""

    def __init__(self, function: str, space: Space) -> None:
        self.function, self.space = function, space

    @property
    def weight(self) -> float:
        return WEIGHT[self.function]

    @property
    def illegal(self) -> Row:
        """The fields of illegal calls."""
        shapes: dict[type[Case], Row] = {
            DispatchCase: {"counts": (2, 1)[: self.space.ranks]},
        }
        return shapes.get(Case.family[self.function], {"tokens": 2, "experts": 2})

    def drawn(self) -> st.SearchStrategy[Case]:
        return STRATEGIES[self.function](self.function, self.space)

    def covering(self) -> Covered:
        rows, pairs, impossible = covering(AXES[self.function], lambda row: legal(self.function, row, self.space))
        cases = [_with_law(case_of(self.function, row, index), index, self.space) for index, row in enumerate(rows)]
        return Covered(cases, pairs, impossible)

    def more(self, others: list[Case]) -> list[Case]:
        recipes = recipe_cases(self.function, self.space)
        laws = law_cases(self.function, self.space, [*others, *recipes]) if self.function in COLLECTIVES else []
        return [*recipes, *laws]

    def always(self) -> list[Case]:
        return unconverted_shapes.shape_cases(self.function, self.space)

    def far(self) -> list[Case]:
        return unconverted_far.far_cases(self.function, self.space)

    def refused(self, case: Case) -> str | None:
        """Why a field has a word that it may not have; None: no field has."""
        for name, known in (WORDS | case.words).items():
            value = getattr(case, name, "")
            if value and value not in known:
                return f"{name} is {value!r}; {case.function} has {', '.join(known)}"
        return None
