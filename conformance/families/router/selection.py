"""topk_indices, topk_routing: choice by the rule of margins; weights, gradient of that choice."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.running import Running
from conformance.core.contract import Contract, Problem, accumulator_of, leaf
from conformance.core.signature import Input, Output, Signature
from conformance.families.router.cases import LOGITS, LogitsCase, bias_of, indices_of, logits_of
from conformance.judge import Expectation, Given
from conformance.judge.bound import ROUNDOFF, Bounded
from conformance.judge.choice import Chosen
from moe_ref.router.scores import EPSILON
from moe_ref.router.selection import topk_indices

Settings = dict[str, Any]
LINEAR = 20.0  # torch.nn.functional.softplus(x) is x above this: wrong by exp(-x), which float64 shows
UNDERFLOW = -87.0  # below this, exp(x) is subnormal in float32 and √ln(1+exp x) may be 0, which has no slope


def score(x: Running, function: str) -> Running:
    """The score of each logit, over the last dimension."""
    if function == "sigmoid":
        s = x.constant(1.0) / ((x * -1.0).exp() + 1.0)
        # in float64 exp(-x) overflows before another formula, exp(x) / (1 + exp(x)), underflows
        return Running(s.value, s.error + torch.where(s.value == 0, 2 * x.value.exp(), 0.0), x.dtype)
    if function == "sqrtsoftplus":
        return softplus(x).sqrt()
    power = (
        (x - Running(x.value.amax(-1, keepdim=True), x.error.amax(-1, keepdim=True), x.dtype)).exp()
        if x.value.shape[-1]
        else x
    )
    return power / power.sum(-1)


def softplus(x: Running) -> Running:
    """ln(1 + exp x) = max(x, 0) + ln(1 + exp(-|x|)), or x above LINEAR, as in torch's own."""
    positive = Running(x.value.clamp(min=0), torch.where(x.value > 0, x.error, 0.0), x.dtype)
    softplus_of_x = positive + Running(-x.value.abs(), x.error, x.dtype).exp().log1p()
    return replace(softplus_of_x, error=softplus_of_x.error + _left_out(x))


def _left_out(x: Running) -> Tensor:
    """What the value and the slope of torch's softplus leave out above LINEAR: exp(-x)."""
    return torch.where(x.value > LINEAR, (-x.value).exp(), 0.0)


def keys_of(logits: Tensor, settings: Settings, dtype: torch.dtype) -> Running:
    """The sort keys of the choice, with error bounds."""
    x = Running.of(logits, dtype)
    function = settings.get("score_function", "softmax")
    if function != "softmax" or settings.get("pre_softmax"):
        keys = score(x, function)
    else:
        keys = x if settings.get("num_groups") else ordered_by_scores(x)
    if settings.get("expert_bias") is not None:
        keys = keys + Running.of(settings["expert_bias"], dtype)
    return keys


def ordered_by_scores(keys: Running) -> Running:
    """Logits as keys of the choice, where it may also be made by their softmax.

    Experts keep their order, as softmax does not change it, up to three roundings: of x - max x, of
    an exponential of one ulp, which is 2u, and of a division. Scores that are flushed to 0 are
    equal: Qwen3 and Mixtral take any of these experts, with weight 0.
    """
    x = keys.value
    top = x.amax(-1, keepdim=True) if x.shape[-1] else x
    below = torch.where(top.isfinite(), x - top, 0.0)
    shift = torch.where(below.isfinite(), (below.to(keys.dtype).double() - below).abs(), 0.0)
    error = keys.error + keys.error.amax(-1, keepdim=True) + shift if x.shape[-1] else keys.error
    least = math.log(torch.finfo(keys.dtype).tiny) + math.log(max(x.shape[-1], 1))
    flushed = below < least
    value = torch.where(flushed, top + least, x)
    return Running(value, torch.where(flushed, 0.0, error + 3 * ROUNDOFF[keys.dtype]), keys.dtype)


