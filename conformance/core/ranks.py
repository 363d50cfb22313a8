"""Contracts of functions that several ranks call together, each rank with its share of the inputs.

A case describes the inputs of all ranks. Every rank generates all inputs, runs the reference for
all ranks, and judges its own outputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic
from zlib import crc32

from conformance.core.case import Case
from conformance.core.contract import C, Contract, Problem, shared
from conformance.judge import Expectation
from conformance.judge.exact import bits

Worldwide = tuple[list[Problem], list[dict[str, Expectation]]]  # a golden case: call and expectations of each rank


@dataclass
class RankContext:
    """This process's rank and its process group."""

    rank: int
    ranks: int
    group: Any = None  # the process group of these ranks
    agree: Callable[[bool], bool] = lambda fine: fine  # AND over all ranks: a collective
    seen: list[int] = field(default_factory=list)  # digests of generated calls: equal on all ranks
    gpus: int = 0  # of these ranks together; 0 on CPUs

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.gpus < self.ranks

    def transport(self, name: str = "") -> str:
        """How these ranks exchange data, by default as their group does, and on what."""
        if not self.gpus:
            return f"{name or 'gloo'} between CPUs"
        if self.shares_gpu:
            return f"{name or 'gloo'}, ranks share {'one GPU' if self.gpus == 1 else f'{self.gpus} GPUs'}"
        return f"{name or 'nccl'} over {self.ranks} GPUs"


class Ranked(Contract[C]):
    """A function that ranks call together if the case has several ranks.

    Outside a world it is judged as rank 0 sees it.
    """

    worldwide: dict[str, Worldwide] = {}  # noqa: RUF012  (golden cases; filled at registration)

    @abstractmethod
    def ranks(self, case: C) -> int:
        """The number of ranks, 0 for a single process; for a golden case see `ranks_of`."""

    @abstractmethod
    def calls(self, case: C) -> list[Problem]:
        """The legal call of each rank."""

    @abstractmethod
    def right(self, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        """The expected outputs and gradients of each rank."""

    def right_at(self, rank: int, case: C, calls: list[Problem], declared: Mapping[str, Any]) -> dict[str, Expectation]:
        """The expectations of one rank. The expectations of other ranks need not be computed."""
        return self.right(case, calls, declared)[rank]

    def connected(self, call: Problem, context: RankContext) -> Problem:
        """A rank's call, with its process group."""
        return call


class Collective(Ranked[C]):
    """Inputs, expected outputs and laws of a function that requires a process group."""

    def connected(self, call: Problem, context: RankContext) -> Problem:
        producer = self.connected(call.producer, context) if call.producer else None
        return replace(call, settings=call.settings | {"group": context.group}, producer=producer)

    def legal(self, case: C) -> Problem:
        return self.calls(case)[0]

    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.right(case, self.calls(case), declared)[0]


class AtRank(Contract[C], Generic[C]):
    """One rank's view of a collective contract: its call, with the group, and its expectations."""

    def __init__(self, all_ranks: Ranked[C], context: RankContext) -> None:
        self.whole, self.place = all_ranks, context
        self._made: dict[C, list[Problem]] = {}
        self.adopt(all_ranks)
        self.laws, self.illegal = all_ranks.laws, all_ranks.illegal
        self.golden = {
            name: (self.own(calls), expectations[context.rank])
            for name, (calls, expectations) in all_ranks.worldwide.items()
            if len(calls) == context.ranks
        }

    def legal(self, case: C) -> Problem:
        calls = self.calls(case)
        self.place.seen.append(hash(tuple(digest(call) for call in calls)))
        return self.own(calls)

    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        return self.whole.right_at(self.place.rank, case, self.calls(case), declared)

    def calls(self, case: C) -> list[Problem]:
        """The call of each rank, cached between `legal` and `expected`."""
        if case not in self._made:
            self._made = {case: [shared(call) for call in self.whole.calls(case)]}
        return self._made[case]

    def own(self, calls: list[Problem]) -> Problem:
        """This rank's call, with its process group."""
        return self.whole.connected(calls[self.place.rank], self.place)


def digest(call: Problem) -> int:
    """Checksum of the call's tensors, comparable across processes."""
    tensors = sorted((call.tensors | call.cotangents).items())
    return crc32(b"".join(name.encode() + bits(x).tobytes() for name, x in tensors))


def ranks_of(contract: Contract[Any], case: Case) -> int:
    """The number of ranks that call together; 0 for a single process."""
    if isinstance(contract, Collective) and case.golden:
        return len(contract.worldwide[case.golden][0])
    return contract.ranks(case) if isinstance(contract, Ranked) else 0
