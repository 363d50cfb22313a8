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
from conformance.families.experts.space import INPUTS as EXPERT_INPUTS
from conformance.families.experts.space import expert_shapes
from conformance.families.experts.space_mlp import mlp_shapes
from conformance.families.experts.space_ratios import ratio_cases
from conformance.families.fused.permute_and_quantize import PermutedQuantizationCase
from conformance.families.fused.space import permuted_quantization_shapes
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import quantized_activation_shapes
from conformance.families.router.space import REAL_ROUTERS

# experts and top-k
EDGES = ((1, 1), (31, 4), (32, 32), (33, 3), (65, 16), (1023, 8), (1024, 8), (2048, 4))
# one more than a power of two: a last block that a loop ending too early leaves out
LONG: dict[str, Any] = {"experts": 5, "topk": 2, "seed": 1}  # seed 1: every token has two experts
WIDE: dict[str, Any] = {"tokens": 33, "experts": 257, "topk": 3, "seed": 1}
GRADS = {
    **dict.fromkeys(("drop_tokens",), "probs"),
    **dict.fromkeys(("topk_indices", "topk_routing", "aux_loss_scores", "z_loss", "sinkhorn_routing"), "logits"),
    "load_balancing_loss": "scores",
    "gate": "x+weight",
    "attach_loss": "x+loss",
    **dict.fromkeys(("glu", "activation"), "h+probs"),
    "grouped_linear": "rows+weight",
    **dict.fromkeys(("glu_and_quantize", "activation_and_quantize"), "h+probs"),
    "permute_and_quantize": "tokens+probs",
    **dict.fromkeys(("grouped_mlp", "sequential_mlp"), "rows+fc1_weight+fc2_weight+probs"),
    "shared_experts": "x+fc1_weight+fc2_weight",
    "latent_projection": "x+weight",
    "route": "logits",
}
WITH_PROBS = (
    "glu",
    "activation",
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
    lawful = [replace(case, law=space.laws(case)[i % len(space.laws(case))]) for i, case in enumerate(cases)]
    return [*lawful, *ratio_cases(function, space)]


def _shapes(function: str, space: Space) -> list[dict[str, Any]]:
    # an interpreter pays by the step
    long = LONG | {"tokens": 2049 if space.device == "cuda" else 257}
    if function in ("topk_indices", "topk_routing"):
        plain = [{"tokens": 3, "experts": experts, "topk": topk} for experts, topk in REAL_ROUTERS + EDGES]
        limited = space.accepts(function, "num_groups") and space.accepts(function, "group_topk")
        tied = [  # as many experts as columns, none of them spare
            {"tokens": 3, "experts": 8, "topk": 8, "spread": "equal"},
            {"tokens": 65, "experts": 4, "topk": 2, "spread": "ties", "seed": 3},
        ]
        return [
            *plain,
            long,
            *tied,
            *([{"tokens": 5, "experts": 66, "topk": 8, "groups": 33, "group_topk": 5}] if limited else []),
        ]
    if function == "drop_tokens":
        more: list[dict[str, Any]] = [{"policy": "position"}] if space.accepts(function, "drop_policy") else []
        more += [{"pad": True, "values": "ties"}] if space.accepts(function, "pad_to_capacity") else []
        double = {"tokens": 9, "experts": 3, "topk": 2, "capacity": 2, "dtype": "float64"}
        rest = [WIDE | {"capacity": 1}, long | {"capacity": 257}, double]  # room for few, for all
        last = long | {"seed": 2, "capacity": 65}  # the last token is among the best of some expert
        return [last | how for how in ({}, {"values": "ties"}, *more)] + rest
    if function == "load_balancing_loss":
        return [long, long | {"sequences": 3, "total": "device"}, WIDE]
    if function in ("aux_loss_scores", "z_loss"):
        padded = {"padding": 3} if space.accepts(function, "padding_mask") else {}
        return [long | padded, WIDE | padded]
    if function == "route":
        # what waits to be replayed is saved too
        replayed = {"steps": "record+forward+reload+backward"}
        return [{"tokens": 5, "experts": 4, "topk": 2} | replayed] if space.accepts(function, "replay") else []
    if function == "gate":
        return [{"tokens": 257, "hidden": 129, "experts": 65}]
    if function in ACTIVATED_AND_QUANTIZED:
        return quantized_activation_shapes(function, space)
    if function in AXES_MLP:
        return mlp_shapes(function, space)
    if function == "permute_and_quantize":
        return permuted_quantization_shapes(space)
    return expert_shapes(function, space) if function in EXPERT_INPUTS else []


def _case(function: str, fields: dict[str, Any]) -> Case:
    cls = Case.family[function]
    if cls is PermutedQuantizationCase and "spread" not in fields:
        fields = fields | {"spread": "uniform"}
    return cls(function=function, **{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})
