"""The three products of one of an expert's two layers in low precision, of numbers that may be known in part; in running numbers.

What is known exactly (weights, and the rows and cotangents of the call) is quantised as the reference does it; what comes out of a stage
before is quantised as an interval (`factors`). Each product then is judged as one of `grouped_linear` is.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.analysis.factors import Factor, ProductPrecision
from conformance.analysis.products import Product as Factored
from conformance.analysis.running import Running
from conformance.judge.bound import ROUNDOFF

BESIDE = 2  # roundings of a bias that is added first or last


@dataclass(frozen=True)
class LowLayer:
    """A linear layer of each expert, by a recipe."""

    counts_L: Tensor
    how: ProductPrecision  # with a recipe
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
            Factored.joined([Factored.of_factors(own, matrix.transposed) for own, matrix in pairs]),
            weight.shape[1],
            g.dtype,
        )

    def wgrad(self, g: Running, x: Running) -> tuple[Running, Tensor, int]:
        """Σ gᵀ x of each expert."""
        layer = replace(self, how=self.how.of("wgrad"))
        pairs = zip(layer._factors(g, "grad_output", "wgrad"), layer._factors(x, "input", "wgrad"), strict=True)
        whole = Factored.joined(
            [Factored.of_factors(left.transposed, right.transposed) for left, right in pairs], stack=True
        )
        return layer._running(whole, int(self.counts_L.max()), g.dtype)

    def _factors(self, x: Running, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows as they enter a product."""
        if not x.error.any():
            return self.how.rows(x.value.to(self.storage), self.counts_L, role, gemm)
        return self.how.inexact_rows(x, self.counts_L, role, gemm, self.storage)

    def _running(self, whole: Factored, terms: int, dtype: torch.dtype) -> tuple[Running, Tensor, int]:
        """What the factors' other codes, the scales' roundings and those of the sum may take it away by."""
        every = whole.magnitude + whole.margin
        roundings = self.how.accumulator.worst(terms) + self.how.roundings * ROUNDOFF[torch.float32]
        error = torch.where(whole.margin.isfinite(), whole.margin + roundings * every, torch.inf)
        return Running(whole.value, error.nan_to_num(torch.inf, torch.inf), dtype), whole.magnitude, terms
