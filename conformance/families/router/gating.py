"""gate, jitter and attach_loss."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Contract, Problem
from conformance.core.tensors import payload
from conformance.families.router.cases import GateCase
from conformance.judge import Expectation
from conformance.judge.bound import ROUNDOFF, Bounded, sum_bound
from conformance.judge.exact import Exact
from moe_ref.router.gating import ROUTER_DTYPES, gate


class _OfStates(Contract[GateCase]):
    def neighbour(self, case: GateCase) -> GateCase:
        plain: dict[str, Any] = {"golden": "", "law": "", "layout": "contiguous", "layout_of": ""}
        other: dict[str, Any] = {
            "tokens": case.tokens + 1,
            "hidden": case.hidden + 3,
            "eps": 5 if case.eps != 5 else 3,
            "scale": case.scale + 4,
        }
        return replace(case, **plain | other, seed=case.seed + 1)

    def simpler(self, case: GateCase) -> Iterator[GateCase]:
        for name in (
            "law",
            "layout",
            "grads",
            "router_dtype",
            "weight_dtype",
            "bias",
            "dtype",
            "eps",
            "scale",
            "poison",
            "seed",
        ):
            default: Any = GateCase.__dataclass_fields__[name].default
            if getattr(case, name) != default:
                fewer = {"grads": "+".join(g for g in case.grads.split("+") if g != "bias")} if name == "bias" else {}
                yield replace(case, **{name: default} | ({"layout_of": ""} if name == "layout" else {}) | fewer)
        for grad in case.grads.split("+") if "+" in case.grads else ():
            yield replace(case, grads=grad)
        for name, least in (("tokens", 0), ("hidden", 0), ("experts", 1)):
            size = getattr(case, name)
            for smaller in sorted({s for s in (least, 1, 2, 3, size // 2, size - 1) if least <= s < size}):
                changed: dict[str, Any] = {name: smaller}
                yield replace(case, **changed)


class Gate(_OfStates):
    """`gate`: the product in the router dtype, and its three gradients."""

    function = "gate"
    outputs = ("logits",)
    primary = "logits"
    optional = ("bias", "router_dtype")

    def legal(self, case: GateCase) -> Problem:
        x = payload(case.seed, "x", (case.tokens, case.hidden), case.dtype)
        weight = payload(case.seed, "weight", (case.experts, case.hidden), case.weight_dtype or case.dtype)
        settings: dict[str, Any] = (
            {"bias": payload(case.seed, "bias", (case.experts,), case.weight_dtype or case.dtype)} if case.bias else {}
        )
        settings |= {"router_dtype": case.router_dtype} if case.router_dtype else {}
        wanted = tuple(name for name in case.grads.split("+") if name)
        out = {"fp32": "float32", "fp64": "float64"}.get(case.router_dtype, case.dtype)
        cotangents = {"logits": payload(case.seed, "d_logits", (case.tokens, case.experts), out)} if wanted else {}
        return Problem(
            self.function, {"x": x, "weight": weight}, settings, {case.layout_of: case.layout}, wanted, cotangents
        )

    def expected(self, case: GateCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x, weight = problem.required.values()
        bias, g = problem.settings.get("bias"), problem.cotangents.get("logits")
        out = ROUTER_DTYPES.get(problem.settings.get("router_dtype", ""), x.dtype)
        stored = _in(
            out, x=x, weight=weight, **({} if bias is None else {"bias": bias})
        )  # operands are rounded to the router dtype first
        accumulator = torch.float64 if out == torch.float64 else torch.float32
        value = gate(stored["x"], stored["weight"], bias=stored.get("bias"))
        magnitude = stored["x"].abs() @ stored["weight"].abs().T + (0 if bias is None else stored["bias"].abs())
        # the product may be rounded before the bias is added
        double = 0 if bias is None else 2 * ROUNDOFF[out] * (value - stored["bias"]).abs()
        right: dict[str, Expectation] = {
            "logits": _wider(sum_bound(value, magnitude, x.shape[1] + 2, out, accumulator), double)
        }
        if g is None:
            return right
        g = g.double()
        terms = {
            "x": (g @ stored["weight"], g.abs() @ stored["weight"].abs(), weight.shape[0], x.dtype),
            "weight": (g.T @ stored["x"], g.abs().T @ stored["x"].abs(), x.shape[0], weight.dtype),
        }
        if bias is not None:
            terms["bias"] = (g.sum(0), g.abs().sum(0), x.shape[0], bias.dtype)
        for name in problem.wanted:
            v, m, count, dtype = terms[name]
            between = (
                ROUNDOFF[out] * (v.abs() + m * ROUNDOFF[accumulator]) if dtype != out else 0
            )  # rounded to the router dtype, then to the operand's
            right[f"d_{name}"] = _wider(sum_bound(v, m, count + 2, dtype, accumulator), between)
        return right


def _in(dtype: torch.dtype, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each tensor rounded to `dtype`, as float64."""
    return {name: x.to(dtype).double() for name, x in tensors.items()}


def _wider(bounded: Bounded, more: torch.Tensor | float) -> Bounded:
    return Bounded(bounded.value, bounded.bound + more, bounded.dtype, bounded.accumulator)


class Jitter(_OfStates):
    """`jitter`: each element within eps of itself, in its dtype; half of them up and half of them down."""

    function = "jitter"
    outputs = ("x",)
    primary = "x"

    def legal(self, case: GateCase) -> Problem:
        x = payload(case.seed, "x", (case.tokens, case.hidden), case.dtype)
        return Problem(self.function, {"x": x}, {"eps": case.eps / 16}, {case.layout_of: case.layout})

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


class AttachLoss(_OfStates):
    """`attach_loss`: the tensor itself; the loss gets `scale` as its gradient, whatever the tensor's cotangent is."""

    function = "attach_loss"
    outputs = ("x",)
    primary = "x"

    def legal(self, case: GateCase) -> Problem:
        x = payload(case.seed, "x", (case.tokens, case.hidden), case.dtype)
        loss = payload(case.seed, "loss", (), "float32")
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"x": payload(case.seed, "d_x", tuple(x.shape), case.dtype)} if wanted else {}
        return Problem(
            self.function,
            {"x": x, "loss": loss},
            {"scale": case.scale / 8},
            {case.layout_of: case.layout},
            wanted,
            cotangents,
        )

    def expected(self, case: GateCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        right: dict[str, Expectation] = {"x": Exact(problem.required["x"])}
        if "x" in problem.wanted:
            right["d_x"] = Exact(problem.cotangents["x"], "values")
        if "loss" in problem.wanted:
            right["d_loss"] = Exact(torch.tensor(problem.settings["scale"], dtype=torch.float32), "values")
        return right
