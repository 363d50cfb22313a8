"""What a contract is of a function that knows no ranks, where the tokens of a batch are shared out over several.

A case with `counts` says how many of its tokens each rank has. Every rank calls with its own rows of all that has a row for each token, and
with the same parameters as the others. What it gets for its tokens is right as it is alone. What is one for all tokens, the gradient of a
parameter above all, is its part of a sum over the ranks, which who trains takes: an implementation must not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from conformance.core.axes import Changes, declared
from conformance.core.contract import C, Contract, Problem, Signature
from conformance.core.lists import Parts
from conformance.core.ranks import Ranked
from conformance.judge import Expectation


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


class SharedOut(Ranked[C]):
    """The contract of one process; and, of a case with counts, each rank's."""

    def __init__(
        self, alone: Contract[C], weights: tuple[str, ...] = (), sums: tuple[str, ...] = (), same: tuple[str, ...] = ()
    ) -> None:
        """
        Args:
            alone: the contract of one process.
            weights: inputs that all ranks have alike; others have a row for each token.
            sums: outputs that are one for all tokens: the sum of the ranks', as gradients of weights are; others have a row for each token.
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

    def neighbour(self, case: Any) -> C:
        if self.signature:
            return super().neighbour(case)
        other: Any = self.alone.neighbour(replace(case, counts=()))
        return replace(other, counts=case.counts, tokens=case.tokens) if case.counts else other  # type: ignore[no-any-return]

    def simpler(self, case: Any) -> Iterator[C]:
        """One process; fewer ranks; fewer tokens; then what is simpler of one process."""
        if self.signature:
            yield from super().simpler(case)
            return
        if not case.counts:
            yield from self.alone.simpler(case)
            return
        yield replace(case, counts=(), law="")
        yield from filter(None, (_with_counts(case, counts) for counts in _fewer(case.counts)))
        for other in self.alone.simpler(replace(case, counts=())):
            plainer: Any = other
            if plainer.tokens == case.tokens and (found := _with_counts(plainer, case.counts)):
                yield found


def check_counts(counts: tuple[int, ...], tokens: int) -> None:
    """Raises ValueError unless the ranks' tokens are all there are."""
    if counts and (min(counts) < 0 or sum(counts) != tokens):
        raise ValueError(f"counts is {counts}; it must have numbers ≥ 0 that sum to tokens, {tokens}")


def _changed(whole: Problem, part: Callable[[str, Any], Any]) -> Problem:
    """The call with a part of each tensor."""
    parts = {
        name: {key: part(key, x) for key, x in getattr(whole, name).items()}
        for name in ("required", "settings", "cotangents", "first")
    }
    return replace(whole, **parts)  # type: ignore[arg-type]


def _fewer(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(counts) > 2:
        yield counts[:2]
    yield from (counts[:r] + counts[r + 1 :] for r in range(len(counts)) if len(counts) > 1)
    for least in (0, 1, 2):
        yield tuple(min(count, least) for count in counts)
    for r, count in enumerate(counts):
        yield from (
            (*counts[:r], size, *counts[r + 1 :])
            for size in sorted({0, 1, 2, count // 2, count - 1})
            if 0 <= size < count
        )


def _with_counts(case: Any, counts: tuple[int, ...]) -> Any:
    """The case with these tokens on each rank, or None if there is no such case."""
    with suppress(ValueError):
        other = replace(case, counts=counts, tokens=sum(counts))
        return other if other != case or counts != case.counts else None
    return None
