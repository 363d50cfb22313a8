"""Predicates over the fields of a case: `dtype=bfloat16 and align in (16, 32) and tokens<=64`.

    predicate   term and term and …
    term        field=value, field!=value, field in (value, value, …), field<number, <=, >, >=
    value       a word or a number; true, false and none; 'text' in quotes; a list as [0,1]

A golden case ignores its other fields: only terms about `golden` and `function` can include it.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

from conformance.core.axes import Size
from conformance.core.case import Case, axes_of
from conformance.core.contract import Contract
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.interface import UsageError

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s()<>=!,'"\[\]]+"""
_TERM = re.compile(
    rf"\s*([A-Za-z_]\w*)\s*(?:(!=|<=|>=|==?|<|>)\s*({_VALUE})|in\s*\(\s*((?:{_VALUE})(?:\s*,\s*(?:{_VALUE}))*)\s*\))\s*"
)
_AND = re.compile(r"and\b")
ORDER = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}
FORMS = "field=value, field!=value, field in (a, b), field<number, <=, > or >=, joined by and"
NAMED = ("function", "golden", "illegal")  # fields that also mean something in a golden case


def word(value: Any) -> str:
    """A field's value as a predicate writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, (tuple, list)) else str(value)


def wrong_value(contract: Contract[Any], name: str, value: Any) -> str:
    """The legal values of a field of the function's cases, if `value` is not one; else empty."""
    axes = axes_of(contract.case_type)
    if name in axes:
        return axes[name].wrong(tuple(value) if isinstance(value, list) else value)
    names = {
        "function": [contract.function],
        "golden": contract.golden,
        "illegal": contract.illegal,
        "law": contract.laws,
        "layout_of": contract.signature.placed,
    }
    return "" if value in ("", *names[name]) else f"one of {', '.join(names[name])}"


@dataclass(frozen=True)
class Term:
    """A comparison of one field. Values are written as in `word`."""

    name: str
    operator: str  # =, !=, in, <, <=, > or >=
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        written = [value or repr("") for value in self.values]
        is_list = self.operator == "in"
        return f"{self.name} in ({', '.join(written)})" if is_list else self.name + self.operator + written[0]

    def holds(self, value: Any) -> bool:
        """Whether the comparison is true of this value of the field."""
        if self.operator in ORDER:
            if type(value) is not int:
                return False
            limit = int(self.values[0])
            return (value > limit) - (value < limit) in ORDER[self.operator]
        return (word(value) in self.values) != (self.operator == "!=")

    def true_of(self, case: Case) -> bool:
        """Whether the case has the field and the comparison is true of it."""
        return hasattr(case, self.name) and self.holds(getattr(case, self.name))

    def problem(self, contract: Contract[Any]) -> str:
        """Why the term holds for no case of the function; empty if it holds for some."""
        fields = {field.name: field for field in fields_of(contract.case_type)}
        if self.name not in fields:
            return f"no case has the field {self.name!r}; the fields are {', '.join(fields)}"
        values = [decoded(text, fields[self.name]) for text in self.values]
        if self.operator in ORDER and type(values[0]) is not int:
            return f"{self.text}: a field is only < or > a whole number"
        for value in values if self.operator not in ORDER else ():
            if needed := wrong_value(contract, self.name, value):
                return f"{self.name} is {word(value)!r}; it must be {needed}"
        default, live = fields[self.name].default, Scope(contract, Space()).live
        if self.name not in {*NAMED, *live} and not self.holds(default):
            return f"{self.name} is always {word(default)!r}"
        return ""


def decoded(text: str, field: Any) -> Any:
    """The value of a case's field that the text writes; the text if the type is another one."""
    default = field.default
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text, text)
    if isinstance(default, tuple) or (default is None and "tuple" in str(field.type)):
        pieces = text.strip("[] ").split(",") if text.startswith("[") else [text]
        entries = [piece.strip() for piece in pieces if piece.strip()]
        return tuple(map(int, entries)) if all(re.fullmatch(r"-?\d+", piece) for piece in entries) else text
    if default is None or isinstance(default, int):
        if default is None and text == "none":
            return None
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    return text


