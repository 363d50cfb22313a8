"""Axes: the values that one field of a case may have.

An axis is written where the field is declared. Drawing, covering arrays, the check of JSON and
reduction ask the axis for values.

Every proposal of an axis is a dict of changes to a case, because some axes move several fields
together: a routing map sets its number of tokens, a memory layout the name of its tensor. An axis
proposes without regard to the other axes; `core.scope.Scope.mended` then repairs the other fields.

A compiled implementation is specialised for most fields: dtypes, options, layouts. Other fields,
the *data*, change only the contents of tensors. Cases that differ in their data, and in sizes of
one class, run the same compiled kernels.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from conformance.core.signature import Signature

Changes = dict[str, Any]

FEW = 16  # up to this many values are a list; more values are a range
LATTICE = tuple(sorted({max(2**p + d, 0) for p in range(12) for d in (-1, 0, 1)}))  # 2^p, 2^p ± 1


def sizes(least: int, most: int) -> st.SearchStrategy[int]:
    """Sizes from `least` to `most`; sizes around powers of two are likely."""
    return st.sampled_from([s for s in LATTICE if least <= s <= most]) | st.integers(least, most)


def mostly(simplest: Any, alternatives: Sequence[Any]) -> st.SearchStrategy[Any]:
    """The simplest value half of the time, else one of the alternatives."""
    return st.sampled_from([simplest] * max(len(alternatives), 1) + [*alternatives])


def shorter(size: int, least: int = 0) -> list[int]:
    """Smaller sizes, the smallest first."""
    tried = {least, 1, 2, 3, size // 4, size // 2, size * 3 // 4, size - 8, size - 1}
    return sorted(s for s in tried if least <= s < size)


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks to remove from a list: all, halves, quarters, …, single entries."""
    step = count
    while step:
        yield from ((start, min(start + step, count)) for start in range(0, count, step))
        step //= 2


