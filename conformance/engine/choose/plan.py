"""A run: sections of structures, each a test of the suite.

The cases depend only on the section, the profile, the run's seed and the implementation's space.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.each_value import left_out
from conformance.core.model_sizes import at_model_sizes
from conformance.core.ranks import ranks_of
from conformance.core.scope import Scope
from conformance.core.signature import FAR
from conformance.core.space import Space
from conformance.core.variations import Variations
from conformance.core.where import EVERYWHERE, Where
from conformance.engine.choose.draw import drawn, run_seed, scope_of
from conformance.engine.choose.profiles import Profile

Structure = list[Case]  # cases that run the same kernels
# kinds in the order of findings per second; models: sizes of released models
KINDS = ("corpus", "fixed", "covering", "models", "drawn")
RANKED_CASES = 4  # the most cases of a structure of several ranks
WHOLE_CASES = 3  # the most cases of the structure of a case without a law that a family has fixed as a whole
DRAWS = 60  # draws per case that matches a predicate


@dataclass(frozen=True)
class Section:
    """Cases that run together."""

    # one of KINDS; fixed: golden cases, illegal calls, real shapes, far addresses
    kind: str
    function: str = ""

    @property
    def label(self) -> str:
        return "-".join(filter(None, (self.kind, self.function)))


def sections() -> list[Section]:
    """All sections, in the order of KINDS."""
    return [Section("corpus"), *(Section(kind, function) for kind in KINDS[1:] for function in CONTRACTS)]


@dataclass(frozen=True)
class Draw:
    """A request for the structures of a section, which any process can answer."""

    section: Section
    profile: Profile
    space: Space
    seed: int
    where: Where = EVERYWHERE

    def structures(self) -> list[Structure]:
        return list(structures_of(self.section, self.profile, self.space, self.seed, self.where))


def structures_of(
    section: Section, profile: Profile, space: Space, seed: int, where: Where = EVERYWHERE
) -> Iterator[Structure]:
    """The cases of a section of one function that match, by structure."""
    for structure in _structures(section, profile, space, seed, where):
        matching = [case for case in structure if where.holds(case)]
        if matching:
            yield matching


def _structures(section: Section, profile: Profile, space: Space, seed: int, where: Where) -> Iterator[Structure]:
    """The same, with further cases that may not match the predicate.

    Rows and drawn cases are moved to match it.
    """
    amount = profile.amount(section.function, space)
    scope = scope_of(section.function, replace(space, few_kernels=amount.few_kernels))
    if section.kind == "fixed":
        yield from ([case] for case in fixed_cases(section.function, space))
        if profile.shapes:
            yield from ([case] for case in scope.far())
            yield from _varied(scope, scope.always(), -(-amount.cases // 4), seed)
    elif section.kind == "covering" and amount.rows:
        rows = scope.covering().first(amount.covering(section.function), amount.share)
        fixed = [*fixed_cases(section.function, space), *scope.always(), *scope.far(), *rows]
        chosen = [*rows, *scope.more(fixed)]
        varied = list(_varied(scope, _steered_cases(scope, chosen, where, seed), amount.cases, seed))
        yield from varied
        if space.device == "cuda":
            yield from ([case] for case in _neighbours(scope, varied))
        firsts = [structure[0] for structure in varied]
        yield from ([case] for case in left_out(scope, [*fixed, *chain(*varied)], [*fixed, *firsts]))
    elif section.kind == "models" and profile.judges_model_sizes(section.function, space):
        yield from ([case] for case in at_model_sizes(scope))
    elif section.kind == "drawn":
        source, random_source = run_seed(section.function, seed), random.Random(seed)
        steer, most = (lambda case: where.steered(scope, case, random_source)), DRAWS if where.terms else 4
        chosen = drawn(scope.drawn(), source, amount.structures(section.function), steer, most)
        yield from _varied(scope, chosen, amount.cases, seed)


def _neighbours(scope: Scope, structures: list[Structure]) -> list[Case]:
    """The calls that the law `history` makes in between, as cases that are judged by themselves."""
    histories = [case for structure in structures for case in structure if case.law == "history"]
    neighbours = (scope.neighbour(case) for case in histories)
    return [case for case in neighbours if not ranks_of(scope.contract, case)]


def _steered_cases(scope: Scope, cases: list[Case], where: Where, seed: int) -> list[Case]:
    """The cases that match the predicate, each once.

    Any other case is replaced by the nearest case that matches, if there is one.
    """
    if not where.terms:
        return cases
    source = random.Random(seed)
    moved = (where.steered(scope, case, source) for case in cases)
    return list({case.text: case for case in moved if case is not None}.values())


def _varied(scope: Scope, cases: list[Case], count: int, seed: int) -> Iterator[Structure]:
    """Each case with other cases of its structure.

    There are few for a case of several processes and for one that a family has fixed as a whole,
    and none for a slow one.
    """
    variations = Variations(scope)
    for case in cases:
        ranks = ranks_of(scope.contract, case)
        is_costly = case.layout in FAR or case.is_large
        shared = ranks > scope.space.ranks  # these ranks share a GPU, and wait long for each other
        limit = RANKED_CASES if ranks else WHOLE_CASES if not case.law else count
        number = 1 if is_costly or shared else min(limit, count)
        most = 2 * count if number == count and not ranks else number
        yield variations.of(case, number, most, run_seed(case.text, seed)) if number > 1 else [case]


def cases_of(section: Section, profile: Profile, space: Space, seed: int) -> list[Case]:
    """The cases of a section of one function."""
    return [case for structure in structures_of(section, profile, space, seed) for case in structure]


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
