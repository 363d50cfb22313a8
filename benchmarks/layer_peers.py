"""The layer by other packages, where they are installed: peers of `benchmarks.layer`, in bfloat16.

- Liger (`liger-kernel`): `LigerFusedMoEFunction`, which gathers in its first product. Its router is
  torch's. The host waits for its number of tiles. Its kernels tune themselves in the first call,
  which takes minutes for a new shape; with LIGER_FUSED_MOE_AUTOTUNE=0 each has one configuration.
- Transformer Engine: `moe_permute_with_probs`, `GroupedLinear`, `moe_unpermute`, with SwiGLU and
  the probabilities compiled by torch, as Megatron joins them. It takes rows per expert on the
  host: they are counted beforehand, untimed.

A package that is missing is told in a sentence. A result is compared before it is timed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Peer(NamedTuple):
    """A layer of another package: its forward, and the leaves of its gradients."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]

    def __call__(self) -> Tensor:
        return self.forward()


def chosen(layer: Any) -> tuple[Tensor, Tensor]:
    """The experts [T,K] and their weights, by torch."""
    x, p = layer.x_TH, layer.parameters
    logits, experts = (x @ p.router_weight.t()).topk(layer.shape.topk)
    return experts, logits.float().softmax(-1)


def liger(layer: Any) -> Peer:
    """Raises ImportError where liger-kernel is not installed."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, p = layer.x_TH, layer.parameters

    def forward() -> Tensor:
        experts, weights = chosen(layer)
        out: Tensor = LigerFusedMoEFunction.apply(x, p.fc1_weight, p.fc2_weight, experts.int(), weights.to(x.dtype))
        return out

    return Peer(forward, [x, *p[:3]])


def _weighted_swiglu(h: Tensor, probs: Tensor) -> Tensor:
    gates, values = h.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gates) * values * probs[:, None]).to(h.dtype)


def transformer_engine(layer: Any) -> Peer:
    """Raises ImportError where Transformer Engine is not installed."""
    import transformer_engine.pytorch as te

    x, p, shape = layer.x_TH, layer.parameters, layer.shape
    activate = torch.compile(_weighted_swiglu, dynamic=False)
    sizes = ((shape.hidden, 2 * shape.width, p.fc1_weight), (shape.width, shape.hidden, p.fc2_weight))
    linears = [
        te.GroupedLinear(len(w), ins, outs, bias=False, params_dtype=x.dtype, device=x.device) for ins, outs, w in sizes
    ]
    for linear, (_, _, weight) in zip(linears, sizes, strict=True):
        for expert, matrix in enumerate(weight.detach()):
            getattr(linear, f"weight{expert}").data = matrix  # the same memory
    with torch.no_grad():
        counts = torch.bincount(chosen(layer)[0].flatten(), minlength=shape.experts).tolist()

    def forward() -> Tensor:
        experts, weights = chosen(layer)
        probs = torch.zeros(len(x), shape.experts, dtype=weights.dtype, device=x.device).scatter(1, experts, weights)
        routed = torch.zeros_like(probs, dtype=torch.bool).scatter(1, experts, True)
        rows, row_probs, row_map = te.moe_permute_with_probs(x, probs, routed, num_out_tokens=experts.numel())
        h = linears[0](rows, counts)
        y = linears[1](activate(h, row_probs), counts)
        out: Tensor = te.moe_unpermute(y, row_map, restore_shape=x.shape, map_type="mask")
        return out

    return Peer(forward, [x, p.router_weight, *(w for linear in linears for w in linear.parameters())])


ADAPTERS = {"Liger": liger, "Transformer Engine": transformer_engine}


def installed(layer: Any, wanted: Callable[[str], bool]) -> dict[str, Peer]:
    """The peers that are wanted and can be made; a sentence for each other."""
    peers = {}
    for title, make in ADAPTERS.items():
        if not wanted(title):
            continue
        try:
            peers[title] = make(layer)
        except (ImportError, OSError) as error:  # OSError: its library lacks another
            print(f"{title} is left out, because it cannot be imported: {error}", flush=True)
    return peers


def replayed(capture: Callable[[Any], Callable[[], object]], call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a call's graph; the call itself where the host waits for the device in it."""
    try:
        return capture(call)
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        if "synchroniz" not in str(error):
            raise
        return partial(call)
