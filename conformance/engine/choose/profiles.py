"""Amounts of testing: smoke takes seconds, gate precedes a merge, nightly fills a night."""

from dataclasses import dataclass

from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of


def weight_of(function: str) -> float:
    """The function's share of a run, relative to 1."""
    return scope_of(function, Space()).weight


@dataclass(frozen=True)
class Profile:
    """Counts of a profile."""

    name: str
    drawn: int  # drawn cases per function, times its weight
    shards: int  # parts of a function's drawn cases, distributed over workers
    covering: bool  # whether covering arrays run
    least: int  # informative cases required per offered function, times its weight
    unsupported: float  # largest share of a function's cases declared unsupported
    reduce_seconds: float  # for the smallest case of one failure

    def count(self, function: str) -> int:
        """Drawn cases of one shard of a function."""
        return int(-(-self.drawn * weight_of(function) // self.shards))

    def minimum(self, function: str) -> int:
        return int(self.least * weight_of(function))


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("smoke", drawn=6, shards=1, covering=False, least=3, unsupported=0.5, reduce_seconds=5),
        Profile("gate", drawn=60, shards=3, covering=True, least=40, unsupported=0.5, reduce_seconds=12),
        Profile("nightly", drawn=1500, shards=12, covering=True, least=800, unsupported=0.5, reduce_seconds=60),
    )
}
