"""Second derivatives, and the law that they are either right or refused by an error."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core.contract import Opaque
from conformance.core.law import Law, Trial, plain
from conformance.core.tensors import STRANGE, payload
from conformance.interface import named_outputs
from conformance.judge import Finding

Second = dict[str, Tensor | None]


def second_derivatives(
    outputs: Mapping[str, Any], inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> Second:
    """Derivatives of the gradients, with constant cotangents and with cotangents that are leaves.

        s_x = ⟨v_x, dx⟩,   dx = Σ_y (∂y/∂x)ᵀ dy,   v_x a hashed direction
        "d_x by z" = ∂s_x / ∂z,   z each input;   and, where cotangents are leaves, each cotangent

    Args:
        outputs: the results of one forward.
        inputs: leaves that the gradients are taken of.
        cotangents: of the outputs, by name.

    Returns:
        By name; zeros where s_x does not depend on z, None where a backward raised. Names with
        constant cotangents end in " (constant cotangents)".
    """
    attached = [name for name in cotangents if isinstance(y := outputs.get(name), Tensor) and y.requires_grad]
    derivatives: Second = {}
    for constant in (True, False):
        cotangent_leaves = {name: x.detach().requires_grad_(not constant) for name, x in cotangents.items()}
        leaves = {**inputs, **({} if constant else {f"d_{name}": x for name, x in cotangent_leaves.items()})}
        along = [cotangent_leaves[name].to(outputs[name].dtype) for name in attached]
        gradients = _gradients([outputs[name] for name in attached], along, inputs)
        for name in inputs:
            derivatives_by_leaf = _derivatives(gradients[name], leaves) if gradients else dict.fromkeys(leaves)
            suffix = " (constant cotangents)" if constant else ""
            derivatives |= {
                f"d_{name} by {leaf}{suffix}": derivative for leaf, derivative in derivatives_by_leaf.items()
            }
    return derivatives


def _gradients(
    outputs: list[Tensor], cotangents: list[Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """The gradients, with a graph; empty if the backward raises."""
    if not outputs:
        return dict.fromkeys(inputs)
    try:
        gradients = torch.autograd.grad(
            outputs, list(inputs.values()), cotangents, allow_unused=True, create_graph=True
        )
    except Exception:
        return {}
    return dict(zip(inputs, gradients, strict=True))


def _derivatives(dx: Tensor | None, leaves: Mapping[str, Tensor]) -> Second:
    """The derivatives of ⟨v, dx⟩ by the leaves; None where the backward raises."""
    for leaf in leaves.values():
        leaf.grad = None
    if dx is not None and dx.requires_grad:
        direction = payload(0, "direction", tuple(dx.shape), "float32").to(dx.device, dx.dtype)
        try:  # `autograd.grad` would leave out nodes that lead to no leaf, and those nodes may refuse
            torch.autograd.backward(dx, direction, retain_graph=True)
        except Exception:
            return dict.fromkeys(leaves)
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def _of_the_reference(trial: Trial, widen: bool) -> tuple[dict[str, Any], Second]:
    """The reference's results and second derivatives, in float64 or in the inputs' own dtypes."""
    problem = trial.problem

    def own(x: Any) -> Any:
        if isinstance(x, Opaque):
            return getattr(problem.produced, x.field_name)
        return x.double() if widen and isinstance(x, Tensor) and x.is_floating_point() else x

    arguments = {name: own(x) for name, x in (problem.required | problem.settings).items()}
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in problem.wanted}
    arguments |= leaves
    call = getattr(moe_ref, problem.function)
    result = call(
        *(arguments[name] for name in problem.required), **{name: arguments[name] for name in problem.settings}
    )
    outputs = named_outputs(result, trial.contract.outputs)
    return outputs, second_derivatives(outputs, leaves, problem.cotangents)


def _chose_otherwise(trial: Trial, outputs: Mapping[str, Any]) -> bool:
    """Whether the call chose otherwise, rightly: at a tie, or which token it dropped."""
    integers = {name: x for name, x in outputs.items() if isinstance(x, Tensor) and not x.is_floating_point()}
    observed = {name: trial.first.get(name) for name in integers}  # None for a flag: False
    return any(
        isinstance(y, Tensor) and not torch.equal(integers[name].long(), y.long()) for name, y in observed.items()
    )


def _lacks(observed: Tensor, exact: Tensor, near: Tensor) -> bool:
    """Whether more than half of a derivative is wrong, beyond rounding and without a NaN."""
    size = exact.norm()
    if not size.isfinite() or not size or (near.double() - exact).norm() > size / 8:
        return False
    return bool(torch.where(observed.isfinite(), observed.double() - exact, 0).norm() > size / 2)


def _double_backward(trial: Trial) -> Finding | None:
    """Second derivatives are the reference's, or a backward raises: no silent lack of a dependence.

    D is wrong if ‖D - R‖ > ½ ‖R‖ over finite elements, R the reference's in float64. Nothing is
    asked where another choice of experts is right too, or the reference in the case's dtype is off
    by more than ‖R‖ / 8.
    """
    if trial.problem.script or not trial.problem.cotangents:
        return None
    outputs, exact = _of_the_reference(trial, widen=True)
    if _chose_otherwise(trial, outputs):
        return None
    _, rounded = _of_the_reference(trial, widen=False)
    observed = trial.run(trial.problem, manner="twice")
    for name, expected in exact.items():
        near, observed_derivative = rounded[name], observed[name]
        if expected is None or near is None or observed_derivative is None:
            continue
        if _lacks(observed_derivative, expected.double(), near):
            what = "is wrong in" if observed_derivative.any() else "lacks"
            return Finding(name.split()[0], "double_backward", f"{what} the derivative {name}, without an error")
    return None


def _smooth(case: Any) -> bool:
    """Whether many digits of the second derivatives are known, as they are not for codes."""
    is_plain = plain(case) and bool(case.grads)
    numbers = case.dtype in ("float32", "float64") and getattr(case, "values", "") not in STRANGE
    rounded = isinstance(scaling := getattr(case, "scaling", 0), str) and scaling
    return is_plain and numbers and not rounded and not getattr(case, "stored", False)


DOUBLE_BACKWARD = Law("double_backward", _double_backward, _smooth, gradients=True)
