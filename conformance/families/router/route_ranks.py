"""route among real ranks: each has tokens of its own, and what is summed over ranks, is.

The ranks of a case are as many as it has counts; each `ranks` of them, one behind the other, share a sequence. The sums that `route` and
`finish_batch` are given are real: over the case's process group, or, of some of its ranks, between those alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.ranks import RankContext
from conformance.core.shared_out import SharedOut
from conformance.families.router.cases_route import LOSSES, RouteCase
from conformance.families.router.route import Route
from conformance.families.router.route_step import Played
from conformance.judge import Expectation
from moe_ref.dispatch.ranks import Sum, play

SUMS = ("sum_tp_cp", "sum_tp_dp_cp")
SAME = (
    "losses",
    "expert_bias",
    "global_tokens_per_expert",
    "global_steps",
)  # of what is told and of the state: on all ranks alike


@dataclass(frozen=True)
class Members:
    """Stands in a call for the sum over these ranks, until the call is made at a place in a world."""

    ranks: tuple[int, ...]


class RouteOverRanks(SharedOut[RouteCase]):
    """`route`, `finish_batch` and the state between them, in one process or on several ranks."""

    def __init__(self) -> None:
        self.route = Route()
        super().__init__(self.route, sums=(*LOSSES, "tokens_per_expert"), same=SAME)

    def calls(self, case: RouteCase) -> list[Problem]:
        every = tuple(range(len(case.counts)))
        calls = []
        for rank, call in enumerate(super().calls(case)):
            first = rank // case.ranks * case.ranks
            members = dict(zip(SUMS, (Members(every[first : first + case.ranks]), Members(every)), strict=True))
            calls.append(replace(call, settings=call.settings | members))
        return calls

    def right_at(
        self, rank: int, case: RouteCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        """By the reference on all ranks at once, each a thread."""

        def at(rank: int, over: Callable[[Any], Sum]) -> Played:
            settings = calls[rank].settings
            sums = {name: over(settings[name].ranks) for name in SUMS}
            return self.route.played(case, replace(calls[rank], settings=settings | sums))

        played = play(len(calls), at)
        every = [self.route.forwards(case, call, own, declared) for call, own in zip(calls, played, strict=True)]
        sequence = [every[member] for member in calls[rank].settings["sum_tp_cp"].ranks]
        return self.route.judged(played[rank], every[rank], sequence, every)

    def connected(self, call: Problem, place: RankContext) -> Problem:
        return replace(
            call,
            settings=call.settings
            | {name: summed(call.settings[name].ranks, place) for name in SUMS if name in call.settings},
        )

    def together(self, case: RouteCase) -> tuple[Problem, RouteCase]:
        whole = self.alone.legal(case)
        return replace(whole, settings={name: x for name, x in whole.settings.items() if name not in SUMS}), replace(
            case, ranks=1
        )


def summed(ranks: tuple[int, ...], place: RankContext) -> Sum:
    """The sum of a tensor over those ranks, this one among them."""

    def total(x: Tensor) -> Tensor:
        own = x.detach().clone()
        if len(ranks) == place.ranks:
            dist.all_reduce(own, group=place.group)
            return own
        given = {rank: own if rank == place.rank else torch.empty_like(own) for rank in ranks}
        others = [rank for rank in ranks if rank != place.rank]
        pairs = [
            dist.P2POp(move, buffer, rank, place.group)
            for rank in others
            for move, buffer in ((dist.isend, own), (dist.irecv, given[rank]))
        ]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()
        return torch.stack(list(given.values())).sum(0)  # in the order of the ranks, so that all have the same

    return total
