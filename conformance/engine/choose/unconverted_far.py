"""Cases whose addresses pass 2³¹ elements: every input and cotangent once with far rows and once
with far columns.

The far tensors are strided views of a few rows whose storage is almost all unmapped, so they cost
no memory on a CPU. Outputs are allocated by the implementation and cannot be made far without the
memory; on a GPU one case has it.
"""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.space import far_dispatch
from conformance.families.experts.axes_mlp import AXES as AXES_MLP
from conformance.families.experts.space import INPUTS as EXPERT_INPUTS
from conformance.families.experts.space import far_experts
from conformance.families.experts.space_mlp import far_mlp
from conformance.families.fused.space import far_permuted_quantization
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import far_quantized_activations
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase

INPUTS = {
    "gate": ("x", "weight", "bias", "d_logits"),
    "jitter": ("x",),
    "topk_indices": ("logits", "expert_bias", "precomputed_indices", "d_probs"),
    "topk_routing": ("logits", "expert_bias", "precomputed_indices", "d_probs"),
    "sinkhorn_routing": ("logits", "d_probs"),
    "drop_tokens": ("probs", "routing_map", "d_probs"),
    "aux_loss_scores": ("logits", "padding_mask", "d_scores"),
    "load_balancing_loss": ("scores", "tokens_per_expert"),
    "z_loss": ("logits", "padding_mask"),
    "attach_loss": ("x", "d_x"),
    "update_expert_bias": ("expert_bias", "tokens_per_expert"),
    "route": (),  # made of the functions above
}
ROUTER_VECTORS = ("bias", "expert_bias", "padding_mask", "tokens_per_expert")


def far_cases(function: str, space: Space) -> list[Case]:
    """All far cases of a function that the implementation can be asked for."""
    if function in space.contiguous_only:
        return []
    if function in ACTIVATED_AND_QUANTIZED:
        return far_quantized_activations(function, space)
    if function in AXES_MLP:
        return far_mlp(function, space)
    if function in COLLECTIVES:
        return far_dispatch(function, space)
    if function == "permute_and_quantize":
        return far_permuted_quantization(space)
    if function in EXPERT_INPUTS:
        return far_experts(function, space)
    if function in ROUTER:
        return _far_router(function, space)
    return []


ROUTER = tuple(INPUTS)


def _far_router(function: str, space: Space) -> list[Case]:
    differentiable = function not in space.not_differentiable
    wanted = [
        name
        for name in INPUTS[function]
        if space.accepts(function, name) and (differentiable or not name.startswith("d_"))
    ]
    layouts = {name: ("wide_rows",) if name in ROUTER_VECTORS else ("wide_rows", "wide_columns") for name in wanted}
    return [
        _far_of_router(function, name, layout, differentiable, space) for name in wanted for layout in layouts[name]
    ]


def _far_of_router(function: str, name: str, layout: str, differentiable: bool, space: Space) -> Case:
    """Three rows, and three or four columns, so that a step between them fits into 32 bits; in the
    narrowest dtype that the input may have.
    """
    common: dict[str, Any] = {"function": function, "layout": layout, "layout_of": name, "dtype": "bfloat16"}
    if function in ("gate", "jitter", "attach_loss"):
        grads = (
            {"gate": "x+weight" + "+bias" * (name == "bias"), "attach_loss": "x+loss"}.get(function, "")
            if differentiable
            else ""
        )
        return GateCase(**common, tokens=3, hidden=3, experts=3, bias=name == "bias", grads=grads)
    if function in ("drop_tokens", "load_balancing_loss", "update_expert_bias"):
        grads = {"drop_tokens": "probs", "load_balancing_loss": "scores"}.get(function, "") if differentiable else ""
        kind = {"drop_tokens": "bool", "load_balancing_loss": "int32"}.get(function, "int32")
        return LoadCase(**common, tokens=3, experts=3, topk=2, capacity=1, grads=grads, map_dtype=kind)
    how: dict[str, dict[str, Any]] = {
        "expert_bias": {"score": "sigmoid", "bias": "small"},
        "precomputed_indices": {"precomputed": True},
        "padding_mask": {"padding": 4},
    }
    return LogitsCase(
        **common, tokens=3, experts=4, topk=3, grads="logits" if differentiable else "", **how.get(name, {})
    )
