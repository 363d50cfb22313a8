"""Judges a case by identities alone, where a sanitizer has made a ring of the floats.

Floats then have other values than the reference's, but sums, products and copies keep the laws of a
ring. So two runs that differ in the order of a sum give the same bits, and a term too many, too few
or rounded in between gives others, however small it is. Each algebraic law of the function is
checked on the implementation itself, without a tolerance.
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

# no literal case, which no law is about; a pending minus is torch's and changes the bits of a NaN
DRAWN = parsed("golden='' and illegal='' and layout!=negated", "literal cases")


@dataclass(frozen=True)
class Ring(Bounded):
    """The bits of another run, where the bound is not infinite."""

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
    """The cases of a function that identities judge; None: none of its laws is one."""
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
    """What another run must give: the bits of the first, where the reference says what they are.

    The tool changes no integers: they, and what is no such tensor, stay as they are expected.
    """
    expectations: dict[str, Expectation] = dict(expected)
    for name, expectation in expected.items():
        x = first.get(name)
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape == expectation.value.shape:
            bound = getattr(expectation, "bound", torch.zeros(x.shape, dtype=torch.float64))
            expectations[name] = Ring(x, bound, x.dtype, x.dtype)
    return expectations
