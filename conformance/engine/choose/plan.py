"""A run: sections of cases, each a test of the suite.

The cases depend only on the section, the profile, the run's seed and the implementation's space.
"""

from dataclasses import dataclass

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, run_seed, scope_of
from conformance.engine.choose.profiles import Profile


@dataclass(frozen=True)
class Section:
    """Cases that run together."""

    # corpus, fixed (golden cases, illegal calls, covering array, real shapes, far addresses), drawn
    kind: str
    function: str = ""
    shard: int = 0

    @property
    def label(self) -> str:
        return "-".join(filter(None, (self.kind, self.function, str(self.shard) if self.kind == "drawn" else "")))


def sections(profile: Profile) -> list[Section]:
    """All sections, those with the most findings per second first."""
    fixed = [Section("fixed", function) for function in CONTRACTS]
    return [
        Section("corpus"),
        *fixed,
        *(Section("drawn", function, shard) for shard in range(profile.shards) for function in CONTRACTS),
    ]


@dataclass(frozen=True)
class Draw:
    """A request for the cases of a section, which any process can answer."""

    section: Section
    profile: Profile
    space: Space
    seed: int

    def cases(self) -> list[Case]:
        return cases_of(self.section, self.profile, self.space, self.seed, [])


def cases_of(section: Section, profile: Profile, space: Space, seed: int, corpus: list[Case]) -> list[Case]:
    """The cases of a section."""
    if section.kind == "corpus":
        return corpus
    scope = scope_of(section.function, space)
    if section.kind == "fixed":
        covered = scope.covering().cases if profile.covering else []
        cases = [*fixed_cases(section.function, space), *covered, *scope.always(), *scope.far()]
        return cases + (scope.more(cases) if profile.covering else [])
    source = run_seed(section.function, section.shard, seed)
    return drawn(scope.drawn(), source, profile.count(section.function))


def fixed_cases(function: str, space: Space) -> list[Case]:
    """The golden cases and illegal calls whose settings the implementation accepts."""
    contract, cls, fields = CONTRACTS[function], Case.family[function], scope_of(function, space).illegal
    golden = [cls(function=function, golden=name) for name in contract.golden]
    illegal = [cls(function=function, illegal=name, **fields) for name in contract.illegal]
    return [case for case in golden + illegal if _accepted(case, space)]


def _accepted(case: Case, space: Space) -> bool:
    if ranks_of(CONTRACTS[case.function], case) > space.most_ranks:
        return False
    problem = CONTRACTS[case.function].problem(case)
    calls = [problem, *([problem.producer] if problem.producer else [])]
    return all(space.accepts(call.function, name) for call in calls for name in call.settings)
