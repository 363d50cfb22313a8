"""What a run consists of: sections of cases, each a test of the suite. Which cases, depends on nothing but the section, the
profile, the run's seed and what the implementation accepts."""

from dataclasses import dataclass
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.covering import covering_cases
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, run_seed, strategy
from conformance.engine.choose.far import far_cases
from conformance.engine.choose.profiles import Profile
from conformance.engine.choose.shapes import shape_cases
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.dispatch.space import law_cases
from conformance.families.experts.space_recipes import recipe_cases
from conformance.families.permutation.chunks import ChunksCase


@dataclass(frozen=True)
class Section:
    """Cases that run together."""

    kind: str  # corpus, fixed (golden cases, illegal calls, the covering array, real shapes and far addresses) or drawn
    function: str = ""
    shard: int = 0

    @property
    def label(self) -> str:
        return "-".join(filter(None, (self.kind, self.function, str(self.shard) if self.kind == "drawn" else "")))


def sections(profile: Profile) -> list[Section]:
    """All sections, those that find most in the least time first."""
    fixed = [Section("fixed", function) for function in CONTRACTS]
    return [
        Section("corpus"),
        *fixed,
        *(Section("drawn", function, shard) for shard in range(profile.shards) for function in CONTRACTS),
    ]


def cases_of(section: Section, profile: Profile, space: Space, seed: int, corpus: list[Case]) -> list[Case]:
    """The cases of a section."""
    if section.kind == "corpus":
        return corpus
    if section.kind == "fixed":
        covered = (
            [*covering_cases(section.function, space).cases, *recipe_cases(section.function, space)]
            if profile.covering
            else []
        )
        cases = [
            *fixed_cases(section.function, space),
            *covered,
            *shape_cases(section.function, space),
            *far_cases(section.function, space),
        ]
        return cases + (
            law_cases(section.function, space, cases) if profile.covering and section.function in COLLECTIVES else []
        )
    source = run_seed(section.function, section.shard, seed)
    return drawn(strategy(section.function, space), source, profile.count(section.function))


def fixed_cases(function: str, space: Space) -> list[Case]:
    """The golden cases and the illegal calls, as far as the implementation accepts their settings."""
    contract, cls = CONTRACTS[function], Case.family[function]
    golden = [cls(function=function, golden=name) for name in contract.golden]
    shapes: dict[type[Case], dict[str, Any]] = {
        ChunksCase: {"sizes": (2, 3), "order": (1, 0)},
        DispatchCase: {"counts": (2, 1)[: space.ranks]},
    }
    shape = shapes.get(cls, {"tokens": 2, "experts": 2})
    illegal = [cls(function=function, illegal=name, **shape) for name in contract.illegal]
    return [case for case in golden + illegal if _accepted(case, space)]


def _accepted(case: Case, space: Space) -> bool:
    if ranks_of(CONTRACTS[case.function], case) > space.ranks:
        return False
    problem = CONTRACTS[case.function].problem(case)
    calls = [problem, *([problem.producer] if problem.producer else [])]
    return all(space.accepts(call.function, name) for call in calls for name in call.settings)
