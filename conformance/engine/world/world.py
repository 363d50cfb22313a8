"""A world of ranks, from outside: gives each rank the case, hears what became of it there, and makes one outcome of that.

Ranks live as long as all is well. When one of them dies, hangs or raises while others wait for it, it is named, all of them are ended,
and the next case finds a new world.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any

from conformance.core.case import Case
from conformance.engine.child.processes import Patience
from conformance.engine.child.runner import Outcome
from conformance.engine.world.joined import RemoteRank
from conformance.engine.world.local_rank import LocalRank
from conformance.engine.world.rank import MEETING_SECONDS

GRACE_SECONDS = 4.0  # for the other ranks, once one has failed: they may be waiting for it for ever
ANSWER_SECONDS = 2.0  # for a rank that has judged its values to say what became of the case
WORST_FIRST = (
    "ERROR",
    "CRASH",
    "FAIL",
    "HANG",
    "OOM",
    "BLOCKED",
    "NOT_OFFERED",
    "DECLARED_UNSUPPORTED",
    "PASS",
    "UNINFORMATIVE",
)
BAD = WORST_FIRST[: WORST_FIRST.index("BLOCKED") + 1]


class NoWorld(Exception):
    """Ranks did not come together; the message is a sentence that names the one to blame."""


Held = LocalRank | RemoteRank


@dataclass
class Member:
    """One rank, and what it has said of the case."""

    rank: int
    held: Held
    outcome: Outcome | None = None
    seen: list[int] = field(default_factory=list)
    asking: bool | None = None  # what it wants the others to agree to
    calling: str = ""  # the last function of the implementation that it has called

    @property
    def pipe(self) -> Any:
        return self.held.pipe

    def within(self, case: Case) -> str:
        """Which other function than the case's it has called last, such as the dispatch that a combine comes after."""
        return f" in {self.calling}" if self.calling not in ("", case.function) else ""