def subsets(names: list[str]) -> list[str]:
    """All subsets, each joined by +: none of the names first, all of them last."""
    return ["+".join(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(2 ** len(names))]


@dataclass(kw_only=True)
class Axis:
    """The interface of an axis. `default` is the field's value in the smallest case."""

    default: Any
    name: str = ""  # the name of the field; set by `core.case.axes_of`
    argument: str = ""  # the keyword argument with the field's value; omitted at the default
    data: bool = False  # the field changes only the contents of tensors

    def live(self, signature: Signature) -> bool:
        """Whether the function's calls depend on the field."""
        return not self.argument or self.argument in signature.settings + signature.required

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """Values of random cases."""
        return st.just({self.name: self.default})

    def covered(self, signature: Signature) -> list[Changes]:
        """The values whose pairs with the values of other axes appear in a covering array."""
        return []

    def each(self, signature: Signature) -> list[list[Changes]]:
        """Groups of values.

        Every run has a case with some value of each group, because the values of a group are
        equivalent.
        """
        return [[changes] for changes in self.covered(signature)]

    def changes_to(self, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Changes]:
        """Changes of the field to these values."""
        return values.map(lambda value: {self.name: value})

    def wrong(self, value: Any) -> str:
        """A description of the legal values if `value` is not one of them; else an empty text."""
        return ""

    def fits(self, case: Any) -> str | None:
        """The conflict with the fields that the axis names, or None."""
        return None

    def plainer(self, case: Any) -> Iterator[Changes]:
        """The default, where it is simpler than every other value."""
        if getattr(case, self.name) != self.default:
            yield {self.name: self.default}

    def smaller(self, case: Any) -> Iterator[Changes]:
        """Smaller values than the case's, other than the default; the largest step first."""
        yield from ()

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        """The case's value, then values that may fit the fields of `mended` in its place."""
        yield {self.name: getattr(case, self.name)}
        yield {self.name: self.default}

    def other(self, case: Any) -> Changes:
        """Another value for a second call after the first; empty if nothing changes."""
        return {}

    def alike(self, value: Any, second_value: Any) -> bool:
        """Whether both values run the same compiled kernels."""
        return self.data or bool(value == second_value)

    def alternatives(self, signature: Signature, case: Any) -> list[Changes]:
        """The values that run the same kernels (`alike`), each of which a structure shall have.

        Empty if there are many of them, or only one.
        """
        return []

    def varied(self, case: Any, source: random.Random) -> Changes:
        """A random value for the same kernels (`alike`), of an axis with many; else empty."""
        return {}


def size_class(n: int) -> tuple[bool, bool, int]:
    """The class of sizes for which kernels are specialised alike: whether n is 1, whether it is a
    multiple of 16, and the block size 2^⌈log₂ n⌉.
    """
    return n == 1, n % 16 == 0, max(n - 1, 0).bit_length() if n else -1


@dataclass(kw_only=True)
class Size(Axis):
    """A whole number: the length of every dimension with this `letter` in a signature."""

    letter: str = ""
    at_least: int = 0
    most: int = 128  # largest size drawn
    pairs: tuple[int, ...] = ()  # sizes whose pairs are covered, where a dimension has the letter
    divides: str = ""  # the field it divides
    always: bool = False  # the field matters even if no dimension has the letter
    more: int = 0  # by how much a second call is larger

    def live(self, signature: Signature) -> bool:
        return self.always or not self.letter or self.letter in signature.letters

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return self.changes_to(sizes(self.at_least, self.most))

    def covered(self, signature: Signature) -> list[Changes]:
        has_letter = not self.letter or self.letter in signature.letters
        return [{self.name: n} for n in self.pairs] if has_letter else []

    def wrong(self, value: Any) -> str:
        return "" if type(value) is int and value >= self.at_least else f"a whole number ≥ {self.at_least}"

    def fits(self, case: Any) -> str | None:
        if self.divides and getattr(case, self.divides) % getattr(case, self.name):
            return f"{self.name} is {getattr(case, self.name)}; it must divide {self.divides}"
        return None

    def plainer(self, case: Any) -> Iterator[Changes]:
        yield from ()  # sizes come after all settings

    def smaller(self, case: Any) -> Iterator[Changes]:
        yield from ({self.name: n} for n in shorter(getattr(case, self.name), self.at_least))

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        value = getattr(case, self.name)
        yield from ({self.name: n} for n in (range(value, 1, -1) if self.divides else (value,)))
        yield {self.name: self.default}

    def other(self, case: Any) -> Changes:
        """A larger size. If the size is an argument of the call, it is larger by one."""
        extra_length = self.more or int(bool(self.argument))
        return {self.name: getattr(case, self.name) + extra_length} if extra_length else {}

    def alike(self, value: Any, second_value: Any) -> bool:
        return size_class(value) == size_class(second_value)

    def varied(self, case: Any, source: random.Random) -> Changes:
        value = getattr(case, self.name)
        step = 16 if value % 16 == 0 else 1
        alike = [n for n in range(value // 2 // step * step, 2 * value, step) if self.alike(n, value)]
        return {self.name: source.choice(alike)} if alike else {}


@dataclass(kw_only=True)
class Seed(Axis):
    """The start of the hashed values."""

    most: int
    data: bool = True

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return self.changes_to(st.integers(0, self.most))

    def wrong(self, value: Any) -> str:
        return "" if type(value) is int else "a whole number"

    def other(self, case: Any) -> Changes:
        return {self.name: getattr(case, self.name) + 1}

    def varied(self, case: Any, source: random.Random) -> Changes:
        return {self.name: source.randint(0, self.most)}


@dataclass(kw_only=True)
class Choice(Axis):
    """One of a few values, the first the simplest."""

    values: tuple[Any, ...]
    also: tuple[Any, ...] = ()  # values that are drawn, but whose pairs are not covered
    of: tuple[str, ...] = ()  # inputs that the field describes; dead in a function without them
    turns: bool = False  # a second call has the next value
    given: bool = False  # values other than the default are data: kernels depend on whether it is the default

    def live(self, signature: Signature) -> bool:
        return super().live(signature) and (not self.of or any(name in signature.names for name in self.of))

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """The simplest value with probability ½."""
        simplest, *alternatives = self.legal_values(signature)
        return self.changes_to(mostly(simplest, alternatives))

    def legal_values(self, signature: Signature) -> Sequence[Any]:
        """The values that a call of the function may have."""
        return self.values + self.also

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: value} for value in self.values]

    def each(self, signature: Signature) -> list[list[Changes]]:
        return [[{self.name: value}] for value in self.legal_values(signature)]

    def wrong(self, value: Any) -> str:
        legal_values = self.values + self.also
        is_legal = any(type(value) is type(legal) and value == legal for legal in legal_values)
        texts = (repr(legal) if legal == "" else str(legal) for legal in legal_values)
        return "" if is_legal else f"one of {', '.join(texts)}"

    def smaller(self, case: Any) -> Iterator[Changes]:
        """The values before the case's value in the list."""
        legal_values = self.values + self.also
        yield from ({self.name: value} for value in legal_values[1 : legal_values.index(getattr(case, self.name))])

    def other(self, case: Any) -> Changes:
        values = self.values + self.also
        next_index = values.index(getattr(case, self.name)) + 1
        return {self.name: values[next_index % len(values)]} if self.turns else {}

    def alike(self, value: Any, second_value: Any) -> bool:
        return super().alike(value, second_value) or (self.given and self.default not in (value, second_value))

    def listed(self) -> tuple[Any, ...]:
        """The values that cases are to have."""
        return self.values + self.also

    def alternatives(self, signature: Signature, case: Any) -> list[Changes]:
        value = getattr(case, self.name)
        alike = [listed_value for listed_value in self.listed() if self.alike(value, listed_value)]
        return [{self.name: listed_value} for listed_value in alike] if len(alike) > 1 else []


@dataclass(kw_only=True)
class Dtype(Choice):
    """The dtype of the inputs that name this field."""

    def live(self, signature: Signature) -> bool:
        return any(x.field == self.name for x in signature.every_input)

    def allowed(self, signature: Signature, values: tuple[str, ...]) -> list[str]:
        """The values legal for all inputs of the field; "" where an optional input is absent."""
        inputs = [x for x in signature.every_input if x.field == self.name]
        taken = [{*(x.dtypes or values), *([""] if x.optional == self.name else [])} for x in inputs]
        return [value for value in values if all(value in dtypes_of_input for dtypes_of_input in taken)]

    def legal_values(self, signature: Signature) -> Sequence[Any]:
        return self.allowed(signature, self.values + self.also)

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        simplest, *alternatives = self.legal_values(signature) or [self.default]
        return self.changes_to(mostly(simplest, alternatives))

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: value} for value in self.allowed(signature, self.values)]


