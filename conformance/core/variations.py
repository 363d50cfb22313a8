"""Variations of structures: cases that run the same kernels, and differ in their data.

A structure has each value of each field of data, as far as its number of cases allows, and all
structures together have the pairs of these values. Greedy and deterministic: of CANDIDATES random
cases the one with the most new pairs, of two values or of a value and the structure.
"""

import random
from typing import Any

from conformance.core.axes import Axis, Changes, Size
from conformance.core.scope import Scope
from conformance.core.signature_axes import Layout

CANDIDATES = 6
MANY = 0.2  # a further case must have this many new pairs per value of the structure
PLACED = 3  # the number of pairs that a layout counts for, if it is new to the structure
RESIZED = 0.6  # the share of the structures that have cases of other sizes
CHANGED = 0.7  # the share of the fields that a candidate changes
WANTED = 0.5  # the share of candidates with a value that no case of the structure has
Value = tuple[str, Any]  # an element of a pair: a value of a field, the law, or the structure


class Variations:
    """Draws the cases of one structure of a function after the other."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._met: dict[Value, set[Value]] = {}  # each value of data, with the values in its cases

    def of(self, case: Any, count: int, most: int, seed: int) -> list[Any]:
        """The case, and up to `count` - 1 others with its kernels: other data, sizes, laws. Up to
        `most` while each has MANY new pairs, as in a function with few structures.

        There are at most two sets of sizes, because an implementation may be specialised for more
        than `size_class`.
        """
        source, variations = random.Random(seed), {case.text: case}
        structure = _Structure(self.scope, case)
        bases = [case, structure.resized(source)]
        self._meet(structure, case)
        for _ in range(2 * most):
            if len(variations) == most:
                break
            missing = [changes for value, changes in structure.every if structure.own not in self._met.get(value, ())]
            candidates = [structure.candidate(source.choice(bases), missing, source) for _ in range(CANDIDATES)]
            new, best = max(
                (self._lawful(structure, candidate, source) for candidate in candidates), key=lambda lawful: lawful[0]
            )
            if len(variations) >= count and new <= MANY * len(structure.every):
                break
            self._meet(structure, best)
            variations.setdefault(best.text, best)
        return list(variations.values())

    def _meet(self, structure: "_Structure", case: Any) -> None:
        values = structure.values(case) | {("law", case.law)}
        for value in values:
            self._met.setdefault(value, set()).update(values)
        self._met.setdefault(structure.layout(case), set()).add(structure.own)

    def _lawful(self, structure: "_Structure", case: Any, source: random.Random) -> tuple[int, Any]:
        """The case with the law that has the most new pairs, and the number of all its new pairs.

        If the structure's own case has no law, because its results are random, the others have none
        either.
        """
        values, laws = structure.values(case), self.scope.cheap_laws(case) if structure.case.law else [""]
        source.shuffle(laws)
        new = {law: len(values - self._met.get(("law", law), set())) for law in laws}
        law = max(laws, key=new.__getitem__)
        both_ways = sum(len(values - self._met.get(value, set())) for value in values)
        placed = structure.own not in self._met.get(structure.layout(case), ())
        return both_ways // 2 + new[law] + placed * PLACED, case.changed(law=law)


class _Structure:
    """The values of data that cases with the kernels of one case may have."""

    def __init__(self, scope: Scope, case: Any) -> None:
        self.scope, self.case = scope, case
        self.own: Value = ("structure", case.text)
        self._few = {axis.name: axis.alternatives(scope.signature, case) for axis in scope.axes}
        self._paired = [axis for axis in scope.axes if self._few[axis.name] and not isinstance(axis, Layout)]
        self.every = [
            ((name, tuple(changes.values())), changes)
            for name, value_changes in self._few.items()
            for changes in value_changes
        ]
        self._known = {value for value, _ in self.every}

    def values(self, case: Any) -> set[Value]:
        """The case's values of data, and the structure itself."""
        return {(axis.name, (getattr(case, axis.name),)) for axis in self._paired} & self._known | {self.own}

    def layout(self, case: Any) -> Value:
        """The layout of the case.

        It is not paired with other values, because few defects depend on it.
        """
        return "layout", (case.layout, case.layout_of)

    def resized(self, source: random.Random) -> Any:
        """The case with other sizes, or the case itself."""
        sizes: list[Axis] = [axis for axis in self.scope.axes if isinstance(axis, Size)]
        return self._varied_case(self.case, sizes, {}, source) if source.random() < RESIZED else self.case

    def candidate(self, base: Any, missing: list[Changes], source: random.Random) -> Any:
        """A random case, or one with a missing value."""
        axes = [axis for axis in self.scope.axes if not isinstance(axis, Size | Layout) and source.random() < CHANGED]
        wanted = source.choice(missing) if missing and source.random() < WANTED else {}
        return self._varied_case(base, axes, wanted, source)

    def _varied_case(self, base: Any, axes: list[Axis], wanted: Changes, source: random.Random) -> Any:
        """`base` with random values of these axes, if it still runs the structure's kernels."""
        changes: Changes = {}
        for axis in axes:
            listed_changes, many = self._few[axis.name], axis.varied(base, source)
            changes |= (
                source.choice(listed_changes) if listed_changes and not (many and source.random() < 0.5) else many
            )
        try:
            changed = base.changed(**changes | wanted)
        except ValueError:
            return base
        varied_case = self.scope.mended(self.scope.contract.shapes.affordable(changed, self.scope))
        return varied_case if self.scope.alike(self.case, varied_case) else base
