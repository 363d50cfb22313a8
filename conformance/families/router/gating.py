"""`gate`, `jitter` and `attach_loss`."""

from collections.abc import Mapping
from typing import Any

import torch

from conformance.core.contract import Contract, Problem, accumulator_of
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload
from conformance.families.router.cases import LOGITS, GateCase
from conformance.judge import Expectation
from conformance.judge.bound import ROUNDOFF, Bounded, sum_bound
from conformance.judge.exact import Exact
from moe_ref.router.gating import ROUTER_DTYPES, gate

FINE = 2.0**-40  # near 1, with more bits than float32 has


def states_of(case: GateCase) -> torch.Tensor:
    """The states [T,H] by `values`. Subnormal numbers occur only where x is moved."""
    ends = "edges" if case.function == "attach_loss" else "ends"
    style = ends if case.values == "special" else "dyadic"
    return payload(case.seed, "x", (case.tokens, case.hidden), case.dtype, style)


class Gate(Contract[GateCase]):
    """`gate`: the GEMM in the router dtype and its three gradients."""

    function = "gate"
    case_type = GateCase
    signature = Signature(
        inputs=[
            Input("x", "TH", LOGITS, gradient=True),
            Input("weight", "EH", field="parameter_dtype", gradient=True),
            Input("bias", "E", field="bias_dtype", optional="bias", gradient=True),
        ],
        outputs=[Output("logits", "TE", of="x")],
        settings=("router_dtype",),
    )

    def legal(self, case: GateCase) -> Problem:
        x = states_of(case)
        weight = payload(case.seed, "weight", (case.experts, case.hidden), case.parameter_dtype)
        settings: dict[str, Any] = {}
        if case.bias:
            settings["bias"] = payload(case.seed, "bias", (case.experts,), case.bias_dtype)
        if case.router_dtype:
            settings["router_dtype"] = case.router_dtype
        return self.call(case, {"x": x, "weight": weight}, settings)

    def cotangent(self, case: GateCase, output: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The cotangent, in the router dtype."""
        return super().cotangent(
            case, output, shape, {"fp32": "float32", "fp64": "float64"}.get(case.router_dtype, dtype)
        )

    def expected(self, case: GateCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x, weight = problem.required.values()
        bias, g = problem.settings.get("bias"), problem.cotangents.get("logits")
        out = ROUTER_DTYPES.get(problem.settings.get("router_dtype", ""), x.dtype)
        # operands are first rounded to the router dtype
        stored = _in(out, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
        accumulator = accumulator_of(declared, out)
        value = gate(stored["x"], stored["weight"], bias=stored.get("bias"))
        magnitude = stored["x"].abs() @ stored["weight"].abs().T + (0 if bias is None else stored["bias"].abs())
        # the product may be rounded before the bias is added
        double = 0 if bias is None else 2 * ROUNDOFF[out] * (value - stored["bias"]).abs()
        expectations: dict[str, Expectation] = {
            "logits": _wider(sum_bound(value, magnitude, x.shape[1] + 2, out, accumulator), double)
        }
        if g is None:
            return expectations
        g = g.double()
        terms = {
            "x": (g @ stored["weight"], g.abs() @ stored["weight"].abs(), weight.shape[0], x.dtype),
            "weight": (g.T @ stored["x"], g.abs().T @ stored["x"].abs(), x.shape[0], weight.dtype),
        }
        if bias is not None:
            terms["bias"] = (g.sum(0), g.abs().sum(0), x.shape[0], bias.dtype)
        for name in problem.wanted:
            v, m, count, dtype = terms[name]
            # rounded to the router dtype, then to the operand's
            first = ROUNDOFF[out] * (v.abs() + m * ROUNDOFF[accumulator]) if dtype != out else 0
            expectations[f"d_{name}"] = _wider(sum_bound(v, m, count + 2, dtype, accumulator), first)
        return expectations


def _in(dtype: torch.dtype, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each tensor rounded to `dtype`, as float64."""
    return {name: x.to(dtype).double() for name, x in tensors.items()}


def _wider(bounded: Bounded, extra_bound: torch.Tensor | float) -> Bounded:
    return Bounded(bounded.value, bounded.bound + extra_bound, bounded.dtype, bounded.accumulator)


class Jitter(Contract[GateCase]):
    """`jitter`: each element times a factor in [1 - eps, 1 + eps], rounded to its dtype."""

    function = "jitter"
    case_type = GateCase
    signature = Signature(
        inputs=[Input("x", "TH", LOGITS)], outputs=[Output("x", "TH")], required=("eps",), random=True
    )

    def legal(self, case: GateCase) -> Problem:
        x = states_of(case)
        return self.call(case, {"x": x}, {"eps": case.eps / 16})

    def expected(self, case: GateCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x = problem.required["x"].double()
        unit = ROUNDOFF[problem.required["x"].dtype]
        return {
            "x": Bounded(
                x,
                x.abs() * (problem.settings["eps"] * (1 + 4 * unit) + 4 * unit),
                problem.required["x"].dtype,
                torch.float32,
            )
        }


class AttachLoss(Contract[GateCase]):
    """`attach_loss`: x unchanged; dloss = `scale` for every cotangent of x."""

    function = "attach_loss"
    case_type = GateCase
    signature = Signature(
        inputs=[
            Input("x", "TH", LOGITS, gradient=True),
            Input("loss", "", field="loss_dtype", gradient=True),
        ],
        outputs=[Output("x", "TH", of="x")],
        required=("scale",),
        linear=("x", "x"),
    )

    def legal(self, case: GateCase) -> Problem:
        x = states_of(case)
        loss = payload(case.seed, "loss", (), case.loss_dtype)
        scale = case.scale / 8 + (FINE if case.scale and case.dtype == "float64" else 0.0)
        return self.call(case, {"x": x, "loss": loss}, {"scale": scale})

    def expected(self, case: GateCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        expectations: dict[str, Expectation] = {"x": Exact(problem.required["x"])}
        if "x" in problem.wanted:
            expectations["d_x"] = Exact(problem.cotangents["x"], "values")
        if "loss" in problem.wanted:
            expectations["d_loss"] = Exact(
                torch.tensor(problem.settings["scale"], dtype=problem.required["loss"].dtype), "values"
            )
        return expectations
