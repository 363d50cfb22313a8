"""The functions of `moe_ref`, fused in Triton: compiled on a GPU, in Triton's interpreter on a CPU.

Signatures, results, errors and gradients are those of the reference. Read `metadata` first (where each token's rows are),
then `permutation` and `routing_map`; `routing`, `balancing`, `capacity`, `gating`, `activations`, `quantization` and `grouped_linear` stand by
themselves. The kernels are in `kernels`, their block sizes in `tuning`.
"""

from typing import Any

from torch import Tensor

from moe_fast import backend as backend  # first: it chooses the interpreter before any kernel is decorated
from moe_fast.activations import PROBS, activation, activation_backward, glu, glu_backward
from moe_fast.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_fast.capacity import drop_tokens, expert_capacity
from moe_fast.gating import gate, jitter
from moe_fast.linear import check_product, grouped_dgrad, grouped_linear, grouped_wgrad
from moe_fast.permutation import MERGING, SUMMED, permute, sort_chunks, unpermute
from moe_fast.quantization import check_recipe, new_quantizer_state, quantize, update_scales
from moe_fast.quantized import amax, codes, dequantize, scales
from moe_fast.router import finish_batch, new_state, route, state_from, state_tensors
from moe_fast.routing import check_computed, check_rows, topk_indices, topk_routing
from moe_fast.routing_map import indices_to_multihot, multihot_to_indices, pad_routing_map

__all__ = [
    "activation",
    "activation_backward",
    "amax",
    "attach_loss",
    "aux_loss_scores",
    "codes",
    "declares",
    "dequantize",
    "drop_tokens",
    "expert_capacity",
    "finish_batch",
    "gate",
    "glu",
    "glu_backward",
    "grouped_dgrad",
    "grouped_linear",
    "grouped_wgrad",
    "indices_to_multihot",
    "jitter",
    "load_balancing_loss",
    "multihot_to_indices",
    "new_quantizer_state",
    "new_state",
    "pad_routing_map",
    "permute",
    "quantize",
    "route",
    "scales",
    "sort_chunks",
    "state_from",
    "state_tensors",
    "supports",
    "topk_indices",
    "topk_routing",
    "unpermute",
    "update_expert_bias",
    "update_scales",
    "z_loss",
]

_COPY = {"deterministic": True, "host_sync_free": True, "graph_capturable": True, "noncontiguous": True}
_SUM = {"accumulator": "float32", "reduction_order": "ascending experts", **_COPY}
_COMPUTED = {"accumulator": "float32", **_COPY}
_PRODUCT = {"reduction_order": "ascending", "unchecked": ("tokens_per_expert",), **_COMPUTED}
_READ = {**_COPY, "host_sync_free": False, "graph_capturable": False}  # as long as the splits say
_CHOICE = {"tie_rule": "lowest_index", **_COMPUTED}
_DECLARED: dict[str, dict[str, Any]] = {
    "permute": _SUM,  # the sum is its gradient; free of syncs when num_rows or capacity is given
    "unpermute": _SUM,
    "sort_chunks": {**_COPY, "unchecked": ("chunk_sizes", "order")},
    "pad_routing_map": _COPY,
    "indices_to_multihot": {**_COPY, "unchecked": ("indices",)},
    "multihot_to_indices": _COPY,
    "route": {"accumulator": "float32", "deterministic": True, "unchecked": ("replay_target",)},
    "topk_indices": {**_CHOICE, "unchecked": ("precomputed_indices",)},
    "topk_routing": {**_CHOICE, "unchecked": ("precomputed_indices",)},
    "aux_loss_scores": _CHOICE,
    "load_balancing_loss": _COMPUTED,
    "z_loss": _COMPUTED,
    "attach_loss": _COPY,
    "update_expert_bias": _COPY,
    "drop_tokens": _CHOICE,
    "expert_capacity": _COPY,
    "gate": _COMPUTED,
    "jitter": {**_COPY, "deterministic": False},
    "grouped_linear": _PRODUCT,
    "grouped_dgrad": {**_PRODUCT, "differentiable": False},
    "grouped_wgrad": {**_PRODUCT, "differentiable": False},
    "glu": _COMPUTED,
    "glu_backward": {**_COMPUTED, "differentiable": False},
    "activation": _COMPUTED,
    "activation_backward": {**_COMPUTED, "differentiable": False},
    "quantize": {**_COMPUTED, "unchecked": ("splits",)},
    "codes": _COPY,
    "scales": _READ,
    "amax": _READ,
    "dequantize": _COMPUTED,
    "new_quantizer_state": _COPY,
    "update_scales": _COMPUTED,
}


def declares(function: str) -> dict[str, Any]:
    """What this implementation promises about a function, beyond the reference's contract."""
    return dict(_DECLARED[function])


def supports(function: str, *arguments: Any, **settings: Any) -> str | None:
    """Why a call is not supported, or None. Looks at shapes and dtypes only, so meta tensors will do."""
    payload = arguments[0] if arguments else next((settings[name] for name in _PAYLOADS if name in settings), None)
    if not isinstance(payload, Tensor):
        return None
    probs = settings.get("probs")
    if function == "quantize" and len(arguments) > 1:
        settings = {"recipe": arguments[1], **settings}
    if function == "unpermute" and payload.dtype not in SUMMED:
        return f"rows of dtype {payload.dtype}: sums are taken of {SUMMED}"
    if function == "unpermute" and isinstance(probs, Tensor) and probs.dtype not in MERGING:
        return f"probs of dtype {probs.dtype}: rows are merged by {MERGING}"
    if function in _ACTIVATING and isinstance(probs, Tensor) and probs.dtype not in PROBS:
        return f"probs of dtype {probs.dtype}: rows are multiplied by {PROBS}"
    if function == "permute" and payload.requires_grad and payload.dtype not in MERGING:
        return f"tokens of dtype {payload.dtype} that require a gradient: sums are taken of {MERGING}"
    if function in ("permute", "sort_chunks") and not backend.movable(payload.dtype):
        return f"a payload of dtype {payload.dtype}: elements have at most 8 bytes"
    return _not_computed(function, payload, settings) if function in _COMPUTING else None


def _not_computed(function: str, payload: Tensor, settings: dict[str, Any]) -> str | None:
    """Why these logits, scores or rows are not computed with, or None."""
    try:
        if function in _GROUPED:
            check_product(payload, settings.get("recipe"), settings.get("accumulator", "float32"))
        elif function == "quantize":
            check_recipe(settings["recipe"], settings.get("role", "input"), settings.get("columnwise", False))
        elif function == "load_balancing_loss":
            check_computed("scores", payload)
        else:
            check_rows(payload, settings.get("topk", 1), settings.get("expert_bias"))
    except ValueError as error:
        return str(error)
    return None


_PAYLOADS = ("tokens", "tokens_TH", "rows", "rows_PH", "rows_RH", "logits", "logits_TE", "scores", "h", "h_PF2", "h_PF", "x", "x_MN", "d_out", "d_out_PM")
_GROUPED = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
_COMPUTING = ("topk_indices", "topk_routing", "aux_loss_scores", "z_loss", "load_balancing_loss", "quantize", *_GROUPED)
_ACTIVATING = ("glu", "glu_backward", "activation", "activation_backward")
