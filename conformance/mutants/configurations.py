"""Plants a fault in every configuration of a kernel that the gate judges, and counts the killed.

A compiler that is wrong for one configuration alone looks like such a fault. Each process plants it
in the configurations of a case that has passed, and judges the case again.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.child.faults import KILLED, SURVIVED
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import KINDS, Draw, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import Options
from conformance.engine.run.agenda import REQUESTS, Agenda
from conformance.engine.run.launched import configurations
from conformance.engine.run.pool import Pool
from conformance.interface import UsageError
from conformance.report.delivery import deliver

SHOWN_CASES = 3  # ids of a survivor's cases that are reported


@dataclass(frozen=True)
class Planted:
    """What became of the fault in one configuration.

    case: of the id that killed it first, else empty
    tries: cases in which it survived, and in which it changed nothing
    survivals: ids of the first cases in which it survived
    """

    name: str
    kernel: str
    constants: str
    options: str
    case: str
    tries: dict[str, int]
    survivals: list[str]

    @property
    def killed(self) -> bool:
        return bool(self.case)

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"killed": self.killed}

    @property
    def line(self) -> str:
        text = f"{self.kernel} ({self.constants}; {self.options})"
        if self.killed:
            return f"killed    {text} by {self.case}"
        counts = ", ".join(f"{n} cases {result}" for result, n in self.tries.items()) or "in no case"
        cases = f"; it survived in {', '.join(self.survivals)}" if self.survivals else ""
        return f"SURVIVED  {text}: {counts}{cases}"


def plant_in_configurations(options: Options, jobs: int) -> int:
    """Print the survivors and the score, write the reports; exit code 0 if all faults were killed.

    Raises:
        UsageError: see `score_configurations`.
    """
    results = score_configurations(options, jobs)
    killed = sum(result.killed for result in results)
    print("\n".join([*(result.line for result in results if not result.killed), f"{killed} of {len(results)} killed"]))
    text = json.dumps([result.record() for result in results], indent=1) + "\n"
    return deliver(0 if killed == len(results) else 1, options.report, lambda path: text)


def score_configurations(options: Options, jobs: int) -> list[Planted]:
    """The result of each configuration that the gate's cases on one process launch.

    Raises:
        UsageError: the implementation cannot be used, or there is no GPU.
    """
    lines: list[dict[str, Any]] = []
    killers: dict[str, str] = {}
    tries: dict[str, Counter[str]] = {}
    survivals: dict[str, list[str]] = {}
    with Pool(replace(options.child, faults=True), jobs, options.case_seconds) as pool:
        description = pool.start()
        if description["device"] != "cuda":
            raise UsageError("--kind configurations needs a GPU: an interpreter compiles no configuration")
        for case, outcome in _outcomes(pool, options, description):
            lines.append({"kind": "outcome"} | vars(outcome))
            for name, result in outcome.planted.items():
                tries.setdefault(name, Counter())[result] += 1
                if result == KILLED:
                    killers.setdefault(name, case.id)
                elif result == SURVIVED:
                    survivals.setdefault(name, []).append(case.id)
    return [
        Planted(
            *(name, record["kernel"], record["constants"], record["options"]),
            *(killers.get(name, ""), dict(tries.get(name, Counter())), survivals.get(name, [])[:SHOWN_CASES]),
        )
        for name, record in configurations(lines, ("PASS",)).items()
        if record["judged"]
    ]


def _outcomes(pool: Pool, options: Options, description: dict[str, Any]) -> Iterator[tuple[Case, Outcome]]:
    """The gate's cases on one process, with their outcomes as they come."""
    space, agenda = Space.of(description), Agenda()
    for section in sections():
        offered = section.function in CONTRACTS and description["functions"][section.function]["offered"]
        if offered and section.function in (options.functions or CONTRACTS):
            agenda.add(Draw(section, PROFILES[options.profile], space, options.seed), REQUESTS)
    for work, answer in pool.work(agenda):
        if isinstance(work, Draw) and isinstance(answer, list):
            for structure in answer:
                single_process_cases = [case for case in structure if not ranks_of(CONTRACTS[case.function], case)]
                if single_process_cases:
                    agenda.add(single_process_cases, KINDS.index(work.section.kind))
        elif isinstance(work, Case) and isinstance(answer, Outcome):
            yield work, answer
