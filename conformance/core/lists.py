"""Axes of lists: sizes of parts, permutations, small tables.

The default is the empty list or None: other fields then describe the contents.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Axis, Changes, blocks, declared, shorter, sizes
from conformance.core.signature import Signature

Rows = list[tuple[int, ...]]


def _has_whole_numbers(value: Any, least: int) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and n >= least for n in value)


@dataclass(kw_only=True)
class Parts(Axis):
    """Sizes of consecutive parts, such as rows per expert."""

    data: bool = True
    total: str = ""  # the field with their sum
    number: str = ""  # the field with their count
    order: str = ""  # the field with a permutation of them
    written_out: Callable[[Any], tuple[int, ...]] | None = None  # case -> parts, at the default
    most: int = 130  # the largest entry that is drawn

    def changes(self, entries: Sequence[int], **fields: Any) -> Changes:
        """Changes to these entries, to their sum and to their number."""
        numbers = {self.total: sum(entries), self.number: len(entries)}
        return {self.name: tuple(entries)} | {name: n for name, n in numbers.items() if name} | fields

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """A few parts of any size, or many small ones."""
        entry = st.just(0) | st.integers(0, 9) | sizes(0, self.most)
        small = st.integers(0, 3)
        many = st.integers(20, 150).flatmap(lambda n: st.lists(small, min_size=n, max_size=n))
        few_entries = st.lists(entry, min_size=int(bool(self.number)), max_size=8)
        return st.integers(0, 4).flatmap(lambda i: few_entries if i else many).map(self.changes)

    def wrong(self, value: Any) -> str:
        return "" if _has_whole_numbers(value, 0) else "a list of whole numbers ≥ 0"

    def fits(self, case: Any) -> str | None:
        entries = getattr(case, self.name)
        if entries == self.default:
            return None
        if self.number and len(entries) != getattr(case, self.number):
            return f"{self.name} has {len(entries)} numbers; {self.number} is {getattr(case, self.number)}"
        if self.total and sum(entries) != getattr(case, self.total):
            return f"{self.name} is {entries}; it must have the sum {self.total}, {getattr(case, self.total)}"
        return None

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        """The leading entries.

        The last one is adjusted where the number of entries or their sum has changed.
        """
        entries = list(getattr(case, self.name))
        yield {self.name: tuple(entries)}
        if entries:
            if self.number:
                count = getattr(mended, self.number)
                entries = (entries + [0] * count)[:count]
            if self.total and entries:
                surplus = sum(entries) - getattr(mended, self.total)
                for i in reversed(range(len(entries))):
                    taken = min(entries[i], max(surplus, 0))
                    entries[i], surplus = entries[i] - taken, surplus - taken
                entries[-1] -= min(surplus, 0)
            yield {self.name: tuple(entries)}
        yield {self.name: self.default}

    def smaller(self, case: Any) -> Iterator[Changes]:
        """The entries written out; then fewer entries; then a smaller entry."""
        entries = getattr(case, self.name)
        if entries == self.default and self.written_out and getattr(case, self.number, 0) <= 64:
            yield {self.name: self.written_out(case)}
        for start, stop in blocks(len(entries)):
            order = [i - (stop - start) * (i >= stop) for i in getattr(case, self.order, ()) if not start <= i < stop]
            moved = {self.order: tuple(order)} if self.order else {}
            yield self.changes(entries[:start] + entries[stop:], **moved)
        for i, entry in enumerate(entries):
            yield from (self.changes((*entries[:i], n, *entries[i + 1 :])) for n in shorter(entry))

    def other(self, case: Any) -> Changes:
        return {self.name: getattr(case, self.name)[::-1]}

    def alike(self, value: Any, second_value: Any) -> bool:
        return len(value) == len(second_value)

    def varied(self, case: Any, source: random.Random) -> Changes:
        """As many entries with the same sum, which is cut at random positions; some are 0."""
        entries = getattr(case, self.name)
        unit = math.gcd(*entries)  # a recipe may want multiples of its block
        if not unit:
            return {}
        cuts = [unit * n for n in sorted(source.randint(0, sum(entries) // unit) for _ in entries[1:])]
        return {self.name: tuple(b - a for a, b in zip((0, *cuts), (*cuts, sum(entries)), strict=True))}


@dataclass(kw_only=True)
class Order(Axis):
    """A permutation of another field's entries."""

    of: str
    data: bool = True

    def wrong(self, value: Any) -> str:
        return "" if _has_whole_numbers(value, 0) else "a list of whole numbers ≥ 0"

    def fits(self, case: Any) -> str | None:
        count = len(getattr(case, self.of))
        is_permutation = sorted(getattr(case, self.name)) == list(range(count))
        return None if is_permutation else f"{self.name} must be a permutation of the {count} {self.of}"

    def plainer(self, case: Any) -> Iterator[Changes]:
        yield from ()

    def smaller(self, case: Any) -> Iterator[Changes]:
        yield {self.name: tuple(range(len(getattr(case, self.of))))}

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        """The same order, of as many entries as there are now."""
        order, count = getattr(case, self.name), len(getattr(mended, self.of))
        yield {self.name: order}
        yield {self.name: (*(i for i in order if i < count), *range(len(order), count))}
        yield {self.name: tuple(range(count))}

    def other(self, case: Any) -> Changes:
        return {self.name: getattr(case, self.name)[::-1]}

    def varied(self, case: Any, source: random.Random) -> Changes:
        order = getattr(case, self.name)
        return {self.name: tuple(source.sample(order, len(order)))}


