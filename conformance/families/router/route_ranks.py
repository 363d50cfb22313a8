"""route on real ranks, each with different tokens.

A case has one rank per count; `ranks` consecutive ranks share a sequence. `route` and
`finish_batch` get real groups: the case's process group, or a subset of its ranks.
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
from moe_ref.config import RankGroup, RouterRanks
from moe_ref.dispatch.ranks import Sum, play

SAME = ("losses", "expert_bias", "global_tokens_per_expert", "global_steps")  # equal on all ranks


@dataclass(frozen=True)
class Members:
    """A rank's groups as member lists, resolved to process groups when the call runs."""

    sequence: tuple[int, ...]  # the ranks that share a sequence
    batch: tuple[int, ...]  # the ranks that share the batch

    def groups(self, over: Callable[[tuple[int, ...]], Sum]) -> RouterRanks:
        """The groups, with sums by `over`."""
        return RouterRanks(*(RankGroup(len(ranks), over(ranks)) for ranks in (self.sequence, self.batch)))


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
            members = Members(every[first : first + case.ranks], every)
            calls.append(replace(call, settings=call.settings | {"ranks": members}))
        return calls

    def right_at(
        self, rank: int, case: RouteCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        """The reference, run on all ranks at once, one thread per rank."""

        def at(rank: int, over: Callable[[Any], Sum]) -> Played:
            settings = calls[rank].settings
            groups = {"ranks": settings["ranks"].groups(over)}
            return self.route.played(case, replace(calls[rank], settings=settings | groups))

        played = play(len(calls), at)
        every = [self.route.forwards(case, call, one, declared) for call, one in zip(calls, played, strict=True)]
        sequence = [every[member] for member in calls[rank].settings["ranks"].sequence]
        return self.route.judged(played[rank], every[rank], sequence, every)

    def connected(self, call: Problem, place: RankContext) -> Problem:
        if "ranks" not in call.settings:
            return call
        groups = call.settings["ranks"].groups(lambda ranks: summed(ranks, place))
        return replace(call, settings=call.settings | {"ranks": groups})

    def together(self, case: RouteCase) -> tuple[Problem, RouteCase]:
        whole = self.alone.legal(case)
        settings = {name: x for name, x in whole.settings.items() if name != "ranks"}
        return replace(whole, settings=settings), replace(case, ranks=1)


def summed(ranks: tuple[int, ...], place: RankContext) -> Sum:
    """The sum of a tensor over these ranks, which include the caller.

    Ranks that share a GPU reach each other over gloo, whose messages are tensors of the CPU.
    """

    def over_ranks(x: Tensor) -> Tensor:
        local = x.detach().to("cpu" if place.shares_gpu else x.device, copy=True)
        if len(ranks) == place.ranks:
            dist.all_reduce(local, group=place.group)
            return local.to(x.device)
        parts = {rank: local if rank == place.rank else torch.empty_like(local) for rank in ranks}
        others = [rank for rank in ranks if rank != place.rank]
        pairs = [
            dist.P2POp(move, buffer, group=place.group, group_peer=rank)
            for rank in others
            for move, buffer in ((dist.isend, local), (dist.irecv, parts[rank]))
        ]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()
        total = torch.stack(list(parts.values())).sum(0)  # in rank order: bitwise equal on all ranks
        return total.to(x.device)

    return over_ranks