def weights(logits: Tensor, chosen: Tensor, settings: Settings, dtype: torch.dtype) -> tuple[Running, Running]:
    """[T,E] weights of the chosen experts, before and after the scaling factor."""
    x = Running.of(logits, dtype)
    function, count = settings.get("score_function", "softmax"), settings["topk"]
    if function == "softmax" and not settings.get("pre_softmax"):
        p = _softmax_of(x, chosen)
        s, total, stable = _renormalised(x, chosen, count)
        p = _either(p, (s / total).masked(chosen & stable))
    else:
        p = score(x, function).masked(chosen)
        if function != "softmax" and count > 1:
            p = p / (p.sum(1, count) + EPSILON)
    factor = settings.get("scaling_factor")
    return p, p if factor is None else p * factor


def gradient(
    logits: Tensor, chosen: Tensor, cotangent: Tensor | Running, settings: Settings, dtype: torch.dtype
) -> Running:
    """[T,E] dlogits in closed form.

    softmax over S or all E:  p (g - Σ g p)
    softmax s over all, renormalised over S (as Qwen3 and Mixtral): with t = Σ_S s and
                              d = (g - Σ_S g s/t) / t in S and else 0,   s (d - Σ s d)
    normalised s:             s'(x) (g - Σ_S g p) / (Σ_S s + 1e-20)
    s alone (K = 1):          s'(x) g

    The third is equal to the first, and Σ s d is 0. Autograd sums it up in float32: its rounding
    reaches every expert, s times a few u Σ|g| also outside S.
    """
    x, g = Running.of(logits, dtype), Running.of(cotangent, dtype).masked(chosen)
    if settings.get("scaling_factor") is not None:
        g = g * settings["scaling_factor"]
    function, count = settings.get("score_function", "softmax"), settings["topk"]
    p, _ = weights(logits, chosen, settings, dtype)
    if function == "softmax" and settings.get("pre_softmax"):
        return score(x, "softmax") * (g - (g * p).sum(1, count))
    if function == "softmax":
        p = _softmax_of(x, chosen)
        s, total, stable = _renormalised(x, chosen, count)
        d = (g / total - (g * (s / total) / total).masked(chosen).sum(1, count)).masked(chosen)
        return _either(p * (g - (g * p).sum(1, count)), (s * (d - (s * d).sum(1, count))).masked(stable))
    s = score(x, function)
    if count > 1:
        g = (g - (g * p).sum(1, count)) / (s.masked(chosen).sum(1, count) + EPSILON)
    return (g * slope_of(x, s, function)).masked(chosen)


def _softmax_of(x: Running, chosen: Tensor) -> Running:
    """softmax over the chosen experts, 0 for the others."""
    value, error = torch.where(chosen, x.value, -torch.inf), torch.where(chosen, x.error, 0.0)
    return score(Running(value, error, x.dtype), "softmax").masked(chosen)


def _renormalised(x: Running, chosen: Tensor, count: int) -> tuple[Running, Running, Tensor]:
    """softmax over all experts, its sum over the chosen, and the rows in which this has digits.

    Experts that were not chosen by their logits may all have a softmax of 0.
    """
    s = score(x, "softmax")
    total = s.masked(chosen).sum(1, count)
    stable = total.value > torch.finfo(x.dtype).tiny / ROUNDOFF[x.dtype]
    return s, Running(torch.where(stable, total.value, 1.0), total.error.masked_fill(~stable, 0.0), x.dtype), stable


def _either(x: Running, y: Running) -> Running:
    """x, with a bound that covers the results of two formulas."""
    apart = (x.value - y.value).abs() + y.error
    return Running(x.value, torch.where(y.error > 0, torch.maximum(x.error, apart), x.error), x.dtype)


def slope_of(x: Running, s: Running, function: str) -> Running:
    """The slope of the score s(x), of sigmoid or sqrtsoftplus."""
    if function == "sigmoid":
        return s * (s.constant(1.0) - s)
    sigmoid = score(x, "sigmoid")
    return replace(sigmoid, error=sigmoid.error + _left_out(x)) / (s * 2.0)


def unspecified_rows(logits: Tensor, settings: Settings) -> Tensor:
    """Rows [T] with NaN or +∞, for which any K distinct experts are right."""
    return logits.isnan().any(1) | (logits == torch.inf).any(1)


