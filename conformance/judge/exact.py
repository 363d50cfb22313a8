"""Level 0: data movement, without tolerance."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.expectation import Resolved

INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Exact(Resolved):
    """An output with one right value.

    Kinds: `bits`, the same bytes (NaN payloads and -0 included) and dtype · `values`, equal numbers
    and dtype, -0 equal to 0 · `integers`, equal values of any width, bool included. An all-zero
    `flag` may be absent, and so may anything with `or_none`.
    """

    kind: str = "bits"
    flag: bool = False
    or_none: bool = field(default=False, kw_only=True)

    check: ClassVar[str] = "exact"

    @property
    def optional(self) -> bool:
        return self.or_none or (self.kind == "integers" and self.flag and not bool(self.value.any()))

    def dtype_error(self, observed: Tensor) -> str | None:
        if self.kind == "integers":
            return None if observed.dtype in INTEGERS else f"has dtype {observed.dtype}; it must be bool or integer"
        return (
            None
            if observed.dtype == self.value.dtype
            else f"has dtype {observed.dtype}; the reference's is {self.value.dtype}"
        )

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        if self.kind == "integers":
            mismatches = self.value.to(torch.int64).numpy() != observed.to(torch.int64).numpy()
        else:
            mismatches = bits(self.value) != bits(observed)
            if self.kind == "values" and mismatches.any():
                expected, got = self.value.double().numpy(), observed.detach().double().numpy()
                mismatches = ~((expected == got) | (np.isnan(expected) & np.isnan(got)))
        return mismatches if mismatches.any() else None

    def moved(self, corrupt: Tensor) -> bool:
        if self.kind != "values":
            return bool((bits(self.value) != bits(corrupt)).any())
        expected, corrupted = self.value.double().numpy(), corrupt.double().numpy()  # where -0 is 0
        return bool(((expected != corrupted) & ~(np.isnan(expected) & np.isnan(corrupted))).any())

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong element, and the number of wrong elements."""
        got, expected = (_readable(x[index]) for x in (observed, self.value))
        if got == expected:  # NaNs, or zeros, with other bits
            got, expected = (
                f"{text} with bits {int(bits(x[index]).item()) & (1 << 8 * x.element_size()) - 1:#x}"
                for text, x in ((got, observed), (expected, self.value))
            )
        return (
            f"{list(index)} is {got}; the reference has {expected} ({int(mismatches.sum())} of {mismatches.size} wrong)"
        )


def _readable(x: Tensor) -> str:
    number = x.item() if x.element_size() > 1 or not x.is_floating_point() else x.float().item()
    return repr(number)


def bits(x: Tensor) -> np.ndarray:
    """The tensor's bytes as integers of its width."""
    return x.detach().contiguous().view(_CARRIER[x.element_size()]).numpy()
