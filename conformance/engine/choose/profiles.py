"""How much is tested: smoke in seconds, gate before a merge, nightly for as long as a night has."""

from dataclasses import dataclass

from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of


def weight_of(function: str) -> float:
    """How much of a run the function has."""
    return scope_of(function, Space()).weight


@dataclass(frozen=True)
class Profile:
    """Counts of a profile."""

    name: str
    drawn: int  # drawn cases of a function, times its weight
    # parts that the drawn cases of a function are split into, so that they can be spread over
    # workers
    shards: int
    covering: bool  # whether the covering arrays are run
    # informative cases of an offered function, times its weight, below which too little was tested
    least: int
    unsupported: float  # share of a function's cases that may be declared unsupported
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
