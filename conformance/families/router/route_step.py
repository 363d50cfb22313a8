"""One forward of route on one rank: its expectations and error bounds."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.running import Running
from conformance.core.contract import Problem
from conformance.families.router.balancing import aux_gradient, aux_scores, z_terms
from conformance.families.router.cases_route import RouteCase, mask_of_step
from conformance.families.router.plans import activation_of, plan_of, slope_by_plan
from conformance.families.router.selection import gradient, keys_of, weights
from conformance.judge import Expectation
from conformance.judge.bound import ROUNDOFF
from conformance.judge.choice import Chosen
from conformance.judge.exact import Exact
from moe_ref.config import RouterConfig, RouterState
from moe_ref.config.router import expert_capacity
from moe_ref.router.selection import topk_routing


@dataclass(frozen=True)
class Played:
    """The reference's results of one rank's steps."""

    outputs: dict[str, Any]
    gradients: dict[str, Tensor]
    before: dict[int, RouterState]  # the state before each step


class Step:
    """One forward's expectations and error bounds."""

    sequence: list["Step"]  # this step on the ranks of the sequence
    every: list["Step"]  # this step on all ranks

    def __init__(
        self,
        case: RouteCase,
        config: RouterConfig,
        problem: Problem,
        index: int,
        step: str,
        state: RouterState,
        out: dict[str, Any],
        replayed: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.case, self.config, self.index, self.step, self.state, self.out, self.dtype = (
            case,
            config,
            index,
            step,
            state,
            out,
            dtype,
        )
        self.logits = problem.required[f"logits.{index}"]
        self.of_losses = torch.promote_types(torch.float32, self.logits.dtype)
        self.cotangent = problem.cotangents.get(f"{index}.probs")
        self.x = Running.of(self.logits, dtype)
        mask = problem.settings.get("padding_mask")
        self.masked = mask is not None
        self.valid = torch.ones(len(self.logits), dtype=torch.bool) if mask is None else ~mask_of_step(mask, index)
        self.learns = not step.startswith("eval") and step != "nograd"
        settings = {name: value for name, value in config.selection.items() if value is not None}
        if config.expert_bias:
            settings["expert_bias"] = state.expert_bias
        self.settings = settings
        self.kept = out[f"{index}.routing_map"]
        if config.sinkhorn:
            self.chosen, self.p = self.kept, self.activation.masked(self.kept)
        else:
            chooses = replayed is None
            self.chosen = topk_routing(self.logits.double(), **settings).routing_map if chooses else replayed
            self.p = weights(self.logits, self.chosen, settings, dtype)[1]
        self.ambiguous = (replayed is None and self._close_keys()) or self._close_drops()

    @cached_property
    def activation(self) -> Running:
        """The weights before experts are chosen by a plan."""
        return activation_of(self.logits, self.config.topk, self.dtype)

    def _close_keys(self) -> bool:
        """Whether rounding could change the choice."""
        if self.config.sinkhorn:
            keys = plan_of(self.logits, self.dtype) if self.learns else self.activation
            unknown = bool(keys.value.isnan().any())
            return unknown or _close(keys.value, self.config.topk, 2 * _largest(keys.error))
        keys = keys_of(self.logits, self.settings, self.dtype)
        slack = 4 * _largest(keys.error)
        value, topk = keys.value, self.config.topk
        groups, group_topk = self.config.num_groups, self.config.group_topk
        if groups and group_topk:
            by_group = value.unflatten(1, (groups, -1))
            score = by_group.sort(dim=2, descending=True).values[..., : topk // group_topk].sum(2)
            if _close(score, group_topk, topk * slack):
                return True
            best = torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(group_topk).indices, True)
            value = torch.where(best[..., None].expand_as(by_group).reshape(value.shape), value, -torch.inf)
        return _close(value, topk, slack)

    def _close_drops(self) -> bool:
        if self.config.capacity_factor is None or self.config.drop_policy != "probs":
            return False
        limits: dict[str, Any] = {
            "num_experts": self.case.experts,
            "topk": self.case.topk,
            "capacity_factor": self.config.capacity_factor,
        }
        capacity = expert_capacity(len(self.logits), **limits)
        slack = (
            4 * (float(self.p.error.max()) + float(self.p.value.max()) * float(torch.finfo(self.logits.dtype).eps))
            if self.p.value.numel()
            else 0.0
        )
        return _close(torch.where(self.chosen, self.p.value, -torch.inf).T, capacity, slack)

    def expectations(self, gradient_value: Tensor | None) -> dict[str, Expectation]:
        i = self.index
        expectations: dict[str, Expectation] = {f"{i}.routing_map": Exact(self.kept, "integers")}
        if self.config.pad_to_capacity:
            expectations[f"{i}.routing_map"] = self._filled()
        expectations[f"{i}.losses"] = Exact(self.out[f"{i}.losses"], "integers")  # which losses are given
        expectations[f"{i}.probs"] = self.p.masked(self.stays).bounded(
            self.logits.dtype, self.out[f"{i}.probs"].detach()
        )
        for name, (loss, _) in self.losses.items():
            expectations[f"{i}.{name}"] = Running(loss.value.reshape(()), loss.error.reshape(()), self.dtype).bounded(
                self.of_losses, self.out[f"{i}.{name}"]
            )
        if gradient_value is not None:
            slope, partial = self.slope(self.cotangent)
            bound = slope.bounded(self.logits.dtype, gradient_value)
            expectations[f"d_logits.{i}"] = replace(bound, bound=bound.bound + partial)
        return expectations

    def _filled(self) -> Chosen:
        """The tokens that stay, filled up to the capacity by any other tokens."""
        stays_ET = self.stays.double().T
        counts_E = self.kept.sum(0)  # the same for every expert
        return Chosen(self.kept, stays_ET, torch.zeros_like(stays_ET), counts_E, (stays_ET,), dim=0)

    @property
    def stays(self) -> Tensor:
        """[T,E] the chosen experts that the capacity keeps."""
        return self.kept & self.chosen

    def slope(self, cotangent: Tensor | Running | None) -> tuple[Running, Tensor]:
        """The gradient of the logits for a cotangent of the probs and of the losses, before it is
        rounded; and the roundings of autograd's partial gradients and of their sums in the logits'
        dtype.
        """
        slope = Running(torch.zeros_like(self.x.value), torch.zeros_like(self.x.value), self.dtype)
        if cotangent is not None:
            kept = Running.of(cotangent, self.dtype).masked(self.stays)
            if self.config.sinkhorn:
                slope = slope_by_plan(self.activation, kept, self.config.topk)
            else:
                slope = gradient(self.logits, self.chosen, kept, self.settings, self.dtype)
        rounded = torch.zeros_like(slope.value)
        for _, by_logits in self.losses.values():
            slope = slope + by_logits
            rounded = rounded + by_logits.value.abs() + slope.value.abs()
        return slope, 2 * ROUNDOFF[self.logits.dtype] * rounded

    @cached_property
    def losses(self) -> dict[str, tuple[Running, Running]]:
        """Each loss and its contribution to the gradient of the logits. There are none if nothing
        is learnt.
        """
        if not self.learns:
            return {}
        config, case = self.config, self.case
        valid = float(self.valid.sum())
        scale, of_all = case.scale / 8, _valid(self.sequence) if config.loss_per_token else 1.0
        losses: dict[str, tuple[Running, Running]] = {}
        if config.z_loss_coeff:
            loss, slope = z_terms(self.x, self.valid, config.z_loss_coeff / case.ranks)
            if config.loss_divisor > 1:
                loss, slope = loss / float(config.loss_divisor), slope / float(config.loss_divisor)
            losses["z_loss"] = loss, slope * (scale * (valid * case.ranks if config.loss_per_token else 1.0))
        if not config.balancing_coeffs:
            return losses
        function = config.score_function
        _, scores = aux_scores(self.x, function)
        for name, coeff in config.balancing_coeffs.items():
            weight = self._column_weights(name) * (coeff * case.experts / case.topk / config.loss_divisor)
            factors = 4 if config.loss_divisor == 1 else 5
            exact = Running(weight, weight.abs() * factors * ROUNDOFF[self.of_losses], self.dtype)
            shared = (scores * exact).masked(self.valid[:, None])
            loss = shared.sum(1).sum(0)
            losses[name] = loss, aux_gradient(self.x, exact * (scale * of_all), function).masked(self.valid[:, None])
        return losses

    def _column_weights(self, name: str) -> Tensor:
        """[T,E] each column's count / tokens²; see `moe_ref.router.losses`."""
        shape, sequences = self.aux_map.shape, self.case.sequences
        if name == "seq_aux_loss":
            count = _sum([rank.aux_map.reshape(-1, sequences, shape[1]).sum(0) for rank in self.sequence]).repeat(
                shape[0] // sequences, 1
            )
            length = self._tokens(self.sequence) / sequences
            return count / length**2 / sequences if length else count * 0
        ranks = self.every if name == "global_aux_loss" else self.sequence
        count = _sum([rank.aux_map.sum(0) for rank in ranks])
        if name == "global_aux_loss":
            count = (self.state.global_tokens_per_expert.double() + count) / float(self.state.global_steps + 1)
        length = self._tokens(ranks)
        return (count / length**2 if length else count * 0).expand(shape)

    @cached_property
    def aux_map(self) -> Tensor:
        """[T,E] the map counted by the balancing losses, float64."""
        settings: dict[str, Any] = {
            "topk": self.case.topk,
            "score_function": self.config.score_function,
            "padding_mask": ~self.valid,
        }
        return moe_ref.aux_loss_scores(self.logits.double(), **settings).routing_map.double()

    def _tokens(self, ranks: list["Step"]) -> float:
        """The tokens of a loss over these ranks: the valid ones.

        Without a mask, this rank's tokens × ranks.
        """
        return _valid(ranks) if self.masked else float(len(self.logits) * len(ranks))


def _valid(ranks: list[Step]) -> float:
    return float(sum(int(rank.valid.sum()) for rank in ranks))


def _sum(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)


def _largest(error: Tensor) -> float:
    """The largest error; 0 if there are none."""
    return float(error.max()) if error.numel() else 0.0


def _close(values: Tensor, count: int, slack: float) -> bool:
    """Whether in some row the count-th and next largest values differ by at most `slack`."""
    if not 0 < count < values.shape[1]:
        return False
    order = values.sort(dim=1, descending=True).values
    gap = order[:, count - 1] - order[:, count]
    return bool((gap[gap.isfinite()] <= slack).any())
