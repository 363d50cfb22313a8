"""The page of Megatron's features, docs/coverage.md, from the catalogue.

    python -m benchmarks.coverage > docs/coverage.md

The data is `features.toml`. A feature is in the reference and in `moe_fast` if these have the
functions that it names. It is judged if a contract draws the values of axes and has the laws that
it names. A GPU has run it if the recorded gate judged these functions.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import moe_fast
import moe_fast.dispatch.overlap
import moe_ref
import moe_ref.config
from conformance.catalogue import CONTRACTS, FAMILIES, NAMES
from conformance.core.axes import Axis, Choice, Words
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn
from conformance.interface import Implementation

YES, PARTLY, NO, NO_TWIN = "yes", "partly", "no", "–"
SAMPLE = 40  # cases, among which a value must be if no covering array has it
FEW = 12  # values of an axis that are looked for one by one
FAST = Implementation(moe_fast, "moe_fast")
FAMILY_OF = {x.function: name for name, family in zip(NAMES, FAMILIES, strict=False) for x in family.contracts}
SHOWN = {"ref": "reference", "fast": "fast", "contract": "contract", "GPU": "GPU"}
COLUMNS = tuple(SHOWN)
# families of the recorded gate on a GPU, and its record in docs/results
GATE_ON_A_GPU = "gate-h200"
GATED_FAMILIES = ("router", "permutation", "quantization", "fused", "experts", "dispatch", "layer", "parameters")
INTRODUCTION = f"""# Features of Megatron's MoE

Every feature of Megatron-Core's MoE, and whether the reference, `moe_fast` and a contract have it,
and whether a GPU has run it. The page is computed from the catalogue and from
`benchmarks/features.toml`, which names the functions, the values of their axes and the laws of each
feature:

    python -m benchmarks.coverage > docs/coverage.md

- *reference*, *fast*: `moe_ref` and `moe_fast` have the named functions, and `moe_fast` supports
  the named call.
- *contract*: the suite judges the functions, draws the named values of axes, and has the named
  laws.
