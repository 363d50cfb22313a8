"""The expectation of an output: the protocol that every check of this package implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Expectation(ABC):
    """The right results of one output; may depend on other outputs of the same call."""

    value: Tensor  # the reference's result

    @abstractmethod
    def resolve(self, outputs: Outputs) -> "Resolved":
        """The expectation given the outputs; its dependencies have been judged before."""


@dataclass(frozen=True)
class Given(Expectation):
    """An output judged given other outputs: weights, given the chosen experts."""

    make: Callable[[Outputs], "Resolved"]

    def resolve(self, outputs: Outputs) -> "Resolved":
        return self.make(outputs)


class Resolved(Expectation):
    """An expectation that judges an output by itself."""

    check: ClassVar[str]  # its name in a finding
    by_row: ClassVar[tuple[str, ...]] = ("value",)  # fields whose first dimension is the output's

    def resolve(self, outputs: Outputs) -> "Resolved":
        return self

    @property
    def honest(self) -> Tensor:
        """A right output."""
        return self.value

    @property
    def optional(self) -> bool:
        """Whether None is right as well."""
        return False

    @property
    def stages(self) -> tuple["Resolved", ...]:
        """The checks in order; a later stage assumes that the earlier stages pass."""
        return (self,)

    @abstractmethod
    def dtype_error(self, observed: Tensor) -> str | None:
        """The error in the dtype of `observed`, or None."""

    @abstractmethod
    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """True where `observed`, of the right shape and dtype, is wrong; None if nowhere."""

    @abstractmethod
    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong element, at `index`, and the number of wrong elements."""

    @abstractmethod
    def moved(self, corrupt: Tensor) -> bool:
        """Whether `corrupt` is not `honest`, by arithmetic independent of `wrong`."""

    def scores(self, observed: Tensor) -> dict[str, float]:
        """How near `observed` is to a wrong one, by kind of error; above 1 is wrong.

        Empty where a value is either right or wrong.
        """
        return {}

    def first(self, rows: int) -> "Resolved":
        """The expectation cropped to its first rows."""
        fields = {name: getattr(self, name) for name in self.by_row}
        return replace(self, **{name: x[:rows] for name, x in fields.items() if x is not None})
