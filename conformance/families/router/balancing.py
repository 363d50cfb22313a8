"""Load balancing: auxiliary losses, Sinkhorn routing and the expert bias."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.running import Running
from conformance.core.contract import C, Contract, Problem, accumulator_of, computed_in, leaf
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import hashed
from conformance.families.router.cases import (
    COUNTED,
    LOGITS,
    LoadCase,
    LogitsCase,
    counts_past,
    logits_of,
    numbers,
    padding_of,
)
from conformance.families.router.plans import activation_of, plan_of, slope_by_plan
from conformance.families.router.selection import UNDERFLOW, score, slope_of, unspecified_rows
from conformance.judge import Expectation, Given
from conformance.judge.bound import ROUNDOFF, Bounded, sum_bound
from conformance.judge.choice import Chosen
from moe_ref.rounding import accumulator_dtype
from moe_ref.router.balancing import aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_ref.router.scores import EPSILON
from moe_ref.router.sinkhorn import sinkhorn_routing


def aux_scores(x: Running, function: str) -> tuple[Running, Running]:
    """The raw scores and the normalised scores of the losses."""
    s = score(x, function)
    return s, s if function == "softmax" else s / (s.sum(1) + EPSILON)


def aux_gradient(x: Running, g: Running, function: str) -> Running:
    """dlogits in closed form: p (g - Σ g p), or s'(x) (g - Σ g p) / (Σ s + 1e-20)."""
    s, scores = aux_scores(x, function)
    inner = g - (g * scores).sum(1)
    if function == "softmax":
        return s * inner
    return inner / (s.sum(1) + EPSILON) * slope_of(x, s, function)


def z_terms(x: Running, valid: Tensor, coeff: float) -> tuple[Running, Running]:
    """The z-loss, [1,1], and its gradient with respect to the logits, [T,E]."""
    top = Running(x.value.amax(1, keepdim=True), x.error.amax(1, keepdim=True), x.dtype)
    lse = (x - top).exp().sum(1).log() + top
    count = float(max(int(valid.sum()), 1))
    loss = (lse * lse).masked(valid[:, None]).sum(0) / count * coeff
    p = (x - lse).exp()  # logsumexp's autograd, because exp(x - max x) / Σ is more accurate
    return loss, (p * lse * 2.0 * coeff / count).masked(valid[:, None])


COUNTS = ("bool", "int32", "int64")  # bool: int64
PADDING = Input("padding_mask", "T", ("bool",), field="", optional="padding")