def unspecified_weights(logits: Tensor, chosen: Tensor, settings: Settings) -> Tensor:
    """[T] rows with unspecified weights: also softmax of only -∞."""
    rows = unspecified_rows(logits, settings)
    if settings.get("score_function", "softmax") == "softmax":
        considered = torch.ones_like(chosen) if settings.get("pre_softmax") else chosen
        rows = rows | ~((logits > -torch.inf) & considered).any(1)
    return rows


def unspecified_gradient(logits: Tensor, chosen: Tensor, settings: Settings) -> Tensor:
    """[T] rows with an unspecified gradient."""
    rows = unspecified_weights(logits, chosen, settings)
    return rows | (logits < UNDERFLOW).any(1) if settings.get("score_function") == "sqrtsoftplus" else rows


def _signature(probs: str, chosen: Output) -> Signature:
    return Signature(
        inputs=[
            Input("logits", "TE", LOGITS, gradient=True),
            Input("expert_bias", "E", field="bias_dtype", optional="bias"),
            Input("precomputed_indices", "TK", field="index_dtype", optional="precomputed"),
        ],
        outputs=[Output("probs", probs, of="logits"), chosen],
        settings=("pre_softmax", "num_groups", "group_topk", "scaling_factor"),
        required=("topk", "score_function"),
    )