@dataclass(kw_only=True)
class Table(Axis):
    """A small matrix of integers, row by row; at the default, other fields describe it."""

    rows: str  # the field with the number of rows
    columns: str
    written_out: Callable[[Any], Any]  # case -> the matrix, at the default
    data: bool = True
    least: int = 0
    below: str = ""  # the field with the exclusive upper bound of entries
    simple: tuple[int, ...] = (0,)  # replacements for entries, the simplest first
    cells: int = 2**12  # largest matrix that reduction writes out

    def unpacked(self, case: Any) -> Rows:
        """The rows in the case's field."""
        flat, columns = getattr(case, self.name), getattr(case, self.columns)
        return [tuple(flat[i : i + columns]) for i in range(0, len(flat), columns)]

    def packed(self, rows: Rows) -> tuple[int, ...]:
        return tuple(entry for row in rows for entry in row)

    def wrong(self, value: Any) -> str:
        is_legal = value == self.default or _has_whole_numbers(value, self.least)
        return "" if is_legal else f"a list of integers ≥ {self.least}"

    def fits(self, case: Any) -> str | None:
        flat = getattr(case, self.name)
        if flat == self.default:
            return None
        rows, columns = getattr(case, self.rows), getattr(case, self.columns)
        below = getattr(case, self.below) if self.below else None
        if len(flat) != rows * columns or (below is not None and any(entry >= below for entry in flat)):
            limit = "" if below is None else f", below {below}"
            return f"{self.name} must hold {rows} × {columns} integers from {self.least}{limit}"
        return None

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        """The leading rows and columns that remain; entries above the bound are replaced."""
        yield {self.name: getattr(case, self.name)}
        if getattr(case, self.name) != self.default:
            rows, columns = getattr(mended, self.rows), getattr(mended, self.columns)
            below = getattr(mended, self.below) if self.below else float("inf")
            cut = [row[:columns] for row in self.unpacked(case)[:rows]]
            yield {self.name: self.packed([tuple(e if e < below else self.simple[0] for e in row) for row in cut])}
        yield {self.name: self.default}

    def plainer(self, case: Any) -> Iterator[Changes]:
        yield from ()

    def smaller(self, case: Any) -> Iterator[Changes]:
        """The matrix written out; then fewer rows, a column less, a simpler entry."""
        if getattr(case, self.name) == self.default:
            if 0 < getattr(case, self.rows) * getattr(case, self.columns) <= self.cells:
                matrix = self.written_out(case).tolist()
                yield {self.name: self.packed([tuple(map(int, row)) for row in matrix])}
            return
        rows = self.unpacked(case)
        for start, stop in blocks(len(rows)):
            remaining_rows = rows[:start] + rows[stop:]
            yield {self.rows: len(remaining_rows), self.name: self.packed(remaining_rows)}
        columns = getattr(case, self.columns)
        for c in range(columns) if columns > 1 else ():
            yield {self.columns: columns - 1, self.name: self.packed([row[:c] + row[c + 1 :] for row in rows])}
        for r, row in enumerate(rows):
            for c, entry in enumerate(row):
                simpler = self.simple[: self.simple.index(entry)] if entry in self.simple else self.simple
                for simpler_entry in simpler:
                    changed = (*row[:c], simpler_entry, *row[c + 1 :])
                    yield {self.name: self.packed([*rows[:r], changed, *rows[r + 1 :]])}

    def other(self, case: Any) -> Changes:
        """The rows in reverse order."""
        if getattr(case, self.name) == self.default:
            return {}
        return {self.name: self.packed(self.unpacked(case)[::-1])}

    def varied(self, case: Any, source: random.Random) -> Changes:
        """The rows in another order, each with its entries in another order."""
        if getattr(case, self.name) == self.default:
            return {}
        rows = [tuple(source.sample(row, len(row))) for row in self.unpacked(case)]
        return {self.name: self.packed(source.sample(rows, len(rows)))}


