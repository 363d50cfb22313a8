"""The three products of one of an expert's two layers in low precision, of numbers that may be known in part; in running numbers.

What is known exactly (weights, and the rows and cotangents of the call) is quantised as the reference does it; what comes out of a stage
before is quantised in a range (`inexact_factor`). Each product then is judged as one of `grouped_linear` is.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.analysis.factors import inexact_factors
from conformance.analysis.products import Product as Factored
from conformance.analysis.running import Running
from conformance.families.experts.precision import Factor, Precision, operand_of
from conformance.judge.bound import ROUNDOFF
from moe_ref.quantization.recipes import scheme

BESIDE = 2  # roundings of a bias that is added first or last


@dataclass(frozen=True)
class LowLayer:
    """A linear layer of each expert, by a recipe."""

    counts_L: Tensor
    how: Precision  # with a recipe
    storage: torch.dtype  # of rows and weights

    def fprop(self, x: Running, weight: Tensor, bias_LM: Tensor | None) -> tuple[Running, Tensor, int]:
        """x Wᵀ + b, with Σ|terms|, and how many terms those are; so the others."""
        products = []
        for e, (own, matrix) in enumerate(
            zip(self._factors(x, "input", "fprop"), self.how.weights(weight, "fprop"), strict=True)
        ):
            product = Factored.of_factors(own, matrix)
            if bias_LM is not None:
                bias = bias_LM[e].double()
                product = replace(product, value=product.value + bias, magnitude=product.magnitude + bias.abs())
            products.append(product)
        return self._running(Factored.joined(products), weight.shape[2] + BESIDE, x.dtype)

    def dgrad(self, g: Running, weight: Tensor) -> tuple[Running, Tensor, int]:
        """g W."""
        layer = replace(self, how=self.how.of("dgrad"))
        pairs = zip(layer._factors(g, "grad_output", "dgrad"), layer.how.weights(weight, "dgrad"), strict=True)
        return layer._running(
            Factored.joined([Factored.of_factors(own, matrix.turned) for own, matrix in pairs]),
            weight.shape[1],
            g.dtype,
        )

    def wgrad(self, g: Running, x: Running) -> tuple[Running, Tensor, int]:
        """Σ gᵀ x of each expert."""
        layer = replace(self, how=self.how.of("wgrad"))
        pairs = zip(layer._factors(g, "grad_output", "wgrad"), layer._factors(x, "input", "wgrad"), strict=True)
        whole = Factored.joined([Factored.of_factors(left.turned, right.turned) for left, right in pairs], stack=True)
        return layer._running(whole, int(self.counts_L.max()), g.dtype)

    def _factors(self, x: Running, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows as they enter a product."""
        recipe = self.how.recipe
        assert recipe is not None
        if not x.error.any():
            return self.how.rows(x.value.to(self.storage), self.counts_L, role, gemm)
        operand = operand_of(gemm, recipe, role)
        if operand.kept == "stored":
            return self._stored(x)
        columnwise = operand.columnwise
        state, noise = (self.how.settings.get(name) for name in ("state", "noise"))
        return inexact_factors(
            x,
            self.counts_L,
            scheme(recipe, role, columnwise=columnwise),
            self.storage,
            columnwise=columnwise,
            scale_L=None if state is None else getattr(state, role).scale,
            noise_PN=None if noise is None else noise[int(columnwise)],
            reciprocal=self.how.reciprocal,
            aligned=self.how.accumulator.block is not None,
            rounded=operand.kept == "dequantized",
        )

    def _stored(self, x: Running) -> list[Factor]:
        """Each expert's rows as they are, and what they may be off by."""
        unknown = ~x.error.isfinite()
        value, margin = torch.where(unknown, 0.0, x.value), torch.where(unknown, torch.inf, x.error)
        sizes = self.counts_L.tolist()
        return [Factor(*own) for own in zip(value.split(sizes), margin.split(sizes), strict=True)]

    def _running(self, whole: Factored, terms: int, dtype: torch.dtype) -> tuple[Running, Tensor, int]:
        """What the factors' other codes, the scales' roundings and those of the sum may take it away by."""
        every = whole.magnitude + whole.margin
        roundings = self.how.accumulator.worst(terms) + self.how.roundings * ROUNDOFF[torch.float32]
        error = torch.where(whole.margin.isfinite(), whole.margin + roundings * every, torch.inf)
        return Running(whole.value, error.nan_to_num(torch.inf, torch.inf), dtype), whole.magnitude, terms
