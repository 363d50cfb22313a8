"""The reference's layer stage by stage, with the result of each stage and its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core.contract import Problem
from conformance.families.experts.precision_mlp import pairs_from
from conformance.families.layer.cases import LayerCase
from conformance.families.layer.routing import routing_of
from moe_ref.config import LayerConfig
from moe_ref.layer import for_shards, route_together

Ranks = Sequence[Tensor]  # one tensor per rank


@dataclass
class Traced:
    """A layer's calls in the reference: the result of every stage, and its gradient."""

    case: LayerCase
    calls: list[Problem]
    results: dict[str, Ranks] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with torch.enable_grad():
            output = self._forward()
        if not self.case.grads:
            return
        all_results = [x for xs in self.results.values() for x in xs]
        cotangents = [call.cotangents["output"] for call in self.calls]
        gradients = torch.autograd.grad(list(output), all_results, cotangents, allow_unused=True)
        flat = iter(torch.zeros_like(x) if g is None else g for x, g in zip(all_results, gradients, strict=True))
        self.gradients = {name: [next(flat).contiguous() for _ in xs] for name, xs in self.results.items()}

    @property
    def config(self) -> LayerConfig:
        config: LayerConfig = self.calls[0].required["config"]
        return config

    def given(self, name: str) -> list[Any]:
        """A parameter of each rank, or None."""
        return [call.required.get(name) for call in self.calls]

    def kept(self, name: str, xs: Ranks) -> Ranks:
        self.results[name] = xs
        return xs

    def at(self, name: str) -> list[Tensor]:
        """A stage's results, as inputs of the next one."""
        return [x.detach().clone() for x in self.results[name]]

    def _forward(self) -> Ranks:
        logits, states, options = routing_of(self.case, self.config, self.calls)
        self.kept("logits", [x.requires_grad_() for x in logits])
        self.routed = route_together(logits, self.config, states, **options)
        self.kept("probs", [out.probs for out in self.routed])
        self.copies = for_shards(self.routed, self.config)  # the indices as the dispatcher takes them
        if self.copies is not self.routed:
            self.kept("flat_probs", [out.probs for out in self.copies])
        x = [call.required["x"].clone().requires_grad_() for call in self.calls]
        tokens = self.kept("tokens", _projected(x, self.given("latent_down")))
        combined = self.kept("combined", self._one_rank(tokens) if not self.case.counts else self._ranks(tokens))
        return self.kept("output", _projected(combined, self.given("latent_up")))

    def _one_rank(self, tokens: Ranks) -> Ranks:
        """What DeepEP does on a rank with the tokens that the rank has received."""
        self.local_maps = [self.routed[0].routing_map]
        self.kept("local_probs", [self.routed[0].probs])
        self.kept("sent", tokens)
        return self.kept("sums", self._permuted(tokens))

    def _permuted(self, tokens: Ranks) -> Ranks:
        """Through permute, experts and unpermute on each rank."""
        maps, sizes = zip(tokens, self.local_maps, self.results["local_probs"], strict=True), self.config.dispatch
        self.parts: list[Any] = [moe_ref.permute(x, chosen, probs=probs, **sizes) for x, chosen, probs in maps]
        rows = self._experts()
        return [moe_ref.unpermute(x, permuted.row_map) for x, permuted in zip(rows, self.parts, strict=True)]

    def _experts(self) -> Ranks:
        self.kept("rows", [permuted.rows for permuted in self.parts])
        self.kept("row_probs", [permuted.probs for permuted in self.parts])
        pairs = [pairs_from(call.required) for call in self.calls]
        biases_and_states = [biases | pair for biases, pair in zip(self._biases(), pairs, strict=True)]
        arguments_of_ranks = zip(
            self.parts, self.given("fc1_weight"), self.given("fc2_weight"), biases_and_states, strict=True
        )
        return self.kept(
            "expert_rows",
            [
                moe_ref.grouped_mlp(
                    permuted.rows, permuted.tokens_per_expert, *weights, probs=permuted.probs, **settings
                )
                for permuted, *weights, biases in arguments_of_ranks
                for settings in [biases | self.config.experts]
            ],
        )

    def _biases(self) -> list[dict[str, Any]]:
        pairs = zip(self.given("fc1_bias"), self.given("fc2_bias"), strict=True)
        return [
            {name: x for name, x in zip(("fc1_bias", "fc2_bias"), pair, strict=True) if x is not None} for pair in pairs
        ]

    def _ranks(self, tokens: Ranks) -> Ranks:
        maps, probs = [out.routing_map for out in self.copies], [out.probs for out in self.copies]
        if self.case.dispatcher != "deepep":
            there, combine_ranks = (
                getattr(moe_ref, f"{self.case.dispatcher}_{step}") for step in ("dispatch", "combine")
            )
            self.parts = there(tokens, maps, probs=probs, **self.config.dispatch)
            combined = combine_ranks(
                self._experts(), [dispatched_rows.handle for dispatched_rows in self.parts], **self.config.combine
            )
            return [getattr(result, "tokens", result) for result in combined]
        experts = probs[0].shape[1]
        pairs = zip(maps, probs, strict=True)
        self.slots = [moe_ref.multihot_to_indices(chosen, p, topk=experts) for chosen, p in pairs]
        self.kept("slot_probs", [slot.probs for slot in self.slots])
        indices = [slot.indices for slot in self.slots]
        received = moe_ref.deepep_dispatch(tokens, indices, num_experts=experts, probs=self.results["slot_probs"])
        self.kept("sent", [rank_result.rows for rank_result in received])
        self.kept("sent_probs", [rank_result.probs for rank_result in received])
        held = experts // len(tokens)
        local_results = [
            moe_ref.indices_to_multihot(rank_result.indices, rank_result.probs, num_experts=held)
            for rank_result in received
        ]
        self.local_maps = [rank_result.routing_map for rank_result in local_results]
        self.kept("local_probs", [rank_result.probs for rank_result in local_results])
        sums = self.kept("sums", self._permuted(self.results["sent"]))
        return [
            result.tokens for result in moe_ref.deepep_combine(sums, [rank_result.handle for rank_result in received])
        ]


def _projected(xs: Ranks, weights: Sequence[Tensor | None]) -> Ranks:
    pairs = zip(xs, weights, strict=True)
    return [x if weight is None else moe_ref.latent_projection(x, weight) for x, weight in pairs]