class World:
    """Ranks of one implementation; a case of fewer is run by the first of them.

    Args:
        start: starts the process of every rank.
        patience: how long a case is waited for.
    """

    def __init__(self, start: Callable[[], list[Held]], patience: Patience) -> None:
        self._start, self._patience = start, patience
        self._members: list[Member] = []

    def run(self, case: Case, ranks: int) -> Outcome:
        """The case on the first ranks."""
        try:
            if not self._members:
                self._form()
        except NoWorld as error:
            self.close()
            return Outcome("ERROR", reason=str(error))
        members = self._members[:ranks]
        for member in members:
            member.outcome, member.seen, member.asking, member.calling = None, [], None, ""
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it died between two cases; listening finds out
                member.pipe.send(case)
        started = time.monotonic()
        silent = self._listen(members, started + self._patience.allowed(case.function))
        if not silent:
            self._patience.answered(time.monotonic() - started)
        outcome = self._together(case, members, silent, time.monotonic() - started)
        if silent or any(member.outcome and member.outcome.status == "CRASH" for member in members):
            self.close()
        return outcome

    def close(self) -> None:
        """End every rank; nothing is left running."""
        for member in self._members:
            member.held.end()
        self._members = []

    # ---- coming together

    def _form(self) -> None:
        self._members = [Member(rank, each) for rank, each in enumerate(self._start())]
        descriptions = [self._heard(member, "ready") for member in self._members]
        for member, description in zip(self._members, descriptions, strict=True):
            different = [key for key in ("functions", "versions") if description[key] != descriptions[0][key]]
            if different:
                raise NoWorld(
                    f"rank {member.rank} differs from rank 0 in its {' and '.join(different)}: all ranks must run the same implementation"
                )
        for member in self._members:
            self._heard(member, "formed")

    def _heard(self, member: Member, wanted: str) -> Any:
        """The next message of a rank that is starting."""
        name = f"rank {member.rank} of {len(self._members)}"
        try:
            if not member.pipe.poll(2 * MEETING_SECONDS):
                raise NoWorld(f"{name} was not {wanted} within {2 * MEETING_SECONDS:.0f} s")
            kind, content = member.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise NoWorld(f"{name} died while the world was forming ({member.held.manner()})") from None
        if kind != wanted:
            raise NoWorld(f"{name} cannot join: {content}")
        return content

    # ---- one case

    def _listen(self, members: list[Member], deadline: float) -> list[Member]:
        """Hear every rank out; returns those that have not answered in time.

        A rank that is done with the values asks whether all are well. Once one is not, those that have not asked yet may be waiting for
        it; they get a little time, and it gets its answer.
        """
        while waiting := [member for member in members if member.outcome is None]:
            audible = connection.wait(
                [member.pipe for member in waiting], timeout=max(min(deadline - time.monotonic(), 1.0), 0)
            )
            for member in waiting:
                if member.pipe in audible:
                    self._hear(member)
            if all(member.outcome or member.asking is not None for member in members):
                self._answer(members, all(member.asking for member in members))
            elif time.monotonic() > deadline:
                if not self._answer(members, False):
                    return [member for member in members if member.outcome is None]
                deadline = time.monotonic() + ANSWER_SECONDS
            elif any(member.asking is False or (member.outcome and member.outcome.status in BAD) for member in members):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return []

    def _answer(self, members: list[Member], agreed: bool) -> bool:
        """Tell those that have asked; whether anybody has."""
        asking = [member for member in members if member.asking is not None]
        for member in asking:
            member.asking = None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.pipe.send(agreed)
        return bool(asking)

    def _hear(self, member: Member) -> None:
        try:
            kind, content, *seen = member.pipe.recv()
        except (EOFError, ConnectionResetError):
            member.asking, member.outcome = None, Outcome("CRASH", reason=member.held.manner())
            return
        if kind == "calls":
            member.calling = content
        elif kind == "agree":
            member.asking = content
        else:
            member.outcome, member.seen = Outcome(**content), seen[0]

    def _together(self, case: Case, members: list[Member], silent: list[Member], seconds: float) -> Outcome:
        """One outcome of all ranks': the worst, with the name of its rank."""
        heard = [(member, member.outcome) for member in members if member.outcome]
        bad = sorted(
            (WORST_FIRST.index(outcome.status), member.rank) for member, outcome in heard if outcome.status in BAD
        )
        if silent and not bad:
            self._patience.hung.add(case.function)
            places = "; ".join(
                f"rank {member.rank}{member.within(case)}{member.held.where()}" for member in silent
            )  # one that waits is in a collective
            return Outcome("HANG", reason=f"no answer within {seconds:.0f} s from {places}")
        worst, first = min((WORST_FIRST.index(outcome.status), member.rank) for member, outcome in heard)
        own = members[first].outcome
        assert own is not None
        out = replace(own, status=WORST_FIRST[worst])
        strange = [member.rank for member in members if _other_inputs(member.seen, members[0].seen, bool(bad))]
        if strange:
            reason = f"rank {strange[0]} made other inputs of the case than rank 0: all ranks must run the same suite"
            return replace(out, status="ERROR", reason=reason, finding=None)
        if WORST_FIRST[worst] in ("NOT_OFFERED", "DECLARED_UNSUPPORTED") and any(
            o.status != own.status for _, o in heard
        ):
            other = next(member.rank for member, o in heard if o.status != own.status)
            message = f"{own.reason}, says rank {first} of {len(members)}; rank {other} disagrees"
            return replace(
                out,
                status="FAIL",
                reason="",
                finding={"output": "supports", "check": "ranks", "message": message, "index": ()},
            )
        if out.status == "UNINFORMATIVE" and len({o.status for _, o in heard}) > 1:
            out = replace(out, status="PASS", reason="")
        name = f"rank {first} of {len(members)}" + (members[first].within(case) if out.status == "CRASH" else "")
        if out.finding:
            waiting = (
                f"; {len(silent)} other{'s' * (len(silent) > 1)} waited for it"
                if silent and own.finding and own.finding["output"] == "call"
                else ""
            )
            out.finding = out.finding | {"message": f"{name}: {out.finding['message']}{waiting}"}
        elif out.status in BAD:
            out.reason = f"{name}: {out.reason}"
        return replace(
            out,
            seconds_implementation=max(o.seconds_implementation for _, o in heard),
            seconds_reference=max(o.seconds_reference for _, o in heard),
            evaluations=max(o.evaluations for _, o in heard),
            kernels=sorted({kernel for _, o in heard for kernel in o.kernels}),
            calls=sorted({call for _, o in heard for call in o.calls}),
        )


def _other_inputs(seen: list[int], first: list[int], bad: bool) -> bool:
    """Whether two ranks have made different inputs; where something went wrong, one of them may have come less far."""
    shared = min(len(seen), len(first)) if bad else None
    return seen[:shared] != first[:shared]
