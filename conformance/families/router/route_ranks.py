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

    def groups(self, sum_over: Callable[[tuple[int, ...]], Sum]) -> RouterRanks:
        """The groups, with sums by `sum_over`."""
        return RouterRanks(*(RankGroup(len(ranks), sum_over(ranks)) for ranks in (self.sequence, self.batch)))


class RouteOverRanks(SharedOut[RouteCase]):
    """`route`, `finish_batch` and the state between them, in one process or on several ranks."""

    def __init__(self) -> None:
        self.route = Route()
        super().__init__(self.route, sums=(*LOSSES, "tokens_per_expert"), same=SAME)

    def calls(self, case: RouteCase) -> list[Problem]:
        all_ranks = tuple(range(len(case.counts)))
        calls = []
        for rank, call in enumerate(super().calls(case)):
            first = rank // case.ranks * case.ranks
            members = Members(all_ranks[first : first + case.ranks], all_ranks)
            calls.append(replace(call, settings=call.settings | {"ranks": members}))
        return calls

    def right_at(
        self, rank: int, case: RouteCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        """The reference, run on all ranks at once, one thread per rank."""

        def at(rank: int, sum_over: Callable[[Any], Sum]) -> Played:
            settings = calls[rank].settings
            groups = {"ranks": settings["ranks"].groups(sum_over)}
            return self.route.played(case, replace(calls[rank], settings=settings | groups))

        played = play(len(calls), at)
        steps_of_ranks = [
            self.route.forwards(case, call, rank_played, declared)
            for call, rank_played in zip(calls, played, strict=True)
        ]
        sequence = [steps_of_ranks[member] for member in calls[rank].settings["ranks"].sequence]
        return self.route.judged(played[rank], steps_of_ranks[rank], sequence, steps_of_ranks)

    def connected(self, call: Problem, context: RankContext) -> Problem:
        if "ranks" not in call.settings:
            return call
        groups = call.settings["ranks"].groups(lambda ranks: summed(ranks, context))
        return replace(call, settings=call.settings | {"ranks": groups})

    def together(self, case: RouteCase) -> tuple[Problem, RouteCase]:
        whole_call = self.alone.legal(case)
        settings = {name: x for name, x in whole_call.settings.items() if name != "ranks"}
        return replace(whole_call, settings=settings), replace(case, ranks=1)


def summed(ranks: tuple[int, ...], context: RankContext) -> Sum:
    """The sum of a tensor over these ranks, which include the caller.

    Ranks that share a GPU reach each other over gloo, whose messages are tensors of the CPU.
    """

    def over_ranks(x: Tensor) -> Tensor:
        local = x.detach().to("cpu" if context.shares_gpu else x.device, copy=True)
        if len(ranks) == context.ranks:
            dist.all_reduce(local, group=context.group)
            return local.to(x.device)
        shares = {rank: local if rank == context.rank else torch.empty_like(local) for rank in ranks}
        peers = [rank for rank in ranks if rank != context.rank]
        pairs = [
            dist.P2POp(move, buffer, group=context.group, group_peer=rank)
            for rank in peers
            for move, buffer in ((dist.isend, local), (dist.irecv, shares[rank]))
        ]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()
        total = torch.stack(list(shares.values())).sum(0)  # in rank order: bitwise equal on all ranks
        return total.to(x.device)

    return over_ranks