@dataclass(kw_only=True)
class Number(Choice):
    """A whole number, mostly a setting. JSON may hold any number from min(`values`) up."""

    pairs: tuple[int, ...] = ()  # numbers whose pairs are covered, in addition to the default's

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        if self.argument not in signature.required:
            return super().drawn(signature)
        return self.changes_to(st.sampled_from(self.values[1:]))

    def covered(self, signature: Signature) -> list[Changes]:
        covered_values = [{self.name: value} for value in self.pairs]
        return covered_values if self.argument in signature.required else [{self.name: self.default}, *covered_values]

    def each(self, signature: Signature) -> list[list[Changes]]:
        """Each of its values; if there are many, the first and the last."""
        chosen_values = self.values[1:] if len(self.values) <= FEW else (self.values[1], self.values[-1])
        return [[{self.name: value}] for value in dict.fromkeys(chosen_values + self.pairs)]

    def wrong(self, value: Any) -> str:
        least = min(0, *(v for v in self.values if v is not None))
        is_legal = value == self.default or (type(value) is int and (value >= 0 or least < 0))
        return "" if is_legal and not isinstance(value, bool) else f"{self.default} or a whole number"

    def listed(self) -> tuple[Any, ...]:
        """Its values; if there are many, the first, the last, and those whose pairs are covered."""
        chosen_values = self.values if len(self.values) <= FEW else (*self.values[:2], self.values[-1])
        return tuple(dict.fromkeys(chosen_values + self.pairs))

    def varied(self, case: Any, source: random.Random) -> Changes:
        value, is_listed = getattr(case, self.name), len(self.values) <= FEW
        alike = [] if is_listed else [candidate for candidate in self.values if self.alike(value, candidate)]
        return {self.name: source.choice(alike)} if len(alike) > 1 else {}

    def smaller(self, case: Any) -> Iterator[Changes]:
        """Numbers nearer to 0."""
        value = getattr(case, self.name)
        if value != self.default:
            nearer = (0, 1, -1) if value < 0 else shorter(value, 0 if self.default is None else 1)
            yield from ({self.name: n} for n in nearer if abs(n) < abs(value))

    def other(self, case: Any) -> Changes:
        """Another covered value, if the number is a setting that the call has."""
        value = getattr(case, self.name)
        alternatives = [v for v in self.pairs if v != value]
        return {self.name: alternatives[0]} if self.argument and value != self.default and alternatives else {}


