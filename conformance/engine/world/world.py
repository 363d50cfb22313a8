"""The parent's view of a world: sends each rank the case, and merges the ranks' outcomes.

If a rank dies, hangs or raises while others wait for it, the outcome names this rank, all ranks are
ended, and the next case gets a new world.
"""

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from operator import ne
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.patience import LOOK_SECONDS, CaseClock, Patience
from conformance.engine.child.processes import ended, received
from conformance.engine.child.sanitizer import explained
from conformance.engine.child.tuned import joined
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import MEETING_SECONDS
from conformance.engine.world.torchrun import RemoteRank

# seconds, by the clock of the case
GRACE_SECONDS = 4.0  # seconds for the other ranks once one has failed: they may wait for it forever
SILENCE_SECONDS = 0.3  # seconds for the others, all inside calls, once one has raised or died
ANSWER_SECONDS = 2.0  # seconds for the outcome of a rank that has judged its values
BAD = ("ERROR", "CRASH", "FAIL", "HANG", "OOM", "BLOCKED")
WORST_FIRST = (*BAD, "NOT_OFFERED", "DECLARED_UNSUPPORTED", "PASS", "UNINFORMATIVE")


class NoWorld(Exception):
    """The world did not form; the message names the rank at fault."""


Process = LocalRank | RemoteRank


@dataclass
class Member:
    """One rank, and its messages about the case."""

    rank: int
    process: Process
    outcome: Outcome | None = None
    seen: list[int] = field(default_factory=list)
    asking: bool | None = None  # its "agree", while waiting for the answer
    calling: str = ""  # the implementation's function called last
    heard: float = 0.0  # when it last sent a message, or was sent an answer, by the clock of the case

    @property
    def failed(self) -> bool:
        return bool(self.outcome and self.outcome.status in BAD)

    @property
    def left(self) -> bool:
        """Whether it left its call by an exception or died in it; other ranks may wait for it."""
        finding = self.outcome.finding if self.outcome else None
        return self.failed and (not finding or finding["output"] == "call")

    @property
    def pipe(self) -> Any:
        return self.process.pipe

    def within(self, case: Case) -> str:
        """The function called last, such as the dispatch before a combine, as " in …"."""
        return f" in {self.calling}" if self.calling not in ("", case.function) else ""


