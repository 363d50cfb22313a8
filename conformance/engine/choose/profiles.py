"""Amounts of testing: smoke takes seconds, gate precedes a merge, nightly fills a night.

On a GPU nearly all time goes to compilation, on a CPU to the interpreter. So a GPU gets fewer
structures, which are compiled, and many cases of each: see `conformance.core.axes`.
"""

from dataclasses import dataclass

from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of

EVERY = 10**6  # more rows than a covering array has


def weight_of(function: str) -> float:
    """The function's share of a run, relative to 1."""
    return scope_of(function, Space()).weight


def compiles(function: str, space: Space) -> bool:
    """Whether calls of the function compile kernels for a device."""
    return space.device == "cuda" and scope_of(function, space).contract.shapes.kernels


@dataclass(frozen=True)
class Amount:
    """What runs of each function; counts are relative to its weight."""

    drawn: int  # the number of random structures
    rows: int  # the number of structures of the covering array, at most
    cases: int  # cases of each structure
    share: float = 1.0  # the share of the array's pairs that is enough
    few_kernels: bool = False  # see `Space`

    def structures(self, function: str) -> int:
        return int(-(-self.drawn * weight_of(function) // 1))

    def covering(self, function: str) -> int:
        """Rows of one covering array: of an expensive function at least two thirds."""
        return int(self.rows * max(weight_of(function), 2 / 3))


@dataclass(frozen=True)
class Profile:
    """Counts of a profile."""

    name: str
    interpreted: Amount
    compiled: Amount
    shapes: bool  # whether shapes that always run, and far addresses, run
    least: int  # informative cases required per offered function, times its weight
    unsupported: float  # largest share of a function's cases declared unsupported
    reduce_seconds: float  # for the smallest case of one failure

    def minimum(self, function: str) -> int:
        return int(self.least * weight_of(function))

    def amount(self, function: str, space: Space) -> Amount:
        """The amounts of a function.

        A function that compiles no kernels has the amounts of a CPU.
        """
        return self.compiled if compiles(function, space) else self.interpreted

    def judges_model_sizes(self, function: str, space: Space) -> bool:
        """Whether cases at the sizes of released models run, whose kernels small cases may lack."""
        return self.shapes and compiles(function, space)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("smoke", Amount(6, 0, 1), Amount(1, 0, 12, few_kernels=True), False, 3, 0.5, 5),
        Profile("gate", Amount(60, EVERY, 1), Amount(1, 9, 17, 0.9, True), True, 40, 0.5, 12),
        Profile("nightly", Amount(1500, EVERY, 1), Amount(120, EVERY, 14), True, 800, 0.5, 60),
    )
}
