"""glu and activation: output and both gradients by running error analysis, on bounds too."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.curves import (
    CURVES,
    Curve,
    gate_of,
    halves,
    interleave_halves,
    shifted,
    split,
)
from conformance.analysis.input_store import beyond_e4m3, in_e4m3
from conformance.analysis.running import Running
from conformance.core.contract import Contract, Problem, computed_in, leaf
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload
from conformance.families.experts.cases import ActivationCase, hidden_of, probs_of
from conformance.judge import Expectation
from moe_ref.experts.activations import activation, glu


def _signature(*settings: str) -> Signature:
    return Signature(
        inputs=[Input("h", "TH", gradient=True), Input("probs", "T", field="probs", optional="probs", gradient=True)],
        outputs=[Output("out", "TF", of="h")],
        settings=settings,
        linear=("probs", "out"),
    )


class _Elementwise(Contract[ActivationCase]):
    """Shared by glu and activation: h, probs, and forward and backward around the activation."""

    case_type = ActivationCase
    oracle: Callable[..., Tensor]

    def columns(self, case: ActivationCase) -> int:
        return case.width

    def legal(self, case: ActivationCase) -> Problem:
        settings: dict[str, Any] = (
            {"probs": probs_of(case.seed, case.tokens, case.probs, case.weights)} if case.probs else {}
        )
        settings |= activation_settings(case)
        return self.call(case, {"h": hidden_of(case, self.columns(case))}, settings)

    def cotangent(self, case: ActivationCase, output: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """The cotangent is always finite, because h has the NaNs."""
        return payload(case.seed, f"d_{output}", shape, dtype)

    def expected(self, case: ActivationCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        h, probs = problem.required["h"], problem.settings.get("probs")
        rounds_before_probs = bool(problem.settings.get("round_before_probs")) and probs is not None
        dtype = evaluated_in(declared, h, probs)
        p = None if probs is None else Running.of(probs[:, None], dtype)
        held, oracle, value = self.held(h, probs, problem.settings, dtype, rounds_before_probs)
        out = held if p is None else held * p
        hidden = self.hidden_nan(h, problem.settings)
        expectations: dict[str, Expectation] = {
            "out": out.before_final_rounding(h.dtype).bounded(
                h.dtype, None if rounds_before_probs else value.detach(), hidden
            )
        }
        if not problem.wanted:
            return expectations
        lost = (~h.isfinite()).any(1, keepdim=True).expand(h.shape)
        if problem.settings.get("fp8_input_store"):
            beyond = torch.logical_or(*split(beyond_e4m3(h), problem.settings))
            lost, h = lost | interleave_halves(beyond, beyond, problem.settings), in_e4m3(h)
            held, oracle, value = self.held(h, probs, problem.settings, dtype, rounds_before_probs)
        cotangent = problem.cotangents["out"]
        exact = dict(zip(oracle, torch.autograd.grad(value, list(oracle.values()), cotangent.double()), strict=True))
        g = Running.of(cotangent, dtype)
        if "probs" in problem.wanted:
            assert probs is not None
            total = (g * held).sum(1)
            flat = Running(total.value[:, 0], total.error[:, 0], dtype)
            expectations["d_probs"] = flat.before_final_rounding(probs.dtype).bounded(
                probs.dtype, None if rounds_before_probs else exact["probs"], lost.any(1)
            )
        if "h" in problem.wanted:
            g = g if p is None else g * p
            slope = self.vjp(g.rounded_to(h.dtype) if rounds_before_probs else g, h, problem.settings)
            lost = lost | self.overflows(g, h, problem.settings)
            expectations["d_h"] = slope.before_final_rounding(h.dtype).bounded(
                h.dtype, None if rounds_before_probs else exact["h"], lost
            )
        return expectations

    def held(
        self,
        h: Tensor,
        probs: Tensor | None,
        settings: Mapping[str, Any],
        dtype: torch.dtype,
        rounds_before_probs: bool,
    ) -> tuple[Running, dict[str, Tensor], Tensor]:
        """The activation before the probs; the oracle's inputs and its output."""
        act = self.activated(h, settings, dtype)
        oracle_inputs = {"h": leaf(h)} | ({} if probs is None else {"probs": leaf(probs)})
        oracle_settings = {name: x for name, x in settings.items() if name not in ("probs", "fp8_input_store")}
        value = type(self).oracle(oracle_inputs["h"], probs=oracle_inputs.get("probs"), **oracle_settings)
        return act.rounded_to(h.dtype) if rounds_before_probs else act, oracle_inputs, value

    @abstractmethod
    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        """The activation before the product with the probs."""

    @abstractmethod
    def vjp(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        """d_h from the cotangent of the activation."""

    @abstractmethod
    def overflows(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Where the cotangent, multiplied with the values before with a slope, may overflow.

        The slope may be 0, and ∞ · 0 is NaN: torch's autograd of x σ(αx) multiplies so.
        """

    @abstractmethod
    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Where an honest formula may end in a NaN or not.

        A NaN enters a minimum or a maximum, which may or may not propagate it; or the erf of +∞ is
        a polynomial times exp(-∞), which is ∞ · 0 in oneDNN, and so in torch on a CPU.
        """


def evaluated_in(declared: Mapping[str, Any], h: Tensor, probs: Tensor | None) -> torch.dtype:
    """The dtype of an activation: float64 if an input is, whatever is declared of sums. In float32
    a number may be on the other side of a bend, or infinite.
    """
    has_float64 = torch.float64 in (h.dtype, None if probs is None else probs.dtype)
    return torch.float64 if has_float64 else computed_in(declared, h)


def activation_settings(case: Any) -> dict[str, Any]:
    """The keyword arguments that differ from their defaults."""
    settings: dict[str, Any] = {"kind": case.kind} if case.kind else {}
    settings |= {"offset": case.offset / 8} if case.offset else {}
    settings |= {"clamp": case.clamp / 8} if case.clamp else {}
    settings |= {"alpha": case.alpha / 1000} if case.alpha else {}
    settings |= {"interleave": case.interleave} if case.interleave else {}
    settings |= {"round_before_probs": True} if case.early else {}
    return settings | ({"fp8_input_store": True} if case.stored else {})


class Glu(_Elementwise):
    """`glu`: the output, and the gradients of h and of the probs."""

    function = "glu"
    signature = _signature("kind", "offset", "clamp", "alpha", "interleave", "round_before_probs", "fp8_input_store")
    oracle = staticmethod(glu)

    def columns(self, case: ActivationCase) -> int:
        return 2 * case.width

    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        u, v = halves(h, settings, dtype)
        return gate_of(settings).value(u) * shifted(v, settings)

    def vjp(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        u, v = halves(h, settings, g.dtype)
        gate, (free_u, free_v) = gate_of(settings), split(h.double(), settings)
        du, dv = g * gate.slope(u) * shifted(v, settings), g * gate.value(u)
        clamp = settings.get("clamp")
        if clamp is not None:
            du, dv = du.masked(free_u <= clamp), dv.masked(free_v.abs() <= clamp)
        return Running(
            interleave_halves(du.value, dv.value, settings), interleave_halves(du.error, dv.error, settings), g.dtype
        )

    def overflows(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        u, v = halves(h, settings, g.dtype)
        far = _too_large(g, u.value * max(settings.get("alpha", 1.0), 1.0), shifted(v, settings).value)
        return interleave_halves(far, far, settings)

    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        u, v = split(h, settings)
        clamped = settings.get("clamp") is not None
        lost = u.isnan() & (clamped or settings.get("kind") == "reglu") | v.isnan() & clamped
        return lost | (u == torch.inf) & (settings.get("kind") == "geglu_erf" and not clamped)


class Activation(_Elementwise):
    """`activation`: the output, and the gradients of h and of the probs."""

    function = "activation"
    signature = _signature("kind", "round_before_probs")
    oracle = staticmethod(activation)

    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        return self._curve(settings).value(Running.of(h, dtype))

    def vjp(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        return g * self._curve(settings).slope(Running.of(h, g.dtype))

    def overflows(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        return _too_large(g, h.double())

    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        kind = settings.get("kind", "squared_relu")
        return h.isnan() & ("relu" in kind) | (h == torch.inf) & (kind == "gelu")

    @staticmethod
    def _curve(settings: Mapping[str, Any]) -> Curve:
        return CURVES[settings.get("kind", "squared_relu")]


def _too_large(g: Running, *factors: Tensor) -> Tensor:
    """Where a product of some of these factors may exceed half of the largest number, so that 2 x
    may overflow.
    """
    size = (g.value.abs() + g.error).clamp(min=1)
    for x in factors:
        size = size * x.abs().clamp(min=1)
    return size > torch.finfo(g.dtype).max / 2
