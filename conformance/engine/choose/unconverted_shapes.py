"""Shapes that a kernel may treat apart: more of something than fits one block, real models, expert
counts around warps and powers of two.
"""

from dataclasses import replace
from typing import Any

from conformance.core.case import Case
from conformance.core.shared_out_space import shared_out_shapes
from conformance.core.space import Space
from conformance.families.experts.axes_mlp import AXES as AXES_MLP
from conformance.families.experts.space import INPUTS as EXPERT_INPUTS
from conformance.families.experts.space import expert_shapes
from conformance.families.experts.space_mlp import mlp_shapes
from conformance.families.experts.space_ratios import ratio_cases

GRADS = {
    "grouped_linear": "rows+weight",
    **dict.fromkeys(("grouped_mlp", "sequential_mlp"), "rows+fc1_weight+fc2_weight+probs"),
    "shared_experts": "x+fc1_weight+fc2_weight",
    "latent_projection": "x+weight",
}
WITH_PROBS = (
    "grouped_mlp",
    "sequential_mlp",
)


def shape_cases(function: str, space: Space) -> list[Case]:
    """The shapes of a function, with gradients where there are any; laws go round over them. Then
    those that are chosen for how they are judged.
    """
    grads = "" if function in space.not_differentiable else GRADS.get(function, "")
    with_probs = space.accepts(function, "probs") and function in WITH_PROBS
    if not with_probs:
        grads = grads.removesuffix("+probs")
    shapes = [*_shapes(function, space), *shared_out_shapes(function, space)]
    cases = [
        _case(function, fields | ({"probs": "float32"} if with_probs else {}) | {"grads": grads}) for fields in shapes
    ]
    lawful = [replace(case, law=space.laws(case)[i % len(space.laws(case))]) for i, case in enumerate(cases)]
    return [*lawful, *ratio_cases(function, space)]


def _shapes(function: str, space: Space) -> list[dict[str, Any]]:
    if function in AXES_MLP:
        return mlp_shapes(function, space)
    return expert_shapes(function, space) if function in EXPERT_INPUTS else []


def _case(function: str, fields: dict[str, Any]) -> Case:
    cls = Case.family[function]
    return cls(function=function, **{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})