class World:
    """Ranks of one implementation; a case with fewer ranks runs on the first ones.

    Args:
        start: starts the process of every rank.
        patience: the time limit of a case.
    """

    def __init__(self, start: Callable[[], list[Process]], patience: Patience) -> None:
        self._start, self._patience = start, patience
        self._members: list[Member] = []
        self._clock = CaseClock([])
        self.ran: list[Case] = []  # the cases since the world formed, the last one too
        self._closing = threading.Lock()

    def run(self, case: Case, alone: bool = False) -> Outcome:
        """The case on the first ranks. The calls before it run first, whatever they do; only if one
        ends the ranks, the case does not run.

        Args:
            alone: no other case runs meanwhile; the case has a longer limit.
        """
        self.ran = [*self.ran, case] if self._members else [case]
        for index, earlier in enumerate(case.before):
            outcome = self._run_one(earlier, alone)
            if not self._members:
                message = outcome.reason or (outcome.finding or {}).get("message", "")
                return Outcome("NOT_RUN", reason=f"before[{index}] ended the ranks: {message}")
        return self._run_one(case, alone)

    def _run_one(self, case: Case, is_only: bool) -> Outcome:
        try:
            if not self._members:
                self._form()
        except NoWorld as error:
            self.close()
            return Outcome("ERROR", reason=str(error))
        members = self._members[: ranks_of(CONTRACTS[case.function], case)]
        self._clock = self._clock_of(members)
        for member in members:
            member.outcome, member.seen, member.asking, member.calling, member.heard = None, [], None, "", 0.0
            # it died between two cases: see `_hear`
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.pipe.send([replace(case, before=())])
        limit = self._patience.allowed(case.function, is_only)
        silent = self._listen(members, limit)
        if not silent:
            self._patience.answered(self._clock.seconds)
        outcome = self._combined(case, members, silent, limit, is_only)
        if silent or any(member.outcome and member.outcome.status in ("CRASH", "OOM") for member in members):
            self.close()
        return outcome

    def close(self) -> None:
        """End every rank; nothing is left running. Any thread may call it."""
        with self._closing:
            members, self._members = self._members, []
            for member in members:
                member.process.end()

    @staticmethod
    def _clock_of(members: list[Member]) -> CaseClock:
        return CaseClock([pid for member in members if (pid := member.process.pid) is not None])

    # ---- forming the world

    def _form(self) -> None:
        self._members = [Member(rank, process) for rank, process in enumerate(self._start())]
        self._clock = self._clock_of(self._members)
        descriptions = [self._message_of(member, "ready") for member in self._members]
        for member, description in zip(self._members, descriptions, strict=True):
            different = [key for key in ("functions", "versions") if description[key] != descriptions[0][key]]
            if different:
                differs = f"rank {member.rank} differs from rank 0 in its {' and '.join(different)}"
                raise NoWorld(f"{differs}: all ranks must run the same implementation")
        for member in self._members:
            self._message_of(member, "formed")

    def _message_of(self, member: Member, wanted: str) -> Any:
        """The next message of a rank that is starting."""
        name = f"rank {member.rank} of {len(self._members)}"
        try:
            while not member.pipe.poll(LOOK_SECONDS):
                if self._clock.passed(2 * MEETING_SECONDS):
                    limit = f"{2 * MEETING_SECONDS:.0f} s ({self._clock.told})"
                    raise NoWorld(f"{name} was not {wanted} within {limit}")
            kind, content = received(member.pipe)
        except EOFError as error:
            reason = str(error) or member.process.ending()
            raise NoWorld(f"{name} died while the world was forming ({reason})") from None
        if kind != wanted:
            raise NoWorld(f"{name} cannot join: {content}")
        return content

    # ---- one case

    def _listen(self, members: list[Member], limit: float) -> list[Member]:
        """Receive messages until every rank has an outcome; returns the ranks without one in time.

        A rank that has judged its values sends "agree". Once one sends False, ranks that have not
        sent "agree" may be waiting for it: they get GRACE_SECONDS, and it gets its answer. Once one
        has raised, they get SILENCE_SECONDS since the last message of any rank.
        """
        while waiting := [member for member in members if member.outcome is None]:
            ready = connection.wait([member.pipe for member in waiting], timeout=LOOK_SECONDS)
            for member in waiting:
                if member.pipe in ready:
                    self._hear(member)
                elif not member.process.alive() and not member.pipe.poll():
                    self._lose(member)  # another process that it has started holds the pipe open
            if all(member.outcome or member.asking is not None for member in members):
                self._answer(members, all(member.asking for member in members))
            elif self._clock.passed(min(limit, end_of_silence(members))):
                if not self._answer(members, False):
                    return [member for member in members if member.outcome is None]
                limit = self._clock.seconds + ANSWER_SECONDS
            elif any(member.asking is False or member.failed for member in members):
                limit = min(limit, self._clock.seconds + GRACE_SECONDS)
        return []

    def _answer(self, members: list[Member], agreed: bool) -> bool:
        """Answer the ranks waiting on "agree"; returns whether there were any."""
        asking = [member for member in members if member.asking is not None]
        for member in asking:
            member.asking, member.heard = None, self._clock.seconds
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.pipe.send(agreed)
        return bool(asking)

    def _hear(self, member: Member) -> None:
        member.heard = self._clock.seconds
        try:
            kind, content, *digests = received(member.pipe)
        except EOFError as error:
            self._lose(member, str(error))
            return
        if kind == "calls":
            member.calling = content
        elif kind == "agree":
            member.asking = content
        else:
            member.outcome, member.seen = explained(Outcome(**content)), digests[0]

    def _lose(self, member: Member, reason: str = "") -> None:
        """Note that the rank sends no more messages."""
        member.asking, member.outcome = None, ended(reason or member.process.ending())

    def _combined(
        self, case: Case, members: list[Member], silent: list[Member], limit: float, is_only: bool
    ) -> Outcome:
        """The worst outcome of all ranks, with its rank's name."""
        outcomes = [(member, member.outcome) for member in members if member.outcome]
        failed = any(outcome.status in BAD for _, outcome in outcomes)
        if silent and not failed:
            where = [f"rank {member.rank}{member.within(case)}{member.process.where()}" for member in silent]
            location = f" from {'; '.join(where)}"
            return Outcome("HANG", reason=self._patience.hangs(case.function, self._clock, limit, is_only, location))
        worst, outcome = min(outcomes, key=lambda pair: (WORST_FIRST.index(pair[1].status), pair[0].rank))
        # after a failure, only the inputs that both ranks have generated are compared
        first = members[0].seen
        for member in members:
            if any(map(ne, member.seen, first)) or (not failed and len(member.seen) != len(first)):
                differing = f"rank {member.rank} made other inputs of the case than rank 0"
                reason = f"{differing}: all ranks must run the same suite"
                return replace(outcome, status="ERROR", reason=reason, finding=None)
        different = [member.rank for member, rank_outcome in outcomes if rank_outcome.status != outcome.status]
        if outcome.status in ("NOT_OFFERED", "DECLARED_UNSUPPORTED") and different:
            message = f"{outcome.reason}, says rank {worst.rank} of {len(members)}; rank {different[0]} disagrees"
            finding = {"output": "supports", "check": "ranks", "message": message, "index": ()}
            return replace(outcome, status="FAIL", reason="", finding=finding)
        ranks = [rank_outcome for _, rank_outcome in outcomes]
        largest = ("seconds", "seconds_implementation", "seconds_reference", "evaluations", "shares_gpu")
        listed = ("kernels", "configurations", "launched", "calls")
        joint: dict[str, Any] = {name: max(getattr(rank, name) for rank in ranks) for name in largest}
        joint |= {name: sorted({x for rank in ranks for x in getattr(rank, name)}) for name in listed}
        joint["descriptions"] = {name: x for rank in ranks for name, x in rank.descriptions.items()}
        joint["tuned"] = joined(rank.tuned for rank in ranks)
        joint["transport"] = next((rank.transport for rank in ranks if rank.transport), "")
        return replace(_named(outcome, case, worst, len(members), len(silent)), **joint)


def end_of_silence(members: list[Member]) -> float:
    """When ranks inside their calls are given up, as another has left its call; or infinity."""
    all_calling = all(member.calling for member in members if not member.outcome)
    if not all_calling or not any(member.left for member in members):
        return math.inf
    return max(member.heard for member in members) + SILENCE_SECONDS


def _named(outcome: Outcome, case: Case, member: Member, ranks: int, silent: int) -> Outcome:
    """A rank's outcome, its message prefixed with the rank's name."""
    name = f"rank {member.rank} of {ranks}" + (member.within(case) if outcome.status == "CRASH" else "")
    if outcome.finding:
        waited = f"; {silent} other{'s' * (silent > 1)} waited for it" if silent else ""
        if outcome.finding["output"] != "call":
            waited = ""
        return replace(outcome, finding=outcome.finding | {"message": f"{name}: {outcome.finding['message']}{waited}"})
    return replace(outcome, reason=f"{name}: {outcome.reason}") if outcome.status in BAD else outcome
