"""Options of Megatron without an implementation here, each refused by its name with the reason."""

from collections.abc import Iterable

from moe_ref.config.rules import require

_BENCHMARK = "logits are an argument of `route`, and may be random"
_NCCL_EP = "the backend nccl-ep is not implemented"
_WIRE = "rows travel as they are, or with hybridep as blocks of FP8 codes (`recipe`)"
REFUSED = {
    "moe_router_force_load_balancing": _BENCHMARK,
    "moe_router_force_biased": _BENCHMARK,
    "moe_router_quantile_balancing_ema": "quantile balancing is not implemented",
    "moe_n_hash_layers": "hash routing is not implemented; `precomputed_indices` of `topk_routing` choose experts",
    "moe_ncclep_zero_copy": _NCCL_EP,
    "moe_dispatch_fwd_dtype": _WIRE,
    "moe_combine_bwd_dtype": _WIRE,
    "batch_invariant_mode": "no function has such a mode",
    "moe_pad_experts_for_cuda_graph_inference": "inference engines are not implemented",
}


def check_offered(options: Iterable[tuple[str, object]]) -> None:
    """No option of REFUSED is given, whatever its value."""
    for name, value in options:
        require(name not in REFUSED, name, repr(value), f"left out: {REFUSED.get(name)}")
