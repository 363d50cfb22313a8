"""What a contract is of a function that knows no ranks, where the tokens of a batch are shared out over several.

A case with `counts` says how many of its tokens each rank has. Every rank calls with its own rows
of all that has a row for each token, and with the same parameters as the others. What it gets for
its tokens is right as it is alone. What is one for all tokens, the gradient of a parameter above
all, is its part of a sum over the ranks, which who trains takes: an implementation must not.
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

WORLDS = (2, 4, 2, 3, 1)  # the likeliest first
MOST_TOKENS = 4  # of a rank, times the sequences


@dataclass(kw_only=True)
class Counts(Parts):
    """Tokens of each of several ranks; empty: one process."""

    of: str = ""  # an input of the functions that ranks may share

    def live(self, signature: Signature) -> bool:
        return not self.of or self.of in signature.names

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """One process: how many ranks there may be is the space's."""
        return st.just({self.name: self.default})


def counts(of: str = "") -> Any:
    return declared(Counts(default=(), total="tokens", of=of))


@st.composite
def worlds(draw: st.DrawFn, space: Space, each: int = 1, even: bool = False, least: int = 0) -> tuple[int, ...]:
    """The tokens of each rank: multiples of `each`, equally many if they are to be even."""
    ranks = draw(st.sampled_from([n for n in WORLDS if n <= space.ranks]))
    some = st.integers(least, MOST_TOKENS)
    counts = (draw(some),) * ranks if even else tuple(draw(some) for _ in range(ranks))
    return tuple(count * each for count in counts)


class SharedOut(Ranked[C]):
    """The contract of one process; and, of a case with counts, each rank's."""

    def __init__(
        self, alone: Contract[C], weights: tuple[str, ...] = (), sums: tuple[str, ...] = (), same: tuple[str, ...] = ()
    ) -> None:
        """
        Args:
            alone: the contract of one process.
            weights: inputs that all ranks have alike; others have a row for each token.
            sums: outputs that are one for all tokens: the sum of the ranks', as gradients of
                weights are; others have a row for each token.
            same: outputs that all ranks have alike.
        """
        self.alone, self.weights, self.sums, self.same = alone, weights, (*weights, *sums), same
        self.adopt(alone)

    def ranks(self, case: Any) -> int:
        return len(case.counts)

    def calls(self, case: Any) -> list[Problem]:
        whole = self.alone.legal(case)
        return [_changed(whole, self._part(case, rank)) for rank in range(len(case.counts))]

    def _part(self, case: Any, rank: int) -> Callable[[str, Any], Any]:
        return lambda name, x: (
            x if name in self.weights or not isinstance(x, Tensor) else x.split(list(case.counts))[rank].clone()
        )

    def right(self, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        return [self.right_at(rank, case, calls, declared) for rank in range(len(calls))]

    def right_at(self, rank: int, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.alone.expected(case, calls[rank], declared)

    def together(self, case: C) -> tuple[Problem, C]:
        """The call of one process that has all tokens, and a case that says what is right of it."""
        return self.alone.legal(case), case

    def legal(self, case: Any) -> Problem:
        return self.calls(case)[0] if case.counts else self.alone.legal(case)

    def expected(self, case: Any, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return (
            self.right_at(0, case, self.calls(case), declared)
            if case.counts
            else self.alone.expected(case, problem, declared)
        )

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        return self.alone.explain(problem, output, index, observed)


def _changed(whole: Problem, part: Callable[[str, Any], Any]) -> Problem:
    """The call with a part of each tensor."""
    parts = {
        name: {key: part(key, x) for key, x in getattr(whole, name).items()}
        for name in ("required", "settings", "cotangents", "first")
    }
    return replace(whole, **parts)  # type: ignore[arg-type]
