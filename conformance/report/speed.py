"""`speed`: an implementation's times beside a rival's, compared with an earlier run's ratios."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.engine.options import Options
from conformance.engine.speed.clocks import Times, ceilings, queued
from conformance.engine.speed.race import OWN, Clock, Lap, Racers, importable, laps, record
from conformance.report.delivery import deliver
from conformance.report.ratios import Report, check_same, compared, read
from conformance.report.terminal import picture
from conformance.usage import UsageError

SAME = ("device", "against")  # fields that must be equal for a comparison
COPIES = 3, 3  # turns, and copies in each
WRONG, HARNESS, TOO_LITTLE = 1, 3, 4  # exit codes
RIGHT = {"", "PASS", "UNINFORMATIVE", "NOT_OFFERED", "DECLARED_UNSUPPORTED"}  # statuses without a finding


def speed(options: Options, against: str, cases: Sequence[str], clock: Clock = queued) -> int:
    """Judge and time the cases, print each, write the report, and compare with an earlier one.

    Args:
        options: the implementation, its functions, the report and the baseline among them.
        against: the rival; empty: none.
        cases: ids, files or JSON texts; empty: one of real size for each function of the options,
            or of all that both sides offer.

    Returns:
        0; 1 if a result is wrong; 3 if a right one could not be timed; 4 if nothing was timed;
        5 if a ratio fell by more than 5 %.

    Raises:
        UsageError: sides, functions, report or baseline that cannot be used.
        CaseError: no such case.
    """
    if refused := [path for path in options.report if Path(path).suffix != ".json"]:
        raise UsageError(f"--report {refused[0]}: the report of speed is a .json file")
    if cases and options.functions:
        raise UsageError("--function chooses among the suite's own cases; leave it out where cases are given")
    old = read(options.baseline, SAME, "speed") if options.baseline else None
    with importable(), Racers(options, against) as racers:
        new: Report = racers.about | {"against": against, "implementation": options.implementation}
        if old:
            check_same(old, new, SAME)
        chosen = racers.cases(cases)
        copy = ceilings(*COPIES, racers.device, ["copy"])["copy"]
        print("\n".join(heading(new, copy)))
        run: list[Lap] = []
        for lap in laps(racers, chosen, clock):
            run.append(lap)
            print("\n".join(lines(lap, against, copy)), flush=True)
    new |= {"copy_TB_per_s": copy, "benchmarks": _by_function(run, copy)}
    return deliver(_code(run, old, new), options.report, lambda path: json.dumps(new, indent=1) + "\n")


def _code(run: Sequence[Lap], old: Report | None, new: Report) -> int:
    """The exit code. Its meaning is printed."""
    if failing_statuses := {lap.status for lap in run} - RIGHT:
        return HARNESS if failing_statuses == {"ERROR"} else WRONG
    if not any(lap.us for lap in run):
        print("nothing was timed")
        return TOO_LITTLE
    return compared(old, new, list(dict.fromkeys(lap.case.function for lap in run)), SAME) if old else 0


def heading(new: Report, copy: float) -> Iterator[str]:
    """What is compared, and where."""
    packages = ", ".join(f"{name} {version}" for name, version in new["versions"].items())
    comparison = f" beside {new['against']}" if new["against"] else ""
    yield f"moe-conformance speed · {new['implementation']}{comparison} · {new['device']} · {packages}"
    yield f"floor: the bytes of inputs and results, at the {copy:.3g} TB/s of this run's copies"


def lines(lap: Lap, against: str, copy: float) -> Iterator[str]:
    """The case, then one line per call; for a case without times the reason."""
    yield f"\n{lap.case.function} {lap.case.id}: {picture(lap.case)}"
    if not lap.us:
        yield f"  not timed: {lap.reason}"
    for title, us in lap.us.items():
        yield f"  {title:20}{_cells(us, against, lap.moved[title] / copy / 1e6)}"
    if lap.rival and lap.us:
        yield f"  no rival: {lap.rival}"


def _cells(us: Times, against: str, floor: float) -> str:
    own_time = us[OWN]
    cells = [f"{own_time:10.1f} µs"]
    if against in us:
        cells.append(f"{against} {us[against]:.1f} µs: {us[against] / own_time:.3f} × its speed")
    return "   ".join([*cells, f"{floor / own_time:.1%} of the floor's speed ({floor:.1f} µs)"])


def _by_function(run: Sequence[Lap], copy: float) -> dict[str, Any]:
    """The report's figures, in the form that `ratios` reads; each case by its id, with its text."""
    figures: defaultdict[str, dict[str, Any]] = defaultdict(lambda: {"cases": {}, "operations": {}})
    for lap in run:
        figures[lap.case.function]["cases"][lap.case.id] = lap.case.record()
        figures[lap.case.function]["operations"][lap.case.id] = record(lap, copy)
    return dict(figures)
