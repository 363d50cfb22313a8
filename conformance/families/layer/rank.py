"""The results of one rank in running numbers, before their last rounding."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conformance.analysis.running import Running
from conformance.analysis.shared_stages import Shared, SharedBackward, shared_backward, shared_forward
from conformance.families.layer.stages import Layer, added


@dataclass(frozen=True)
class Rank:
    """One rank of a layer: its tokens, its experts, and its shares of sums over tokens."""

    layer: Layer
    rank: int
    factors: Tensor  # [T,H] of the router's input, powers of two

    @property
    def seen(self) -> Running:
        """The router's input."""
        return self.jittered(self.x)

    def jittered(self, x: Running) -> Running:
        return Running(x.value * self.factors, x.error * self.factors, x.dtype)

    @property
    def x(self) -> Running:
        return Running.of(self.layer.calls[self.rank].required["x"], self.layer.storage)

    @cached_property
    def shared(self) -> Shared | None:
        p, layer = self.layer.parameters, self.layer
        if "shared_fc1_weight" not in p:
            return None
        weights = (p["shared_fc1_weight"][None], p["shared_fc2_weight"][None])
        count, settings = torch.tensor([len(self.x)]), layer.config.shared_experts
        return shared_forward(layer.call(self.x, count, weights, settings=settings), p.get("shared_gate_weight"))

    @cached_property
    def d_shared(self) -> SharedBackward:
        assert self.shared is not None
        return shared_backward(self.shared, Running.of(self.d_output, self.layer.sums))

    @property
    def d_output(self) -> Tensor:
        return self.layer.calls[self.rank].cotangents["output"]

    @property
    def output(self) -> Running:
        """[T,H]"""
        layer, rank_slice = self.layer, self.layer.parts[self.rank]
        routed = layer.routed[rank_slice]
        return routed if self.shared is None else added([routed, layer.stored(self.shared.out)])

    @cached_property
    def d_logits(self) -> Running:
        return self.layer.d_logits(self.rank)

    @property
    def gradients(self) -> dict[str, Callable[[], Running]]:
        """By input."""
        layer, experts = self.layer, self.layer.d_experts
        rank_slice = layer.parts[self.rank]
        local = experts_of(layer, self.rank)
        d_tokens, d_routed = layer.d_tokens[rank_slice], layer.d_routed[rank_slice]
        return {
            "x": self.d_x,
            "router_weight": lambda: self.of_router(layer.product(self.d_logits.mT, self.seen.mT)),
            "router_bias": lambda: self.of_router(layer.product(self.d_logits.mT, torch.ones(1, len(self.x))))[:, 0],
            "fc1_weight": lambda: experts.fc1_weight()[0][local],
            "fc2_weight": lambda: experts.fc2_weight()[0][local],
            "fc1_bias": lambda: experts.fc1_bias[local],
            "fc2_bias": lambda: experts.fc2_bias[local],
            "latent_down": lambda: layer.product(d_tokens.mT, self.x.mT),
            "latent_up": lambda: layer.product(d_routed.mT, layer.combined[rank_slice].mT),
            "shared_fc1_weight": lambda: self.d_shared.mlp.fc1_weight()[0][0],
            "shared_fc2_weight": lambda: self.d_shared.mlp.fc2_weight()[0][0],
            "shared_gate_weight": lambda: known(self.d_shared.gate_weight),
        }

    def d_x(self) -> Running:
        """[T,H]"""
        layer, p = self.layer, self.layer.parameters
        d_tokens = layer.d_tokens[layer.parts[self.rank]]
        down = p.get("latent_down")
        terms = [
            self.jittered(layer.stored(self.of_router(layer.product(self.d_logits, p["router_weight"].mT)))),
            d_tokens if down is None else layer.product(d_tokens, down.mT),
            *([] if self.shared is None else [self.d_shared.x]),
        ]
        return added([layer.stored(term) for term in terms])

    def of_router(self, x: Running) -> Running:
        """A gradient of the gate, rounded to the router's dtype if it is wider than the storage."""
        layer = self.layer
        return x if layer.logit_dtype == layer.storage else layer.stored(x, layer.logit_dtype)


def experts_of(layer: Layer, rank: int) -> slice:
    local = layer.routing.shape[1] // len(layer.calls)
    return slice(rank * local, (rank + 1) * local)


def known(x: Running | None) -> Running:
    assert x is not None
    return x
