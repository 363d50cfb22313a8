"""Typical errors that an MLP's results inherit from its earlier stages.

A sum of n products typically errs by α times its size, or times a random walk's of its terms. An
activation passes an error on times its slope, and a GEMM adds the errors of its operands as
independent ones:

    ε_h = α·max(|h|, Σ|terms|/√n)     ε_a = |p|·|act'(h)|·ε_h     ε_y² = Σ_j ε_aj² W2_ij²
    ε_dW2² = Σ_t d_out_ti² ε_atj²     ε_dx² = Σ_j ε_dhj² W1_jk²

Where act'(h)·h exceeds act(h) by far, as silu's at -50, a row of few such terms errs more than the
last GEMM's roundings say. High precision only.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import Activated, Backward, Forward, activated
from conformance.analysis.products import Product, expert_slices
from conformance.analysis.running import Running
from conformance.judge.bound import Accumulator


def typical(product: Product, accumulator: Accumulator) -> Running:
    """A product in float64 with its typical error, α·max(|value|, Σ|terms|/√n)."""
    terms = max(product.terms, 1)
    error = accumulator.typical(terms) * torch.maximum(product.value.abs(), product.magnitude / terms**0.5)
    return Running(product.value, error, torch.float64)


def spread(error_PK: Tensor, weights_LMK: Tensor, counts_L: Tensor) -> Tensor:
    """√Σ_k ε² w²: the error [P,M] of each expert's GEMM whose rows have independent errors."""
    slices = enumerate(expert_slices(counts_L))
    squared_errors = [error_PK[rows].square() @ weights_LMK[e].double().square().mT for e, rows in slices]
    return torch.cat(squared_errors).sqrt()


@dataclass(frozen=True)
class Inherited:
    """Typical errors of an MLP's stages."""

    stages: Forward

    @cached_property
    def act(self) -> Activated:
        """act(h), from h's typical error."""
        call = self.stages.call
        return activated(typical(self.stages.first, call.accumulator), call.settings)

    @cached_property
    def a(self) -> Tensor:
        """ε_a."""
        return self.act.value.error * self._p

    def out(self) -> Tensor:
        """ε_y."""
        return spread(self.a, self.stages.call.fc2_weight, self.stages.call.counts_L)

    def fc2_weight(self, g: Running) -> Tensor:
        """ε_dW2 [L,H,F], from the cotangent of the output."""
        slices = expert_slices(self.stages.call.counts_L)
        return torch.stack([g.value[rows].square().mT @ self.a[rows].square() for rows in slices]).sqrt()

    def rows(self, gradients: Backward) -> Tensor:
        """ε_dx."""
        call = self.stages.call
        d_a = typical(gradients.d_a, call.accumulator)
        d_h = self.act.vjp(Running(d_a.value * self._p, d_a.error * self._p, torch.float64))
        error = spread(d_h.error, call.fc1_weight.mT, call.counts_L)
        if call.probs is None or not call.settings.get("probs_on_input"):
            return error
        return error * Running.of(call.probs, torch.float64).value.abs()[:, None]

    @property
    def _p(self) -> Tensor | float:
        """|p|, by which the activation is multiplied."""
        return 1.0 if self.stages.p is None else self.stages.p.value.abs()
