"""What this implementation promises about its functions, and which calls it does not support."""

from typing import Any

import torch
from torch import Tensor

from moe_fast import dispatch
from moe_fast.experts.activations import PROBS
from moe_fast.experts.linear import check_product
from moe_fast.experts.scaled_linear import scales_in_hardware
from moe_fast.launch import backend
from moe_fast.permutation.permute import MERGING, SUMMED
from moe_fast.quantization.group_scales import casts_in_hardware
from moe_fast.router.selection import check_computed, check_rows

BY_FP8, BY_BLOCKS = (
    ("delayed", "current", "block"),
    ("mxfp8", "nvfp4"),
)  # scalings, by the matrix unit that takes their products
_COPY = {"deterministic": True, "host_sync_free": True, "graph_capturable": True, "noncontiguous": True}
_SUM = {"accumulator": "float32", "reduction_order": "ascending experts", **_COPY}
_COMPUTED = {"accumulator": "float32", **_COPY}
_PRODUCT = {"reduction_order": "ascending", **_COMPUTED}
_QUANTIZED = {**_COMPUTED, "unchecked": ("splits",)}
_GROUPED_PRODUCT = {"unchecked": ("tokens_per_expert",), **_PRODUCT}
_READ = {**_COPY, "host_sync_free": False, "graph_capturable": False}  # as long as the splits say
_CHOICE = {"tie_rule": "lowest_index", **_COMPUTED}
_DISPATCHES = tuple(name for name in dispatch.__all__ if name.endswith("_dispatch"))
_COMBINES = tuple(name for name in dispatch.__all__ if name.endswith("_combine"))
_DECLARED: dict[str, dict[str, Any]] = {
    "permute": _SUM,  # the sum is its gradient; free of syncs when num_rows or capacity is given
    "unpermute": _SUM,
    "sort_chunks": {**_COPY, "unchecked": ("chunk_sizes", "order")},
    "pad_routing_map": _COPY,
    "indices_to_multihot": {**_COPY, "unchecked": ("indices",)},
    "multihot_to_indices": _COPY,
    "deepep_layout": {**_COPY, "unchecked": ("indices",)},
    "route": {**_COMPUTED, "unchecked": ("replay_target",)},
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
    "grouped_linear": _GROUPED_PRODUCT,
    "grouped_dgrad": {**_GROUPED_PRODUCT, "differentiable": False},
    "grouped_wgrad": {**_GROUPED_PRODUCT, "differentiable": False},
    "grouped_mlp": _GROUPED_PRODUCT,
    "sequential_mlp": _GROUPED_PRODUCT,
    "shared_experts": _PRODUCT,
    "latent_projection": _PRODUCT,
    "glu": _COMPUTED,
    "glu_backward": {**_COMPUTED, "differentiable": False},
    "activation": _COMPUTED,
    "activation_backward": {**_COMPUTED, "differentiable": False},
    "quantize": _QUANTIZED,
    "permute_and_quantize": _SUM,  # free of syncs as permute is
    "glu_and_quantize": _QUANTIZED,
    "glu_backward_and_quantize": {**_QUANTIZED, "differentiable": False},
    "activation_and_quantize": _QUANTIZED,
    "activation_backward_and_quantize": {**_QUANTIZED, "differentiable": False},
    "codes": _COPY,
    "scales": _READ,
    "amax": _READ,
    "dequantize": _COMPUTED,
    "new_quantizer_state": _COPY,
    "update_scales": _COMPUTED,
    **dict.fromkeys(_DISPATCHES, _READ),  # the host reads how many rows there are
    **{name: {**_SUM, **_READ} for name in _COMBINES},
}


def declares(function: str) -> dict[str, Any]:
    """What this implementation promises about a function, beyond the reference's contract."""
    return _DECLARED[function] | (_of_the_machine() if function in _GROUPED else {})


def _of_the_machine() -> dict[str, Any]:
    """How products are taken here."""
    device = torch.device("cpu" if backend.INTERPRETED else "cuda")
    emulated: tuple[str, ...] = () if casts_in_hardware(device) else BY_FP8
    emulated += () if scales_in_hardware(device) else BY_BLOCKS
    accumulator = "hopper_fp8" if backend.is_hopper(device) else "float32"  # as that matrix unit adds FP8
    return {"accumulator": accumulator} | ({"emulated": emulated} if emulated else {})


def supports(function: str, *arguments: Any, **settings: Any) -> str | None:
    """Why a call is not supported, or None. Looks at shapes and dtypes only, so meta tensors will do."""
    payload = arguments[0] if arguments else next((settings[name] for name in _PAYLOADS if name in settings), None)
    if not isinstance(payload, Tensor):
        return None
    probs = settings.get("probs")
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
        elif function == "load_balancing_loss":
            check_computed("scores", payload)
        else:
            check_rows(payload, settings.get("topk", 1), settings.get("expert_bias"))
    except ValueError as error:
        return str(error)
    return None


_PAYLOADS = (
    "tokens",
    "tokens_TH",
    "rows",
    "rows_PH",
    "rows_RH",
    "logits",
    "logits_TE",
    "scores",
    "h",
    "h_PF2",
    "h_PF",
    "x",
    "x_MN",
    "d_out",
    "d_out_PM",
)
_GROUPED = (
    "grouped_linear",
    "grouped_dgrad",
    "grouped_wgrad",
    "grouped_mlp",
    "sequential_mlp",
    "shared_experts",
    "latent_projection",
)
_COMPUTING = ("topk_indices", "topk_routing", "aux_loss_scores", "z_loss", "load_balancing_loss", *_GROUPED)
_ACTIVATED_AND_QUANTIZED = (
    "glu_and_quantize",
    "activation_and_quantize",
    "glu_backward_and_quantize",
    "activation_backward_and_quantize",
)
_ACTIVATING = (
    "glu",
    "glu_backward",
    "activation",
    "activation_backward",
    "grouped_mlp",
    "sequential_mlp",
    *_ACTIVATED_AND_QUANTIZED,
)