@dataclass(frozen=True)
class Where:
    """A conjunction of terms; without terms it holds everywhere."""

    terms: tuple[Term, ...] = ()

    @property
    def text(self) -> str:
        return " and ".join(term.text for term in self.terms)

    def __and__(self, second_predicate: "Where") -> "Where":
        return Where(tuple(dict.fromkeys(self.terms + second_predicate.terms)))

    def holds(self, case: Case) -> bool:
        if case.golden and not all(term.name in NAMED for term in self.terms):
            return False
        return all(term.true_of(case) for term in self.terms)

    def problem(self, contract: Contract[Any]) -> str:
        """Why the predicate holds for no case of the function; empty if it may hold for some."""
        return next(filter(None, (term.problem(contract) for term in self.terms)), "")

    def applies(self, contracts: Iterable[Contract[Any]], source: str) -> list[str]:
        """The functions of which cases can match.

        Raises:
            UsageError: there is none; the message starts with `source`.
        """
        all_contracts = list(contracts)
        fitting = [contract.function for contract in all_contracts if not self.problem(contract)]
        if fitting or not all_contracts:
            return fitting
        for term in self.terms:
            problems = [term.problem(contract) for contract in all_contracts]
            if all(problems):
                fields = {field.name: None for contract in all_contracts for field in fields_of(contract.case_type)}
                if term.name not in fields:
                    known_fields = f"the fields are {', '.join(fields)}"
                    raise UsageError(f"{source}: no case has the field {term.name!r}; {known_fields}")
                raise UsageError(f"{source}: {next((x for x in problems if not x.startswith('no case')), problems[0])}")
        raise UsageError(f"{source}: no function has cases of which all terms can be true")

    def steered(self, scope: Scope, case: Any, source: random.Random) -> Any | None:
        """The case, or the nearest that fits and matches; None if no near case does."""
        if self.holds(case):
            return case
        changes = {}
        fields = {field.name: field for field in fields_of(type(case))}
        for term in self.terms:
            if term.operator in ("=", "in") and term.name in scope.live and not term.true_of(case):
                changes[term.name] = decoded(source.choice(term.values), fields[term.name])
        try:
            steered_case = self._smaller(scope, scope.mended(replace(case, **changes)), case)
        except ValueError:
            return None
        laws = scope.cheap_laws(steered_case) if scope.space.few_kernels else scope.laws(steered_case)
        if steered_case.law and steered_case.law not in laws:
            steered_case = replace(steered_case, law=source.choice(laws))
        return steered_case if self.holds(steered_case) else None

    def _smaller(self, scope: Scope, moved: Any, case: Any) -> Any:
        """The changed case. It has fewer units if a unit has become larger."""
        named = {term.name for term in self.terms}
        sizes = [axis for axis in scope.axes if isinstance(axis, Size) and axis.name not in named]
        while sizes and moved.is_large and moved.unit > case.unit:
            longest = max(sizes, key=lambda axis: getattr(moved, axis.name))
            length = getattr(moved, longest.name)
            if length // 2 < max(longest.at_least, 1):
                break
            moved = scope.mended(replace(moved, **{longest.name: length // 2}))
        return moved


EVERYWHERE = Where()


def parsed(text: str, source: str) -> Where:
    """The predicate that is written so; an empty text holds everywhere.

    Raises:
        UsageError: the text is no predicate; the message starts with `source`.
    """
    terms, offset = [], 0
    while text.strip():
        match = _TERM.match(text, offset)
        if not match:
            break
        name, operator, value, several = match.groups()
        values = re.findall(_VALUE, several) if several else [value]
        terms.append(Term(name, {"==": "=", None: "in"}.get(operator, operator), tuple(map(_unquoted, values))))
        if match.end() == len(text):
            return Where(tuple(terms))
        joined = _AND.match(text, match.end())
        if not joined:
            offset = match.end()
            break
        offset = joined.end()
    if text.strip():
        remainder = text[offset:].strip() or "the end"
        raise UsageError(f"{source}: {text!r}: {remainder!r} is no term; a predicate is {FORMS}")
    return EVERYWHERE


def _unquoted(value: str) -> str:
    """A written value without quotes, and without spaces in a list."""
    return value[1:-1] if value[0] in "'\"" else re.sub(r"\s", "", value) if value[0] == "[" else value
