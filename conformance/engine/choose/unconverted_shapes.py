"""Shapes that a kernel may treat apart: more of something than fits one block, real models, expert
counts around warps and powers of two.
"""

from dataclasses import replace
from typing import Any

from conformance.core.case import Case
from conformance.core.shared_out_space import shared_out_shapes
from conformance.core.space import Space
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.space import dispatch_shapes
from conformance.families.experts.axes_mlp import AXES as AXES_MLP
from conformance.families.experts.space_mlp import mlp_shapes
from conformance.families.fused.permute_and_quantize import PermutedQuantizationCase
from conformance.families.fused.space import permuted_quantization_shapes
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import quantized_activation_shapes

GRADS = {
    **dict.fromkeys(("glu_and_quantize", "activation_and_quantize"), "h+probs"),
    "permute_and_quantize": "tokens+probs",
    **dict.fromkeys(("grouped_mlp", "sequential_mlp"), "rows+fc1_weight+fc2_weight+probs"),
    "shared_experts": "x+fc1_weight+fc2_weight",
}
WITH_PROBS = (
    "permute_and_quantize",
    "grouped_mlp",
    "sequential_mlp",
    *ACTIVATED_AND_QUANTIZED,
)


def shape_cases(function: str, space: Space) -> list[Case]:
    """The shapes of a function, with gradients where there are any; laws go round over them. Then
    those that are chosen for how they are judged.
    """
    if function in COLLECTIVES:
        cases = [_case(function, fields) for fields in dispatch_shapes(function, space)]
        return [replace(case, law=space.laws(case)[i % len(space.laws(case))]) for i, case in enumerate(cases)]
    grads = "" if function in space.not_differentiable else GRADS.get(function, "")
    with_probs = space.accepts(function, "probs") and function in WITH_PROBS
    if not with_probs:
        grads = grads.removesuffix("+probs")
    shapes = [*_shapes(function, space), *shared_out_shapes(function, space)]
    cases = [
        _case(function, fields | ({"probs": "float32"} if with_probs else {}) | {"grads": grads}) for fields in shapes
    ]
    return [replace(case, law=space.laws(case)[i % len(space.laws(case))]) for i, case in enumerate(cases)]


def _shapes(function: str, space: Space) -> list[dict[str, Any]]:
    if function in ACTIVATED_AND_QUANTIZED:
        return quantized_activation_shapes(function, space)
    if function in AXES_MLP:
        return mlp_shapes(function, space)
    if function == "permute_and_quantize":
        return permuted_quantization_shapes(space)
    return []


def _case(function: str, fields: dict[str, Any]) -> Case:
    cls = Case.family[function]
    if cls is PermutedQuantizationCase and "spread" not in fields:
        fields = fields | {"spread": "uniform"}
    return cls(function=function, **{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})
