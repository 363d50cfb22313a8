"""The layer of all ranks in running numbers, given its routing map.

Each stage's bound is its own contract's, and takes the errors of the stage before:

    tokens = x, or round(x Wᵀ)        p = round(weights)          rows: copies of the tokens
    y by `mlp_stages`                 combined: sums of a token's rows, by the dispatcher's tree
    output = round(up + shared)       up = combined, or round(combined Wᵀ)

    d_up = d_output     d_y = d_up, or round(d_up W), of each row      d_rows, d_p by `mlp_stages`
    d_tokens: sums of d_rows by the tree     d_logits by `route_step` from d_p, and the losses
    d_x = round(d_logits W) + d_tokens, or round(d_tokens W) + d_shared, added in any order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import Backward, Call, Forward, backward, forward
from conformance.analysis.products import expert_slices
from conformance.analysis.running import Running, contracted
from conformance.core.contract import Problem, computed_in
from conformance.families.experts.judged_mlp import Padding
from conformance.families.experts.precision_mlp import layers_of
from conformance.families.router.route_step import Step
from conformance.judge import Bounded
from conformance.judge.bound import ROUNDOFF, Accumulator
from moe_ref.config import LayerConfig


@dataclass(frozen=True)
class Layer:
    """All ranks' calls and routing."""

    calls: Sequence[Problem]
    steps: Sequence[Step]
    config: LayerConfig
    declared: Mapping[str, Any]

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Rank 0's; other ranks have other experts."""
        return self.calls[0].required

    @property
    def storage(self) -> torch.dtype:
        return self.parameters["x"].dtype

    @property
    def logit_dtype(self) -> torch.dtype:
        return self.steps[0].logits.dtype

    @property
    def sums(self) -> torch.dtype:
        return computed_in(self.declared, self.parameters["x"])

    @cached_property
    def parts(self) -> list[slice]:
        """Each rank's tokens."""
        ends = torch.tensor([len(call.required["x"]) for call in self.calls]).cumsum(0).tolist()
        return [slice(end - len(call.required["x"]), end) for call, end in zip(self.calls, ends, strict=True)]

    def all_ranks(self, name: str) -> Tensor:
        """The tensor of all ranks: their tokens, or their experts."""
        return torch.cat([call.required[name] for call in self.calls])

    def stored(self, x: Running, dtype: torch.dtype | None = None) -> Running:
        """x as it is stored between two stages."""
        stored_dtype = dtype or self.storage
        return replace(x.with_rounding(stored_dtype), dtype=stored_dtype)

    def product(self, x: Running, y: Running | Tensor) -> Running:
        """x yᵀ, not rounded."""
        left_factor, right_factor = Running.of(x, self.sums), Running.of(y, self.sums)
        return contracted(left_factor, right_factor, Accumulator(unit=ROUNDOFF[self.sums]))

    def call(
        self, rows: Running | Tensor, counts_L: Tensor, weights: tuple[Tensor, Tensor], **call_fields: Any
    ) -> Call:
        """A call of expert MLPs."""
        settings = {name: x for name, x in call_fields.pop("settings").items() if x}
        probs, bias1, bias2 = (call_fields.pop(name, None) for name in ("probs", "fc1_bias", "fc2_bias"))
        return Call(rows, counts_L, *weights, probs, bias1, bias2, settings, *(self.sums,) * 3, **call_fields)

    # ---- routed tokens

    @cached_property
    def routing(self) -> Tensor:
        """[G,V] the copies of all ranks' tokens, without those of probability 0 that fill a
        capacity: they have no effect. Of a budget each rank's first rows, by expert, and as in
        `order`.
        """
        stays_GE = torch.cat([step.stays for step in self.steps])[:, self.expert_of]
        room = self.config.num_rows
        if room is None:
            return stays_GE
        by_rank = stays_GE[self.order].T.reshape(len(self.calls), -1)  # experts, and their tokens
        within = (by_rank.cumsum(1) <= room).reshape(stays_GE.T.shape).T
        return stays_GE & within[self.order.argsort()]

    @property
    def shards(self) -> int:
        return self.config.expert_tensor_parallel

    @cached_property
    def expert_of(self) -> Tensor:
        """[V] the experts of all ranks, in the order of the ranks; shards of one are several."""
        experts = self.steps[0].stays.shape[1]
        numbers = torch.arange(experts).reshape(len(self.calls) // self.shards, 1, -1)
        return numbers.repeat(1, self.shards, 1).flatten()

    @cached_property
    def order(self) -> Tensor:
        """The order [G] in which an expert's rows have the tokens of all ranks: by rank.

        With alltoall the ranks of the first shards come first.
        """
        ranks = torch.arange(len(self.calls)).reshape(-1, self.shards)
        turned = ranks.T if self.config.dispatcher == "alltoall" else ranks
        all_tokens = torch.arange(self.parts[-1].stop)
        return torch.cat([all_tokens[self.parts[rank]] for rank in turned.flatten().tolist()])

    @cached_property
    def owner(self) -> tuple[Tensor, Tensor]:
        """For each row [P] its token and its expert among V.

        Rows are ordered by expert, then as in `order`.
        """
        expert_P, place_P = self.routing[self.order].T.nonzero(as_tuple=True)
        return self.order[place_P], expert_P

    @cached_property
    def padding(self) -> Padding:
        recipe, align = self.config.recipe, self.config.align
        return Padding.of(self.routing.sum(0), align or 1 if recipe else 1)

    @cached_property
    def tokens(self) -> Running:
        """[G,N]"""
        x = Running.of(self.all_ranks("x"), self.storage)
        down = self.parameters.get("latent_down")
        return x if down is None else self.stored(self.product(x, down))

    @cached_property
    def experts(self) -> Forward:
        """All experts, over the padded rows."""
        token_P, expert_P = self.owner
        p = Running.joined([step.p.before_final_rounding(self.logit_dtype) for step in self.steps])
        probs = self.stored(p, self.logit_dtype)[token_P, self.expert_of[expert_P]]
        counts_L = self.padding.counts_L
        biases = {name: self.all_ranks(name) for name in ("fc1_bias", "fc2_bias") if name in self.parameters}
        call = self.call(
            padded(self.padding, self.tokens[token_P]), counts_L,
            (self.all_ranks("fc1_weight"), self.all_ranks("fc2_weight")),
            probs=padded(self.padding, probs), settings=self.config.experts, **biases,
        )  # fmt: skip
        recipe = self.config.recipe
        if recipe is None:
            return forward(call)
        states = {name: self.all_ranks(name) for name in self.parameters if name.startswith("state.")}
        problem = Problem("grouped_mlp", states, {"recipe": recipe})
        return forward(replace(call, low=layers_of(problem, self.declared, self.parameters["x"], counts_L)))

    @cached_property
    def combined(self) -> Running:
        """[G,N]"""
        rows = self.stored(self.padding.trim(self.experts.out))
        return self.by_tree(rows, self.logit_dtype)

    @cached_property
    def routed(self) -> Running:
        """[G,H] the routed experts' part of the output."""
        up = self.parameters.get("latent_up")
        return self.combined if up is None else self.stored(self.product(self.combined, up))

    def by_tree(self, rows: Running, between: torch.dtype) -> Running:
        """[G,N] each token's rows added by the dispatcher's tree.

        alltoall   Σ shards, rounded to `between` at each, → round, Σ rows → round
        others     Σ rows of a rank → round,
        allgather  Σ ranks, rounded to `between` at each    others   Σ ranks → round
        """
        token_P, expert_P = self.owner
        world, dispatcher = len(self.calls), self.config.dispatcher
        rank_P = expert_P // (self.routing.shape[1] // world)
        if world == 1 or dispatcher == "alltoall":
            return self.stored(self.sum_by_token(self.of_all_shards(rows, between), token_P[rank_P % self.shards == 0]))
        rank_sums = [
            self.stored(self.sum_by_token(rows[rank_P == rank], token_P[rank_P == rank])) for rank in range(world)
        ]
        all_sums = replace(
            Running.joined(rank_sums, stack=True), dtype=between if dispatcher == "allgather" else self.sums
        )
        return self.stored(all_sums.sum(0)[0])

    def of_all_shards(self, rows: Running, between: torch.dtype) -> Running:
        """The shards of each row added, in the order of the first shards' rows."""
        if self.shards == 1:
            return rows
        shard_P = self.owner[1] // (self.routing.shape[1] // len(self.calls)) % self.shards
        shard_rows = Running.joined([rows[shard_P == shard] for shard in range(self.shards)], stack=True)
        return self.stored(replace(shard_rows, dtype=between).sum(0)[0], rows.dtype)

    def sum_by_token(self, rows: Running, token_P: Tensor) -> Running:
        """[G,N] in an accumulator, in any order."""
        shape = (len(self.routing), rows.value.shape[1])
        value, error, size = (
            torch.zeros(shape, dtype=torch.float64).index_add(0, token_P, x)
            for x in (rows.value, rows.error, rows.value.abs() + rows.error)
        )
        terms = int(torch.bincount(token_P, minlength=1).max()) if len(token_P) else 0
        return Running(value, error + Accumulator(unit=ROUNDOFF[self.sums]).worst(terms) * size, self.sums)

    @cached_property
    def d_routed(self) -> Running:
        """[G,H]"""
        return Running.of(torch.cat([call.cotangents["output"] for call in self.calls]), self.storage)

    @cached_property
    def d_experts(self) -> Backward:
        token_P, _ = self.owner
        up = self.parameters.get("latent_up")
        d_combined = self.d_routed if up is None else self.stored(self.product(self.d_routed, up.mT))
        return backward(self.experts, padded(self.padding, d_combined[token_P]))

    def amaxes(self, after_backward: bool) -> dict[str, Bounded]:
        """The largest magnitudes [E] of what each linear layer quantises.

        These are stored values, so each is as near as the value itself.
        """
        forward_, weights = self.experts, (self.all_ranks("fc1_weight"), self.all_ranks("fc2_weight"))
        magnitudes = {"0.input": forward_.x, "1.input": forward_.a}
        if after_backward:
            magnitudes |= {"0.grad_output": self.d_experts.d_h, "1.grad_output": self.d_experts.d_y}
        amaxes = {f"amaxes.{name}": self.largest(x) for name, x in magnitudes.items()}
        for layer, weight in enumerate(weights):
            value = weight.double().abs().flatten(1).amax(1)
            amaxes[f"amaxes.{layer}.weight"] = Bounded(value, torch.zeros_like(value), torch.float32, torch.float32)
        return amaxes

    def largest(self, x: Running) -> Bounded:
        """[E] of each expert's rows; 0 without any."""
        rows = expert_slices(self.padding.counts_L)
        value, bound = (
            torch.stack(
                [
                    numbers[expert_rows].abs().amax() if numbers[expert_rows].numel() else numbers.new_zeros(())
                    for expert_rows in rows
                ]
            )
            for numbers in (x.value, x.error)
        )
        return Bounded(value, bound, torch.float32, torch.float32)

    @cached_property
    def d_tokens(self) -> Running:
        """[G,N]"""
        return self.by_tree(self.stored(self.padding.trim(self.d_experts.rows)), self.storage)

    @cached_property
    def d_probs(self) -> Running:
        """[G,E] of the rows' probabilities."""
        assert self.d_experts.probs is not None
        rows = self.stored(self.padding.trim(self.d_experts.probs), self.logit_dtype)
        rows, (token_P, expert_P) = self.of_all_shards(rows, self.logit_dtype), self.owner
        first_P = expert_P // (self.routing.shape[1] // len(self.calls)) % self.shards == 0
        at = token_P[first_P], self.expert_of[expert_P[first_P]]
        value, error = (
            torch.zeros(self.steps[0].stays.shape[1], dtype=torch.float64).repeat(len(self.routing), 1) for _ in "ve"
        )
        value[at], error[at] = rows.value[:, 0], rows.error[:, 0]
        return Running(value, error, self.logit_dtype)

    def d_logits(self, rank: int) -> Running:
        """[T,E] of one rank."""
        slope, partial = self.steps[rank].slope(self.d_probs[self.parts[rank]])
        return self.stored(replace(slope, error=slope.error + partial), self.logit_dtype)


def padded(padding: Padding, x: Running) -> Running:
    return Running(padding.pad(x.value), padding.pad(x.error), x.dtype)


def added(terms: Sequence[Running]) -> Running:
    """The sum of stored parts in any order, every partial sum but the last rounded."""
    value = torch.stack([term.value for term in terms]).sum(0)
    error = torch.stack([term.error for term in terms]).sum(0)
    size = torch.stack([term.value.abs() + term.error for term in terms]).sum(0)
    between = max(len(terms) - 2, 0) * ROUNDOFF[terms[0].dtype]
    return Running(value, error + between * (1 + ROUNDOFF[terms[0].dtype]) * size, terms[0].dtype)
