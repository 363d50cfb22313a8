"""Compares the speed of an implementation with a rival's. A wrong result has no speed."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import fast_interpreter
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Problem
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.engine.child.child import chosen_device
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.corpus import find
from conformance.engine.run.explain import told
from conformance.engine.run.pool import Pool
from conformance.engine.speed.clocks import Call, Times, medians, queued
from conformance.engine.speed.prepared import Calls, Inputs, Untimed, is_interpreted, problem_of
from conformance.interface import Implementation, load
from conformance.texts import described
from conformance.usage import UsageError, check_known

OWN = "--impl"  # the implementation's key beside the rival's name, which has no dash
JUDGES = 2  # cases that are judged at a time
TURNS, CALLS = 7, {"cuda": 15, "cpu": 5}  # turns of each side, and the most calls in a turn
FEW = 3  # turns of a call that takes longer than a turn
TURN_SECONDS = 0.1  # the length of a turn of the slower side
INTERPRETED = "runs in Triton's interpreter here, whose time says nothing of the kernel's"
Clock = Callable[[Mapping[str, Call], int, int, str], Times]


@dataclass
class Lap:
    """One case. `status` is the judge's; without times, `reason` says why there are none.

    us: by title, the times of OWN and of the rival
    moved: by title, bytes that any implementation moves
    rival: why there is no rival; empty: there is one
    """

    case: Case
    status: str = ""
    reason: str = ""
    rival: str = ""
    problem: Problem | None = None  # only while it is needed
    us: dict[str, Times] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


class Racers:
    """The implementations, imported into this process, and children that judge them."""

    def __init__(self, options: Options, against: str) -> None:
        """Import both and start the children.

        Args:
            against: the rival; empty: none.

        Raises:
            UsageError: one cannot be imported, or both are the same.
        """
        if against == options.implementation:
            raise UsageError(f"--against {against} is --impl itself; name another implementation")
        self.device, self.own, self.rival = chosen_device(options.device), options.implementation, against
        self._options = options
        self.sides = {self.own: _loaded(self.own, "--impl")}
        if against:
            self.sides[against] = _loaded(against, "--against")
        fast_interpreter.install()
        with ExitStack() as stack:
            child = ChildOptions(self.own, self.device)
            self._judges = {
                name: stack.enter_context(Pool(replace(child, implementation=name), JUDGES, options.case_seconds))
                for name in self.sides
            }
            self.descriptions = {name: judge.start() for name, judge in self._judges.items()}
            self._stack = stack.pop_all()

    def __enter__(self) -> "Racers":
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    @property
    def about(self) -> dict[str, Any]:
        """The device's name, and the versions of packages."""
        description = self.descriptions[self.own]
        return {"device": description["device_name"], "versions": description["versions"]}

    def judged(self, name: str, laps_of_function: Sequence["Lap"]) -> Iterator[tuple["Lap", Outcome]]:
        """The laps with their cases' outcomes on the implementation, as they come."""
        waiting = {lap.case.id: lap for lap in laps_of_function}
        for case, outcome in self._judges[name].run(lap.case for lap in laps_of_function) if laps_of_function else ():
            yield waiting[case.id], outcome

    def dismiss(self) -> None:
        """End the children, which hold memory of the device."""
        self._stack.close()

    # ---- which cases

    def cases(self, names: Sequence[str]) -> list[Case]:
        """The named cases; without names, those of real size, of functions that all sides offer.

        Raises:
            UsageError: a function that is unknown, not offered or has no case of real size.
            CaseError: no such case.
        """
        if names:
            return list(dict.fromkeys(find(name, Path(self._options.corpus)) for name in names))
        functions = self._options.functions
        real = [name for name, contract in CONTRACTS.items() if contract.shapes.real]
        offered = [name for name in real if all(side.offers(name) for side in self.sides.values())]
        check_known("--function", functions, real)
        if missing := [name for name in functions if name not in offered]:
            raise UsageError(f"--function {missing[0]}: {' and '.join(self.sides)} must offer it")
        return [self._real(name) for name in functions or offered]

    def _real(self, function: str) -> Any:
        """The case of real size that is nearest to the case that all sides accept."""
        spaces = [Space.of(description) for description in self.descriptions.values()]
        without = {name: frozenset().union(*(side.without[name] for side in spaces)) for name in spaces[0].without}
        not_differentiable = frozenset().union(*(side.not_differentiable for side in spaces))
        contiguous_only = frozenset().union(*(side.contiguous_only for side in spaces))
        space = Space(self.device, without, not_differentiable, contiguous_only)
        scope = Scope(CONTRACTS[function], space)
        real = CONTRACTS[function].shapes.real
        assert real is not None
        case = scope.case(real(scope))
        return scope.mended(case.changed(grads=scope.signature.all_gradients(case)))