- *GPU*: the [recorded gate](results/index.md#{GATE_ON_A_GPU}) judged the functions of `moe_fast`,
  or another result has the feature.
- *partly*: some of the feature; the last column says what. A rule of the configuration is of the
  reference alone, and counts in every column of the first table.
"""


@dataclass(frozen=True)
class Feature:
    """One feature of Megatron's MoE, and what of this project has it."""

    number: int
    name: str
    calls: str = ""  # judged functions with values of axes and laws: "permute align=256 law:split; unpermute"
    ref: str = ""  # names of moe_ref in addition to the calls
    fast: str = ""  # names of moe_fast in addition to the calls
    partly: str = ""  # columns that have some of the feature
    rule: bool = False  # a rule of the configuration, which moe_fast does not need
    record: str = ""  # the name in docs/results of what a GPU ran and no contract judges
    why: str = ""  # the reason why a column is not yes


def read_sections() -> dict[str, list[Feature]]:
    """The features of `features.toml` by the title of their section."""
    tables = tomllib.loads(Path(__file__).with_name("features.toml").read_text())
    sections: dict[str, list[Feature]] = {}
    number = 0
    for title, fields_by_name in tables.items():
        sections[title] = []
        for name, fields in fields_by_name.items():
            number += 1
            sections[title].append(Feature(number, name, **fields))
    return sections


SECTIONS = read_sections()


@dataclass(frozen=True)
class Call:
    """A judged function with values of axes and laws."""

    function: str
    values: tuple[tuple[str, str], ...]
    laws: tuple[str, ...]

    @property
    def text(self) -> str:
        return ", ".join([f"`{self.function}`", *(f"law {name}" for name in self.laws)])


def calls_of(feature: Feature) -> list[Call]:
    """The feature's calls.

    Raises:
        LookupError: an axis or a law that the function does not have.
    """
    calls = []
    for text in filter(None, feature.calls.split(";")):
        function, *words = text.split()
        laws = tuple(word.removeprefix("law:") for word in words if "=" not in word)
        call = Call(function, tuple((*word.split("="),) for word in words if "=" in word), laws)  # type: ignore[misc]
        if function not in CONTRACTS:
            raise LookupError(f"feature {feature.number} names {function}, which no contract judges")
        existing = {"axis": {axis.name for axis in scope_of(function).axes}, "law": set(CONTRACTS[function].laws)}
        for kind, names in (("axis", dict(call.values)), ("law", call.laws)):
            if unknown := set(names) - existing[kind]:
                raise LookupError(f"feature {feature.number}: {function} has no {kind} {unknown.pop()}")
        calls.append(call)
    return calls


@cache
def scope_of(function: str) -> Scope:
    return Scope(CONTRACTS[function], Space())


def parsed(axis: Axis, text: str) -> Any:
    """The value of the axis that prints as `text`.

    Raises:
        LookupError: the axis has no such value.
    """
    choices = [*axis.values, *axis.also] if isinstance(axis, Choice) else []
    value: Any = next((choice for choice in choices if str(choice) == text), None)
    if value is None and isinstance(axis.default, tuple):
        value = tuple(map(int, text.split(",")))
    elif value is None:
        value = int(text) if text.lstrip("-").isdigit() else text
    if legal := axis.wrong(value):
        raise LookupError(f"{axis.name} has no value {text!r}; it has {legal}")
    return value


@cache
def case_of(call: Call) -> Any:
    """A case with the call's values.

    Raises:
        LookupError: no case has them all.
    """
    scope = scope_of(call.function)
    axes = {axis.name: axis for axis in scope.axes}
    wanted = {name: parsed(axes[name], text) for name, text in call.values}

    def tried() -> Iterator[Any]:
        yield scope.mended(scope.case(wanted))
        yield from (scope.mended(case.changed(**wanted)) for case in some_of(call.function))

    for case in filter(scope.fits, tried()):
        if all(getattr(case, name) == value for name, value in wanted.items()):
            return case
    raise LookupError(f"no case of {call.function} has {dict(call.values)}")


@cache
def some_of(function: str) -> list[Any]:
    """Shapes that always run, and some drawn cases."""
    scope = scope_of(function)
    return [*scope.always(), *(case for case in drawn(scope.drawn(), 1, SAMPLE) if not case.golden)]


@cache
def covered(function: str) -> dict[str, set[Any]]:
    """The values of each field in the function's covering array."""
    scope = scope_of(function)
    shapes = scope.contract.shapes
    values_of: dict[str, set[Any]] = {}
    for rows in scope.covered_axes(shapes.covered, shapes.together(scope)).values():
        for name, value in (change for changes in rows for change in changes):
            values_of.setdefault(name, set()).add(value)
    return values_of


def is_drawn(call: Call) -> bool:
    """Whether each value is one of the covering array, or of some cases.

    Of sizes, lists and numbers with many values there need not be this one; of words, each.
    """
    axes = {axis.name: axis for axis in scope_of(call.function).axes}
    return all(_occurs(call.function, axes[name], getattr(case_of(call), name)) for name, _ in call.values)


def _occurs(function: str, axis: Axis, value: Any) -> bool:
    if isinstance(axis, Words):
        words = {word for text in _values(function, axis.name) for word in text.split("+")}
        return words >= set(value.split("+"))
    if not isinstance(axis, Choice) or len(axis.values + axis.also) > FEW:
        return True
    return value in _values(function, axis.name)


def _values(function: str, name: str) -> list[Any]:
    return [*covered(function).get(name, ()), *(getattr(case, name) for case in some_of(function))]


@cache
def is_supported(call: Call) -> bool:
    """Whether `moe_fast` has the function, its companions and settings, and supports the call."""
    contract = CONTRACTS[call.function]
    problem = contract.problem(case_of(call))
    offered = all(map(FAST.offers, (call.function, *contract.companions)))
    lacking = [name for name in FAST.lacks(call.function, problem.settings) if name not in contract.redundant]
    return offered and not lacking and FAST.supports(call.function, problem.shown) is None


def state_of(feature: Feature) -> dict[str, str]:
    """The feature's columns.

    Raises:
        LookupError: it names a function, an axis, a value or a law that does not exist.
    """
    calls = calls_of(feature)
    functions = [call.function for call in calls]
    fast = all(map(is_supported, calls))
    gated = {FAMILY_OF[name] for name in functions} <= set(GATED_FAMILIES)
    there = {
        "ref": has(moe_ref, [*functions, *feature.ref.split()]),
        "fast": fast and has(moe_fast, [*(functions if fast else ()), *feature.fast.split()]),
        "contract": bool(calls) and all(map(is_drawn, calls)),
        "GPU": bool(feature.record) or (bool(calls) and fast and gated),
    }
    state = {name: YES if yes else NO for name, yes in there.items()}
    state |= {name: PARTLY for name in feature.partly.split() if there[name]}
    return state | (dict.fromkeys(COLUMNS[1:], NO_TWIN) if feature.rule else {})


def has(package: Any, names: Iterable[str]) -> bool:
    """Whether any is named; all must exist.

    Raises:
        LookupError: a name that the package does not have.
    """
    for name in names:
        try:
            attrgetter(name)(package)
        except AttributeError:
            raise LookupError(f"{package.__name__} has no {name}") from None
    return bool(list(names))


def row(feature: Feature) -> str:
    state = state_of(feature)
    by = list(dict.fromkeys(call.text for call in calls_of(feature)))
    by += [f"`{package}.{name}`" for package in ("ref", "fast") for name in getattr(feature, package).split()]
    by = [text.replace("`ref.", "`moe_ref.").replace("`fast.", "`moe_fast.") for text in by]
    by += [f"[results](results/index.md#{feature.record})"] if feature.record else []
    what = " · ".join(by) + (": " if by and feature.why else "") + feature.why
    return f"| {feature.number} | {feature.name} | {where(state)} | {what} |"


def where(state: dict[str, str]) -> str:
    """The columns that have a feature, in words."""
    complete, partial = ([SHOWN[name] for name in COLUMNS if state[name] == value] for value in (YES, PARTLY))
    if len(complete) == len(COLUMNS):
        return "everywhere"
    texts = [", ".join(complete)] if complete else []
    texts += [f"partly {', '.join(partial)}"] if partial else []
    return "; ".join(texts) or "nowhere"


def document() -> str:
    """docs/coverage.md."""
    lines = [INTRODUCTION, "| family | features | reference | fast | contract | GPU | all four |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|", *_totals(), ""]
    for title, features in SECTIONS.items():
        lines += [f"## {title}\n", "| # | feature | where | by what |", "|--:|---|---|---|", *map(row, features), ""]
    return "\n".join(lines)


def _totals() -> Iterator[str]:
    all_features = [feature for features in SECTIONS.values() for feature in features]
    for title, features in [*SECTIONS.items(), ("**all**", all_features)]:
        states = list(map(state_of, features))
        fine = [[state[name] in (YES, NO_TWIN) for name in COLUMNS] for state in states]
        counts = [sum(column) for column in zip(*fine, strict=True)]
        yield f"| {title} | {len(features)} | {' | '.join(map(str, counts))} | {sum(map(all, fine))} |"


if __name__ == "__main__":
    print(document(), end="")
