"""The three products of one layer of an expert MLP in low precision, in running numbers.

Exact tensors (weights, and the call's rows and cotangents) are quantised by the reference, results
of earlier stages as intervals (`factors`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.analysis.factors import Factor, ProductPrecision
from conformance.analysis.products import Product
from conformance.analysis.running import Running

BIAS_ROUNDINGS = 2  # roundings of a bias added first or last


@dataclass(frozen=True)
class LowLayer:
    """A linear layer of each expert, by a recipe."""

    counts_L: Tensor
    precision: ProductPrecision  # with a recipe
    storage: torch.dtype  # of rows and weights

    def fprop(self, x: Running, weight: Tensor, bias_LM: Tensor | None) -> tuple[Running, Product]:
        """x Wᵀ + b."""
        products = []
        pairs = zip(self._factors(x, "input", "fprop"), self.precision.weights(weight, "fprop"), strict=True)
        for e, (rows, matrix) in enumerate(pairs):
            product = Product.of(rows, matrix)
            if bias_LM is not None:
                bias = bias_LM[e].double()
                product = replace(product, value=product.value + bias, magnitude=product.magnitude + bias.abs())
            products.append(product)
        return self._running(Product.joined(products), weight.shape[2] + BIAS_ROUNDINGS, x.dtype)

    def dgrad(self, g: Running, weight: Tensor) -> tuple[Running, Product]:
        """g W."""
        layer = replace(self, precision=self.precision.of("dgrad"))
        pairs = zip(layer._factors(g, "grad_output", "dgrad"), layer.precision.weights(weight, "dgrad"), strict=True)
        product = Product.joined([Product.of(rows, matrix.transposed) for rows, matrix in pairs])
        return layer._running(product, weight.shape[1], g.dtype)

    def wgrad(self, g: Running, x: Running) -> tuple[Running, Product]:
        """Σ gᵀ x per expert."""
        layer = replace(self, precision=self.precision.of("wgrad"))
        pairs = zip(layer._factors(g, "grad_output", "wgrad"), layer._factors(x, "input", "wgrad"), strict=True)
        products = [Product.of(d_out_factor.transposed, rows_factor.transposed) for d_out_factor, rows_factor in pairs]
        return layer._running(Product.joined(products, stack=True), int(self.counts_L.max()), g.dtype)

    def _factors(self, x: Running, role: str, gemm: str) -> list[Factor]:
        """Each expert's rows as a GEMM operand."""
        if not x.error.any():
            return self.precision.rows(x.value.to(self.storage), self.counts_L, role, gemm)
        return self.precision.inexact_rows(x, self.counts_L, role, gemm, self.storage)

    def _running(self, product: Product, terms: int, dtype: torch.dtype) -> tuple[Running, Product]:
        return product.running(terms, dtype, self.precision.accumulator, self.precision.roundings), product