@contextmanager
def importable() -> Iterator[None]:
    """Let modules of the working directory be imported, after all others, as child processes do."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _loaded(name: str, flag: str) -> Implementation:
    try:
        return load(name)
    except UsageError as error:
        raise UsageError(str(error).replace("--impl", flag, 1)) from None


def laps(racers: Racers, cases: Sequence[Case], clock: Clock = queued) -> Iterator[Lap]:
    """Every case: judged first, all of them, then timed with no other process at work."""
    all_laps = [Lap(case) for case in cases]
    _judge(racers, all_laps)
    racers.dismiss()
    for lap in all_laps:
        if lap.status == "PASS":
            _time(racers, lap, clock)
            if racers.device == "cuda":
                torch.cuda.empty_cache()
        lap.problem = None
        yield lap


def _judge(racers: Racers, all_laps: Sequence[Lap]) -> None:
    """Judge the implementation, then the rival: one that is wrong, or interpreted, is none."""
    judged_laps, rivals = [], []
    for lap in all_laps:
        try:
            lap.problem = problem_of(lap.case)
        except Untimed as error:
            lap.reason = str(error)
            continue
        inputs = Inputs.of(lap.problem, racers.device)
        offering = {name: side for name, side in racers.sides.items() if side.offers(lap.problem.function)}
        # a CPU interprets kernels, so that their times mean nothing
        interpreted = [x for x in offering if racers.device == "cpu" and is_interpreted(inputs, offering[x])]
        if racers.own in interpreted:
            lap.reason = f"{racers.own} {INTERPRETED}"
            continue
        judged_laps.append(lap)
        if racers.rival in interpreted:
            lap.rival = f"{racers.rival} {INTERPRETED}"
        elif racers.rival:
            rivals.append(lap)
    for lap, outcome in racers.judged(racers.own, judged_laps):
        lap.status, lap.reason = outcome.status, told(outcome)
    for lap, outcome in racers.judged(racers.rival, [lap for lap in rivals if lap.status == "PASS"]):
        lap.rival = "" if outcome.status == "PASS" else f"{racers.rival}: {told(outcome)}"


def _time(racers: Racers, lap: Lap, clock: Clock) -> None:
    """Time the lap's calls; a side that raises has no time."""
    assert lap.problem is not None
    try:
        inputs = Inputs.of(lap.problem, racers.device)
        calls = {OWN: Calls.of(inputs, racers.sides[racers.own])}
        if racers.rival and not lap.rival:
            calls[racers.rival] = Calls.of(inputs, racers.sides[racers.rival])
        for title in calls[OWN].by_title:
            lap.moved[title] = calls[OWN].moved(inputs, title)
            versions: dict[str, Call] = {name: side.by_title[title] for name, side in calls.items()}
            lap.us[title] = clock(versions, *_turns(versions, racers.device), racers.device)
    except Exception as error:
        lap.us, lap.status, lap.reason = {}, "ERROR", f"outside of the judge's process: {described(error)}"


def _turns(versions: Mapping[str, Call], device: str) -> tuple[int, int]:
    """The number of turns, and of calls in each, by the time of the slower side's second call."""
    seconds = max(medians(versions, 1, 1, device=device).values()) / 1e6
    return (FEW, 1) if seconds > TURN_SECONDS else (TURNS, min(CALLS[device], int(TURN_SECONDS / max(seconds, 1e-6))))


def record(lap: Lap, copy: float) -> dict[str, Any]:
    """By title, the times and the floor, as `conformance.report.ratios` compares them.

    Args:
        copy: TB/s of this run's copies.
    """
    return {title: {"us": us, "ours": [OWN], "floor_us": lap.moved[title] / copy / 1e6} for title, us in lap.us.items()}