class _TopK(Contract[LogitsCase]):
    """Common part of the two forms."""

    case_type = LogitsCase

    def settings(self, case: LogitsCase) -> Settings:
        settings: Settings = {"topk": case.topk}
        if case.score != "softmax":
            settings |= {"pre_softmax": True} if case.score == "softmax_pre" else {"score_function": case.score}
        if case.groups:
            settings |= {"num_groups": case.groups, "group_topk": case.group_topk}
        if case.scaling:
            settings["scaling_factor"] = case.factor
        if case.bias:
            settings["expert_bias"] = bias_of(case)
        if case.precomputed:
            settings["precomputed_indices"] = indices_of(case)
        return settings

    def legal(self, case: LogitsCase) -> Problem:
        return self.call(case, {"logits": logits_of(case)}, self.settings(case), lengths={"K": case.topk})

    def choice(self, problem: Problem, dtype: torch.dtype, lowest: bool) -> Chosen:
        logits, settings = problem.required["logits"], problem.settings
        unspecified = unspecified_rows(logits, settings)
        index = topk_indices(logits, **settings).indices
        value = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, index, True)
        if settings.get("precomputed_indices") is not None:
            keys = Running(value.double(), torch.zeros(value.shape, dtype=torch.float64), dtype)
        else:
            keys = keys_of(torch.where(unspecified[:, None], 0, logits), settings, dtype)
        unspecified = unspecified | keys.value.isnan().any(1)  # softmax of only -∞
        groups = settings.get("num_groups") or 0 if settings.get("precomputed_indices") is None else 0
        inputs = (
            logits.double(),
            *(
                [settings["expert_bias"].double().expand(logits.shape)]
                if settings.get("expert_bias") is not None
                else []
            ),
        )
        counts = torch.full((len(logits),), settings["topk"])
        indices = self.function == "topk_indices"
        return Chosen(
            index if indices else value,
            keys.value,
            keys.beside_the_oracle.error,
            counts,
            inputs,
            lowest,
            None if settings.get("precomputed_indices") is not None else unspecified,
            groups,
            settings.get("group_topk") or 0,
            dtype,
            indices=indices,
        )

    def expected(self, case: LogitsCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        logits = problem.required["logits"]
        dtype = accumulator_of(declared, logits.dtype)
        choice = self.choice(problem, dtype, declared.get("tie_rule") == "lowest_index")
        expectations: dict[str, Expectation] = {self.primary: choice}
        expectations["probs"] = self._by_choice(choice.value, lambda chosen: self._weights(problem, chosen, dtype))
        if problem.wanted:
            expectations["d_logits"] = self._by_choice(
                choice.value, lambda chosen: self._gradient(problem, chosen, dtype)
            )
        return expectations

    def _by_choice(self, choice: Tensor, judge_by: Callable[[Tensor], Bounded]) -> Given:
        """The expectation given the candidate's choice, recomputed if it is not the reference's."""
        reference = judge_by(choice)

        def resolve(out: Mapping[str, Any]) -> Bounded:
            observed = out[self.primary].clone()  # of inference mode: an oracle may not keep it for its gradient
            return reference if torch.equal(observed.long(), choice.long()) else judge_by(observed)

        return Given(reference.value, resolve)

    def _oracle(self, problem: Problem, index: Tensor) -> tuple[Tensor, Tensor]:
        """float64 weights [T,K] of these experts, and the logits as their autograd leaf."""
        x = leaf(problem.required["logits"])
        bias = problem.settings.get("expert_bias")
        settings = (
            problem.settings | {"precomputed_indices": index} | ({} if bias is None else {"expert_bias": bias.double()})
        )
        return topk_indices(x, **settings).probs, x

    @abstractmethod
    def _weights(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        """The expected weights of the observed choice."""

    @abstractmethod
    def _gradient(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        """The expected dlogits given the observed choice."""

    def _bounded_gradient(
        self, problem: Problem, chosen: Tensor, cotangent_TE: Tensor, value: Tensor, dtype: torch.dtype
    ) -> Bounded:
        logits = problem.required["logits"]
        unspecified = unspecified_gradient(logits, chosen, problem.settings)[:, None].expand(logits.shape)
        analysis = gradient(logits, chosen, cotangent_TE, problem.settings, dtype)
        return analysis.beside_the_oracle.bounded(logits.dtype, value, unspecified)


class TopkIndices(_TopK):
    """`topk_indices`: slots in any order; weights and the gradient by the candidate's slots."""

    function = "topk_indices"
    signature = _signature("TK", Output("indices", "TK"))
    primary = "indices"

    def _weights(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        logits, index = problem.required["logits"], observed.long()
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, index, True)
        value, _ = self._oracle(problem, index)
        _, scaled = weights(logits, chosen, problem.settings, dtype)
        unspecified = unspecified_weights(logits, chosen, problem.settings)[:, None].expand(index.shape)
        chosen_weights = Running(scaled.value.gather(1, index), scaled.error.gather(1, index), dtype)
        return chosen_weights.beside_the_oracle.bounded(logits.dtype, value.detach(), unspecified)

    def _gradient(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        logits, index, cotangent = problem.required["logits"], observed.long(), problem.cotangents["probs"]
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, index, True)
        spread = torch.zeros(logits.shape, dtype=cotangent.dtype).scatter(1, index, cotangent)
        weight, x = self._oracle(problem, index)
        (value,) = torch.autograd.grad(weight, x, cotangent.double())
        return self._bounded_gradient(problem, chosen, spread, value, dtype)


class TopkRouting(_TopK):
    """`topk_routing`: the dense form."""

    function = "topk_routing"
    signature = _signature("TE", Output("routing_map", "TE"))
    primary = "routing_map"

    @staticmethod
    def _listed(problem: Problem, observed: Tensor) -> tuple[Tensor, Tensor]:
        """The map, and its experts as [T,K] indices."""
        chosen = observed != 0
        return chosen, chosen.nonzero()[:, 1].reshape(len(chosen), problem.settings["topk"])

    def _weights(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        logits = problem.required["logits"]
        chosen, index = self._listed(problem, observed)
        value, _ = self._oracle(problem, index)
        _, scaled = weights(logits, chosen, problem.settings, dtype)
        odd = unspecified_weights(logits, chosen, problem.settings)[:, None]
        bounded = scaled.beside_the_oracle.bounded(
            logits.dtype, torch.zeros(logits.shape, dtype=torch.float64).scatter(1, index, value.detach()), odd & chosen
        )
        return replace(bounded, spoilt=odd & ~chosen)  # a softmax over all experts, the others masked, spreads a NaN

    def _gradient(self, problem: Problem, observed: Tensor, dtype: torch.dtype) -> Bounded:
        chosen, index = self._listed(problem, observed)
        cotangent = problem.cotangents["probs"]
        weight, x = self._oracle(problem, index)
        (value,) = torch.autograd.grad(weight, x, cotangent.double().gather(1, index))
        return self._bounded_gradient(problem, chosen, cotangent, value, dtype)