@dataclass(kw_only=True)
class Bitmasks(Table):
    """A small 0/1 matrix: one integer per row, bit c for column c."""

    most: tuple[int, int] = (12, 8)  # rows and columns drawn

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """Random bits, and the two sizes."""
        rows, columns = self.most

        def of_width(width: int) -> st.SearchStrategy[Changes]:
            masks = st.lists(st.integers(0, 2**width - 1), max_size=rows)
            return masks.map(lambda m: {self.rows: len(m), self.columns: width, self.name: tuple(m)})

        widths = [of_width(width) for width in range(1, columns + 1)]
        return st.sampled_from(widths).flatmap(lambda masks: masks)

    def unpacked(self, case: Any) -> Rows:
        columns = range(getattr(case, self.columns))
        return [tuple(mask >> c & 1 for c in columns) for mask in getattr(case, self.name)]

    def packed(self, rows: Rows) -> tuple[int, ...]:
        return tuple(sum(1 << c for c, bit in enumerate(row) if bit) for row in rows)

    def fits(self, case: Any) -> str | None:
        masks, rows, columns = (getattr(case, name) for name in (self.name, self.rows, self.columns))
        if masks is not None and (len(masks) != rows or any(mask >> columns for mask in masks)):
            return f"{self.name} must hold {rows} bitmasks below 2^{columns}"
        return None

    def varied(self, case: Any, source: random.Random) -> Changes:
        """Other bits, mostly few or many per row."""
        if getattr(case, self.name) == self.default:
            return {}
        columns, share = getattr(case, self.columns), source.choice((0.1, 0.3, 0.5, 0.9))
        rows = [[source.random() < share for _ in range(columns)] for _ in getattr(case, self.name)]
        return {self.name: self.packed([tuple(map(int, row)) for row in rows])}


def parts(default: tuple[int, ...] = (), **fields: Any) -> Any:
    return declared(Parts(default=default, **fields))


def order(of: str) -> Any:
    return declared(Order(default=(), of=of))


def table(rows: str, columns: str, written_out: Callable[[Any], Any], **fields: Any) -> Any:
    return declared(Table(default=(), rows=rows, columns=columns, written_out=written_out, **fields))


def bitmasks(rows: str, columns: str, written_out: Callable[[Any], Any]) -> Any:
    return declared(Bitmasks(default=None, rows=rows, columns=columns, written_out=written_out))
