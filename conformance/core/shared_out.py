"""The contract of a one-process function whose batch is split over ranks.

The field `counts` of a case has the tokens of each rank. Each rank calls the function with its
slice of every per-token input, and with the same parameters. Per-token outputs equal those of one
process. Outputs that are summed over tokens, such as gradients of parameters, are partial sums of
the rank; an implementation must not reduce them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from conformance.core.axes import Changes, declared
from conformance.core.contract import C, Contract, Problem
from conformance.core.lists import Parts
from conformance.core.ranks import Ranked
from conformance.core.signature import Signature
from conformance.core.space import Space
from conformance.judge import Expectation

WORLDS = (2, 4, 2, 3, 1)  # likeliest first
MOST_TOKENS = 4  # per rank and sequence


@dataclass(kw_only=True)
class Counts(Parts):
    """Tokens per rank; empty: one process."""

    of: str = ""  # an input of the functions that may be sharded

    def live(self, signature: Signature) -> bool:
        return not self.of or self.of in signature.names

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """One process. The number of ranks is drawn by the space."""
        return st.just({self.name: self.default})


def counts(of: str = "") -> Any:
    return declared(Counts(default=(), total="tokens", of=of))


@st.composite
def worlds(draw: st.DrawFn, space: Space, multiple: int = 1, even: bool = False, least: int = 0) -> tuple[int, ...]:
    """Tokens per rank: multiples of `multiple`, equal if `even`."""
    ranks = draw(st.sampled_from([n for n in WORLDS if n <= space.most_ranks]))
    some = st.integers(least, MOST_TOKENS)
    counts = (draw(some),) * ranks if even else tuple(draw(some) for _ in range(ranks))
    return tuple(count * multiple for count in counts)


class SharedOut(Ranked[C]):
    """The one-process contract, and per rank for cases with counts."""

    def __init__(
        self,
        contract: Contract[C],
        weights: tuple[str, ...] = (),
        sums: tuple[str, ...] = (),
        same: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            contract: the one-process contract.
            weights: inputs equal on all ranks; the others have one row per token.
            sums: outputs summed over ranks (weight gradients); the others have one row per token.
            same: outputs equal on all ranks.
        """
        self.alone, self.weights, self.sums, self.same = contract, weights, (*weights, *sums), same
        self.adopt(contract)

    def ranks(self, case: Any) -> int:
        return len(case.counts)

    def calls(self, case: Any) -> list[Problem]:
        whole_call = self.alone.legal(case)
        return [_call_of_slices(whole_call, self._slicer(case, rank)) for rank in range(len(case.counts))]

    def _slicer(self, case: Any, rank: int) -> Callable[[str, Any], Any]:
        return lambda name, x: (
            x if name in self.weights or not isinstance(x, Tensor) else x.split(list(case.counts))[rank].clone()
        )

    def right(self, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        return [self.right_at(rank, case, calls, declared) for rank in range(len(calls))]

    def right_at(self, rank: int, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.alone.expected(case, calls[rank], declared)

    def together(self, case: C) -> tuple[Problem, C]:
        """The one-process call with all tokens, and the case of its expectations."""
        return self.alone.legal(case), case

    def legal(self, case: Any) -> Problem:
        return self.calls(case)[0] if case.counts else self.alone.legal(case)

    def expected(self, case: Any, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        if case.counts:
            return self.right_at(0, case, self.calls(case), declared)
        return self.alone.expected(case, problem, declared)

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        return self.alone.explain(problem, output, index, observed)


def _call_of_slices(whole_call: Problem, slice_of: Callable[[str, Any], Any]) -> Problem:
    """The call with a slice of each tensor."""
    slices = {
        name: {key: slice_of(key, x) for key, x in getattr(whole_call, name).items()}
        for name in ("required", "settings", "cotangents", "first")
    }
    return replace(whole_call, **slices)  # type: ignore[arg-type]
