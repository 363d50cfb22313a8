"""Shared experts in running numbers: an MLP of all tokens, and its gate.

    z = xgᵀ    s = σ(z)    out = y·s
    d_y = d_out·s    d_s = Σ d_out·y    d_z = d_s σ(1 - σ)    d_x = … + d_z g

each rounded to the dtype of x, except σ in the backward. The gate is always in high precision.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.analysis.curves import sigmoid
from conformance.analysis.mlp_inherited import Inherited, typical
from conformance.analysis.mlp_stages import Backward, Call, Forward, backward, forward
from conformance.analysis.products import Product
from conformance.analysis.running import Running, contracted


@dataclass(frozen=True)
class Gate:
    """The gate's values."""

    weight: Tensor  # [1,H]
    product: Product  # z
    score: Running  # not rounded, of a z that is
    seen: Running  # as it is multiplied
    y: Running  # the MLP's output


@dataclass(frozen=True)
class Shared:
    """The forward stages."""

    mlp: Forward
    gate: Gate | None
    out: Running
    product: Product  # the last GEMM's, weighted by the gate

    def inherited(self) -> Tensor:
        """The output's typical error before the last GEMM: √((s ε_y)² + (y ε_s)²)."""
        error = Inherited(self.mlp).out()
        if self.gate is None:
            return error
        score = typical_score(self.mlp.call, self.gate)
        return torch.hypot(score.value * error, self.gate.y.value * score.error)


@dataclass(frozen=True)
class SharedBackward:
    """The gradients of the MLP, of x with the gate's part, and of the gate."""

    stages: Shared
    g: Running  # of the output
    mlp: Backward
    x: Running
    gate_weight: Running | None

    def inherited(self) -> Tensor:
        """d_x's typical error: the MLP's, with the gate's in d_y, and d_z's."""
        mlp, gate = self.stages.mlp, self.stages.gate
        error = Inherited(mlp).rows(self.mlp)
        if gate is None:
            return error
        score = typical_score(mlp.call, gate)
        through_mlp = self.mlp.rows.value.abs() * score.error / score.value.clamp(min=torch.finfo(torch.float64).tiny)
        y = typical(mlp.y, mlp.call.accumulator).error + Inherited(mlp).out()
        terms = self.g.value * gate.y.value
        d_score = Running(
            terms.sum(1, keepdim=True),
            torch.hypot((self.g.value * y).norm(dim=1), mlp.call.accumulator.typical(y.shape[1]) * terms.norm(dim=1))[
                :, None
            ],
            torch.float64,
        )
        d_z = d_score * score * (score.constant(1.0) - score)
        return (error.square() + through_mlp.square() + (d_z.error * gate.weight.double()).square()).sqrt()


def typical_score(call: Call, gate: Gate) -> Running:
    """σ(z) with its typical error."""
    return sigmoid(typical(gate.product, call.accumulator))


def shared_forward(call: Call, gate_weight: Tensor | None) -> Shared:
    """The stages up to the output; the call has one expert."""
    mlp = forward(call)
    if gate_weight is None:
        return Shared(mlp, None, mlp.out, mlp.y)
    x, weight = Running.of(call.rows_PH, call.sums), Running.of(gate_weight, call.sums)
    z = contracted(x, weight, call.accumulator)
    score, y = sigmoid(call.kept(z, call.sums)), call.kept(mlp.out, call.sums)
    gate = Gate(gate_weight, Product.of(x, weight), score, call.kept(score, call.sums), y)
    return Shared(mlp, gate, y * gate.seen, replace(mlp.y, magnitude=mlp.y.magnitude * score.value))


def shared_backward(stages: Shared, g: Running) -> SharedBackward:
    """The backward stages from a cotangent of the output."""
    call, gate = stages.mlp.call, stages.gate
    if gate is None:
        mlp = backward(stages.mlp, g)
        return SharedBackward(stages, g, mlp, mlp.rows, None)
    mlp = backward(stages.mlp, call.kept(g * gate.seen, call.sums))
    score = gate.score
    d_score = call.kept((g * gate.y).sum(1), call.sums)
    d_z = call.kept(d_score * score * (score.constant(1.0) - score), call.sums)
    d_x = call.kept(mlp.rows, call.sums) + call.kept(d_z * Running.of(gate.weight, call.sums), call.sums)
    return SharedBackward(stages, g, mlp, d_x, contracted(d_z.mT, stages.mlp.x.mT, call.accumulator))