@dataclass(kw_only=True)
class Words(Axis):
    """Words joined by +: consecutive steps, or losses."""

    known: tuple[str, ...]
    most: int = 6  # words drawn
    repeat: bool = True  # False: each word at most once, in the order of `known`
    of: tuple[str, ...] = ()  # values whose pairs are covered

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        if not self.repeat:
            return self.changes_to(st.sampled_from(subsets(list(self.known))))
        words = st.lists(st.sampled_from(self.known), max_size=self.most)
        return self.changes_to(words.map(lambda words: "+".join(words) or self.default))

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: value} for value in self.of]

    def wrong(self, value: Any) -> str:
        words = value.split("+") if isinstance(value, str) and value else []
        is_legal = isinstance(value, str) and all(word in self.known for word in words)
        is_legal = is_legal and (self.repeat or words == [word for word in self.known if word in words])
        return "" if is_legal else f"some of {', '.join(self.known)}, joined by +"

    def smaller(self, case: Any) -> Iterator[Changes]:
        """Without some of the words."""
        words = getattr(case, self.name).split("+")
        for start, stop in blocks(len(words)):
            if stop - start < len(words):
                yield {self.name: "+".join(words[:start] + words[stop:])}


# ---- field declarations; axes of lists are in `core.lists`


def declared(axis: Axis) -> Any:
    """A dataclass field with this axis."""
    return field(default=axis.default, metadata={"axis": axis})


def size(letter: str = "", at_least: int = 0, default: int = 1, **fields: Any) -> Any:
    return declared(Size(default=default, letter=letter, at_least=at_least, **fields))


def seed(most: int = 999) -> Any:
    return declared(Seed(default=0, most=most))


def choice(*values: Any, **fields: Any) -> Any:
    return declared(Choice(default=values[0], values=values, **fields))


def flag(**fields: Any) -> Any:
    return choice(False, True, **fields)


def dtypes(*values: str, also: tuple[str, ...] = ()) -> Any:
    return declared(Dtype(default=values[0], values=values, also=also))


def number(default: int | None, *values: int, pairs: tuple[int, ...] = (), argument: str = "", **fields: Any) -> Any:
    return declared(Number(default=default, values=(default, *values), pairs=pairs, argument=argument, **fields))


def words(default: str, *vocabulary: str, **fields: Any) -> Any:
    return declared(Words(default=default, known=vocabulary, **fields))