class _FloatOutputs(Contract[C]):
    """A function with float32 or float64 outputs."""

    def cotangent(self, case: C, output: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        return super().cotangent(case, output, shape, "float64" if dtype == "float64" else "float32")


def _padding(case: LogitsCase) -> dict[str, Any]:
    return {"padding_mask": padding_of(case)} if case.padding else {}


class AuxLossScores(_FloatOutputs[LogitsCase]):
    """`aux_loss_scores`: the scores, the choice by the rule of margins, and the gradient."""

    function = "aux_loss_scores"
    case_type = LogitsCase
    signature = Signature(
        inputs=[Input("logits", "TE", LOGITS, gradient=True), PADDING],
        outputs=[Output("scores", "TE", of="logits"), Output("routing_map", "TE")],
        settings=("score_function",),
        required=("topk",),
    )

    def legal(self, case: LogitsCase) -> Problem:
        settings: dict[str, Any] = {"topk": case.topk}
        settings |= {"score_function": case.score} if case.score != "softmax" else {}
        return self.call(case, {"logits": logits_of(case)}, settings | _padding(case))

    def expected(self, case: LogitsCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        logits, settings = problem.required["logits"], problem.settings
        dtype, function = accumulator_of(declared, logits.dtype), settings.get("score_function", "softmax")
        padding = settings["padding_mask"] if "padding_mask" in settings else torch.zeros(len(logits), dtype=torch.bool)
        unspecified_rows = self._unspecified_rows(logits, function)
        x = Running.of(torch.where(unspecified_rows[:, None], 0, logits), dtype)
        _, scores = aux_scores(x, function)
        oracle = leaf(logits)
        value = aux_loss_scores(oracle, **settings)
        counts = torch.where(padding, 0, settings["topk"])
        lowest = declared.get("tie_rule") == "lowest_index"
        unspecified = unspecified_rows & ~padding
        reference_map = aux_loss_scores(logits, **settings).routing_map
        expectations: dict[str, Expectation] = {
            "routing_map": Chosen(
                reference_map,
                scores.value,
                scores.beside_the_oracle.error,
                counts,
                (logits.double(),),
                lowest,
                unspecified,
            ),
            "scores": scores.masked(~padding[:, None]).beside_the_oracle.bounded(
                accumulator_dtype(logits.dtype), value.scores.detach(), self._cells(unspecified, logits)
            ),
        }
        if problem.wanted:
            (gradient,) = torch.autograd.grad(value.scores, oracle, problem.cotangents["scores"].double())
            rows = unspecified | ((logits < UNDERFLOW).any(1) if function == "sqrtsoftplus" else False)
            analysis = aux_gradient(x, Running.of(problem.cotangents["scores"], dtype), function).masked(
                ~padding[:, None]
            )
            expectations["d_logits"] = analysis.beside_the_oracle.bounded(
                logits.dtype, gradient, self._cells(rows & ~padding, logits)
            )
        return expectations

    @staticmethod
    def _cells(rows: Tensor, logits: Tensor) -> Tensor:
        return rows[:, None].expand(logits.shape)

    @staticmethod
    def _unspecified_rows(logits: Tensor, function: str) -> Tensor:
        rows = unspecified_rows(logits, {})
        return rows | (logits == -torch.inf).all(1) if function == "softmax" else rows


class ZLoss(_FloatOutputs[LogitsCase]):
    """`z_loss` and its gradient."""

    function = "z_loss"
    case_type = LogitsCase
    signature = Signature(
        inputs=[Input("logits", "TE", LOGITS, gradient=True), PADDING],
        outputs=[Output("loss", of="logits")],
        required=("coeff",),
    )

    def legal(self, case: LogitsCase) -> Problem:
        return self.call(case, {"logits": logits_of(case)}, {"coeff": case.coeff / 8} | _padding(case))

    def expected(self, case: LogitsCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        logits, settings = problem.required["logits"], problem.settings
        dtype, out = accumulator_of(declared, logits.dtype), accumulator_dtype(logits.dtype)
        valid = ~settings["padding_mask"] if "padding_mask" in settings else torch.ones(len(logits), dtype=torch.bool)
        odd = unspecified_rows(logits, {}) | (logits == -torch.inf).all(1)
        x = Running.of(torch.where((odd | ~valid)[:, None], 0, logits), dtype)
        loss, slope = z_terms(x, valid, settings["coeff"])
        oracle = leaf(logits)
        value = z_loss(oracle, **settings)
        unspecified_loss = (odd & valid).any()
        analysis = Running(loss.value.reshape(()), loss.error.reshape(()), dtype)
        expectations: dict[str, Expectation] = {
            "loss": analysis.beside_the_oracle.bounded(out, value.detach(), unspecified_loss)
        }
        if problem.wanted:
            (gradient,) = torch.autograd.grad(value, oracle, problem.cotangents["loss"].double())
            slope = slope * Running.of(problem.cotangents["loss"], dtype)
            expectations["d_logits"] = slope.beside_the_oracle.bounded(
                logits.dtype, gradient, (odd & valid)[:, None].expand(logits.shape)
            )
        return expectations


class SinkhornRouting(Contract[LogitsCase]):
    """`sinkhorn_routing`: the choice where the plan is unambiguous; its weights and gradient."""

    function = "sinkhorn_routing"
    case_type = LogitsCase
    signature = Signature(
        inputs=[Input("logits", "TE", LOGITS, gradient=True)],
        outputs=[Output("probs", "TE", of="logits"), Output("routing_map", "TE")],
        required=("topk", "training"),
    )
    primary = "routing_map"

    def legal(self, case: LogitsCase) -> Problem:
        return self.call(case, {"logits": logits_of(case)}, {"topk": case.topk, "training": not case.evaluation})

    def expected(self, case: LogitsCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        logits, topk = problem.required["logits"], problem.settings["topk"]
        dtype = accumulator_of(declared, logits.dtype)
        activation = activation_of(logits, topk, dtype)
        keys = activation if case.evaluation else plan_of(logits, dtype)
        counts = torch.full((len(logits),), topk)
        reference = sinkhorn_routing(logits, **problem.settings).routing_map
        unspecified_rows = keys.value.isnan().any(1)
        lowest = declared.get("tie_rule") == "lowest_index"
        expectations: dict[str, Expectation] = {
            "routing_map": Chosen(
                reference, keys.value, keys.error, counts, (logits.double(),), lowest, unspecified_rows
            )
        }
        expectations["probs"] = Given(
            reference.double(), lambda out: activation.masked(out["routing_map"] != 0).bounded(logits.dtype)
        )
        if problem.wanted:
            expectations["d_logits"] = Given(
                reference.double(), lambda out: self._gradient(problem, out["routing_map"] != 0, activation)
            )
        return expectations

    @staticmethod
    def _gradient(problem: Problem, chosen: Tensor, activation: Running) -> Bounded:
        g = Running.of(problem.cotangents["probs"], activation.dtype).masked(chosen)
        return slope_by_plan(activation, g, problem.settings["topk"]).bounded(problem.required["logits"].dtype)


class LoadBalancingLoss(_FloatOutputs[LoadCase]):
    """`load_balancing_loss` and its gradient."""

    function = "load_balancing_loss"
    case_type = LoadCase
    signature = Signature(
        inputs=[
            Input("scores", "TC", LOGITS, gradient=True),
            Input("tokens_per_expert", "C", (*COUNTS, "uint8"), field="map_dtype"),  # as LoadCase
        ],
        outputs=[Output("loss", of="scores")],
        required=("total_num_tokens", "topk", "num_experts", "coeff"),
        linear=("scores", "loss"),
    )

    def legal(self, case: LoadCase) -> Problem:
        columns = case.experts * case.sequences
        scores = numbers(case, "scores", (case.tokens, columns))
        small_counts = hashed(case.seed, "counts", columns).astype(np.int64) % (case.tokens * case.topk + 2)
        total: int | Tensor = case.tokens + case.seed % 3 + COUNTED.get(case.counted, 0)
        on_device = {"device": torch.tensor(total), "mean": torch.tensor(total + 0.625), "one": torch.tensor([total])}
        total = ({"number": total, "zero": 0} | on_device)[case.total]
        settings = {"total_num_tokens": total, "topk": case.topk, "num_experts": case.experts, "coeff": case.coeff / 8}
        return self.call(case, {"scores": scores, "tokens_per_expert": counts_past(case, small_counts)}, settings)

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        scores, counts = problem.required.values()
        dtype, out = computed_in(declared, scores), accumulator_dtype(scores.dtype)
        terms = scores.shape[0] + scores.shape[1] + 12  # sums over rows, columns; factors
        oracle = leaf(scores)
        value = load_balancing_loss(oracle, counts, **problem.settings)
        magnitude = load_balancing_loss(scores.double().abs(), counts, **problem.settings)
        expectations: dict[str, Expectation] = {"loss": sum_bound(value.detach(), magnitude, terms, out, dtype)}
        if problem.wanted:
            (gradient,) = torch.autograd.grad(value, oracle, problem.cotangents["loss"].double())
            expectations["d_scores"] = sum_bound(gradient, gradient.abs(), 12, scores.dtype, dtype)
        return expectations


class UpdateExpertBias(Contract[LoadCase]):
    """`update_expert_bias`."""

    function = "update_expert_bias"
    case_type = LoadCase
    signature = Signature(
        inputs=[
            Input("expert_bias", "E", ("float32", "float64")),
            Input("tokens_per_expert", "E", (*COUNTS, "uint8"), field="map_dtype"),  # as LoadCase
        ],
        outputs=[Output("expert_bias", "E")],
        required=("update_rate",),
    )

    def legal(self, case: LoadCase) -> Problem:
        noise = hashed(case.seed, "bias", case.experts).astype(np.int64)
        bias = torch.from_numpy((noise % 1025 - 512) / 512 * (case.bias / 2))
        bias = bias if case.dtype == "float64" else bias.float()
        counts = hashed(case.seed, "counts", case.experts).astype(np.int64) % (case.tokens + 1)
        held = counts_past(case, counts if not case.even else np.full(case.experts, case.tokens))
        required = {"expert_bias": bias, "tokens_per_expert": held}
        return self.call(case, required, {"update_rate": case.rate / 1000})

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        bias, counts = problem.required.values()
        value = update_expert_bias(bias.double(), counts, **problem.settings)
        step = (value - bias.double()).abs()
        bound = 2 * ROUNDOFF[bias.dtype] * (value.abs() + step)  # rate and sum are each rounded once
        return {"expert_bias": Bounded(value, torch.where(step > 0, bound, 0.0), bias.dtype, bias.dtype)}
