"""What a contract is of a function that the ranks of a world call together, each with its own part of the inputs.

A case says what all ranks have. Every rank makes all of it from the case, asks the reference for what is right on all of them, and
judges its own part.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic
from zlib import crc32

from conformance.core.case import Case
from conformance.core.contract import C, Contract, Problem, expanded
from conformance.judge import Expectation
from conformance.judge.exact import bits

Worldwide = tuple[
    list[Problem], list[dict[str, Expectation]]
]  # a golden case: each rank's call, and what is right there


@dataclass
class RankContext:
    """Which rank this process is, and whom it calls with."""

    rank: int
    ranks: int
    group: Any = None  # the process group of these ranks
    agree: Callable[[bool], bool] = lambda fine: fine  # whether all ranks say so; every rank of the case must ask
    seen: list[int] = field(default_factory=list)  # digests of what this rank has made of the cases: equal on all ranks


class Ranked(Contract[C]):
    """What ranks call together, if the case says that there are any. Outside of a world it looks as rank 0 sees it."""

    worldwide: dict[str, Worldwide] = {}  # noqa: RUF012  (golden cases; filled once, where the contract is registered)

    @abstractmethod
    def ranks(self, case: C) -> int:
        """How many ranks the case has, 0 if one process calls alone; of a golden one, `ranks_of` knows."""

    @abstractmethod
    def calls(self, case: C) -> list[Problem]:
        """What each rank calls, by the rules."""

    @abstractmethod
    def right(self, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        """The right outputs and gradients of each rank."""

    def right_at(self, rank: int, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> dict[str, Expectation]:
        """Those of one rank, for which not all that is right on the others may have to be found."""
        return self.right(case, calls, declared)[rank]

    def connected(self, call: Problem, place: RankContext) -> Problem:
        """A rank's call, with what it speaks to the others through."""
        return call


class Collective(Ranked[C]):
    """Inputs, expected outputs and laws of a function that only ranks call, with a group."""

    def connected(self, call: Problem, place: RankContext) -> Problem:
        chain = (
            replace(call.producer, settings=call.producer.settings | {"group": place.group}) if call.producer else None
        )
        return replace(call, settings=call.settings | {"group": place.group}, producer=chain)

    def legal(self, case: C) -> Problem:
        return self.calls(case)[0]

    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.right(case, self.calls(case), declared)[0]


class AtRank(Contract[C], Generic[C]):
    """A collective contract as one rank sees it: its own call, with the group, and what is right there."""

    def __init__(self, whole: Ranked[C], place: RankContext) -> None:
        self.whole, self.place = whole, place
        self._made: dict[C, list[Problem]] = {}
        self.adopt(whole)
        self.laws, self.illegal = whole.laws, whole.illegal
        self.golden = {
            name: (self.own(calls), right[place.rank])
            for name, (calls, right) in whole.worldwide.items()
            if len(calls) == place.ranks
        }

    def legal(self, case: C) -> Problem:
        calls = self.calls(case)
        self.place.seen.append(hash(tuple(digest(call) for call in calls)))
        return self.own(calls)

    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.whole.right_at(self.place.rank, case, self.calls(case), declared)

    def calls(self, case: C) -> list[Problem]:
        """What each rank calls. They are made once for the call and for what is right of it."""
        if case not in self._made:
            self._made = {case: [expanded(call) for call in self.whole.calls(case)]}
        return self._made[case]

    def own(self, calls: list[Problem]) -> Problem:
        """This rank's call, connected to the others."""
        return self.whole.connected(calls[self.place.rank], self.place)


def digest(call: Problem) -> int:
    """A number that differs where the call's tensors do, in this process or in another."""
    return crc32(
        b"".join(name.encode() + bits(x).tobytes() for name, x in sorted((call.tensors | call.cotangents).items()))
    )


def ranks_of(contract: Contract[Any], case: Case) -> int:
    """How many ranks call together; 0 where one process calls alone."""
    if isinstance(contract, Collective) and case.golden:
        return len(contract.worldwide[case.golden][0])
    return contract.ranks(case) if isinstance(contract, Ranked) else 0
