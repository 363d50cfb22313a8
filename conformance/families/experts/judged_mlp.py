"""Bounds on the outputs of two-layer experts by running error analysis; large outputs in high
precision are also compared with the reference's error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import Call, final_bound
from conformance.analysis.products import Product, experts_of_rows
from conformance.analysis.running import Running
from conformance.core.contract import Problem
from conformance.judge import Bounded, Expectation
from conformance.judge.ratios import LEAST_ELEMENTS, row_wise


@dataclass(frozen=True)
class Judged:
    """The expectations of the outputs, in the order of the rows."""

    call: Call
    rows: int  # tail included
    counts_L: Tensor  # rows per expert, without padding
    lost: Tensor  # rows with a NaN or an infinity: results that depend on them are unspecified
    reference: Callable[[], Mapping[str, Tensor]]  # same precision
    terms: int  # the sum over all stages
    overflows: bool = False  # whether stages overflow for these values: then there are no ratios

    @property
    def lost_experts(self) -> Tensor:
        return torch.stack([lost.any() for lost in self.lost.split(self.counts_L.tolist())])

    def by_row(
        self,
        name: str,
        x: Running,
        dtype: torch.dtype,
        product: Product | None = None,
        inherited: Callable[[], Tensor] | None = None,
    ) -> Expectation:
        """The expectation of an output with one value per row, which is zero in the tail.

        The output of a product has ratios, and errors that it inherits.
        """
        expected = final_bound(x, dtype, self.lost.reshape(-1, *[1] * (x.value.dim() - 1)))
        missing = torch.zeros((self.rows - len(self.lost), *x.value.shape[1:]), dtype=torch.float64)
        expected = replace(
            expected, value=torch.cat([expected.value, missing]), bound=torch.cat([expected.bound, missing])
        )
        if product is None or inherited is None or not self.has_ratios(expected):
            return expected
        errors = torch.cat([inherited(), missing])
        return self.compared(name, expected, torch.cat([product.magnitude, missing]), product.terms, errors)

    def by_expert(
        self,
        name: str,
        x: Running,
        dtype: torch.dtype,
        product: Product | None = None,
        inherited: Callable[[], Tensor] | None = None,
        unspecified: Tensor | None = None,
    ) -> Expectation:
        """The expectation of an output with one value per expert, which is summed over the expert's
        rows.
        """
        lost = self.lost_experts if unspecified is None else unspecified
        expected = final_bound(x, dtype, lost.reshape(-1, *[1] * (x.value.dim() - 1)))
        if product is None or inherited is None or not self.has_ratios(expected):
            return expected
        return self.compared(name, expected, product.magnitude, product.terms, inherited())

    def has_ratios(self, expected: Bounded) -> bool:
        """Whether an output is large enough for error ratios, and in high precision."""
        low = self.call.low is not None or self.overflows
        return not low and expected.value.numel() >= LEAST_ELEMENTS and expected.dtype != torch.float64

    def compared(self, name: str, expected: Bounded, magnitude: Tensor, terms: int, inherited: Tensor) -> Expectation:
        """The expectation, extended by error ratios. The noise covers all stages."""
        shape = expected.value.shape[:-1]
        groups = (
            experts_of_rows(self.counts_L, shape[0])
            if len(shape) == 1
            else torch.arange(shape[0])[:, None].expand(shape)
        )
        all_terms = max(terms, 1) + self.terms
        walk = magnitude * (all_terms / max(terms, 1)) ** 0.5
        return row_wise(
            expected,
            self.reference()[name],
            walk,
            all_terms,
            accumulator=self.call.accumulator,
            groups=groups,
            inherited=inherited,
        )


def in_reference(function: Callable[..., Tensor], problem: Problem) -> Callable[[], Mapping[str, Tensor]]:
    """The reference's output and gradients, computed once."""
    outputs: dict[str, Tensor] = {}

    def run() -> Mapping[str, Tensor]:
        if not outputs:
            inputs = {
                name: x.clone().requires_grad_() if name in problem.wanted else x
                for name, x in (problem.required | problem.settings).items()
            }
            out = function(
                *(inputs[name] for name in problem.required), **{name: inputs[name] for name in problem.settings}
            )
            outputs["out"] = out.detach()
            if problem.wanted:
                gradients = torch.autograd.grad(
                    out, [inputs[name] for name in problem.wanted], problem.cotangents["out"]
                )
                outputs.update({f"d_{name}": x for name, x in zip(problem.wanted, gradients, strict=True)})
        return outputs

    return run


def or_not_finite(expectations: dict[str, Expectation], marked: dict[str, Expectation]) -> dict[str, Expectation]:
    """The expectations, with NaN and infinities right too where `marked` has an infinite bound.

    There a result depends on a stage that overflows in the rows' dtype. An implementation that
    keeps it in a wider one has the right number; no other number is right.
    """
    lenient: dict[str, Expectation] = {}
    for name, x in expectations.items():
        depends = marked[name]
        assert isinstance(x, Bounded) and isinstance(depends, Bounded)
        lenient[name] = replace(x, spoilt=~depends.bound.isfinite())
    return lenient


@dataclass(frozen=True)
class Padding:
    """Rows of zeros after each expert's rows."""

    counts_L: Tensor  # padding included
    kept: Tensor  # bool: rows that are not padding

    @classmethod
    def of(cls, counts_L: Tensor, align: int) -> "Padding":
        padded = -(-counts_L // align) * align
        row_masks = [
            torch.arange(padded_count) < count
            for padded_count, count in zip(padded.tolist(), counts_L.tolist(), strict=True)
        ]
        return cls(padded, torch.cat(row_masks))

    def pad(self, x_P: Tensor) -> Tensor:
        padded_rows = x_P.new_zeros((len(self.kept), *x_P.shape[1:]))
        padded_rows[self.kept] = x_P
        return padded_rows

    def trim(self, x: Running) -> Running:
        return Running(x.value[self.kept], x.error[self.kept], x.dtype)
