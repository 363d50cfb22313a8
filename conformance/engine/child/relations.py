"""Judges a case by identities only, for a sanitizer that replaces the arithmetic of floats by a
ring. Floats then have other values than the reference's, but sums, products and copies keep the
laws of a ring. Two runs that differ in the order of a sum therefore give the same bits. A run with
one term too many or too few, or with a rounding in between, gives other bits, however small the
term is. Each algebraic law of the function is checked on the implementation itself, without a
tolerance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.law import Law
from conformance.core.where import Where, parsed
from conformance.judge import Bounded, Expectation
from conformance.judge.exact import bits

# no literal cases, which no law is about; torch applies a lazy minus itself, which changes the bits
# of NaNs
DRAWN = parsed("golden='' and illegal='' and layout!=negated", "literal cases")


@dataclass(frozen=True)
class Ring(Bounded):
    """Expects the bits of another run, except where the bound is infinite."""

    check: ClassVar[str] = "ring"

    def taken(self, rows: Tensor) -> "Ring":
        return Ring(self.value[rows], self.bound[rows], self.dtype, self.accumulator)

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        mismatches = (bits(self.value) != bits(observed)) & (self.bound.numpy() != np.inf)
        return mismatches if mismatches.any() else None

    @property
    def honest(self) -> Tensor:
        return self.value

    def moved(self, corrupt: Tensor) -> bool:
        return bool((np.not_equal(bits(self.value), bits(corrupt)) & (self.bound.numpy() != np.inf)).any())

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong element in bits, and the number of wrong elements."""
        pattern = (1 << 8 * observed.element_size()) - 1
        got, other_bits = (f"{int(bits(x[index]).item()) & pattern:#x}" for x in (observed, self.value))
        counts = f"({int(mismatches.sum())} of {mismatches.size} wrong)"
        return f"{list(index)} has bits {got} in a ring; the other run has {other_bits} {counts}"


def judged_where(contract: Any) -> Where | None:
    """The cases of a function that identities judge; None if none of its laws is an identity."""
    texts = {law.algebraic for law in contract.laws.values() if law.algebraic is not None}
    if not texts:
        return None
    return DRAWN & parsed(texts.pop() if len(texts) == 1 else "", contract.function)


def laws_of(contract: Any, case: Any, device: str) -> list[Law]:
    """The laws that are identities in this case."""
    return [
        law
        for law in contract.laws.values()
        if law.algebraic is not None
        and (DRAWN & parsed(law.algebraic, law.name)).holds(case)
        and law.holds(case, device)
    ]


def another_run(expected: Mapping[str, Expectation], first: Mapping[str, Any]) -> dict[str, Expectation]:
    """The expectations of another run: the bits of the first run, where the reference specifies
    them. The sanitizer changes no integers. They, and outputs that are no floating-point tensors,
    are expected as before.
    """
    expectations: dict[str, Expectation] = dict(expected)
    for name, expectation in expected.items():
        x = first.get(name)
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape == expectation.value.shape:
            bound = getattr(expectation, "bound", torch.zeros(x.shape, dtype=torch.float64))
            expectations[name] = Ring(x, bound, x.dtype, x.dtype)
    return expectations
