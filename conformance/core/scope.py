"""The cases of one function on one implementation, from its axes, signature and shapes.

All families share it: random cases, covering arrays, far addresses, the walk to smaller cases.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from hypothesis import strategies as st

from conformance.core.axes import Axis, Changes, Dtype, Size
from conformance.core.case import Case, axes_of
from conformance.core.contract import Contract
from conformance.core.covering import Covered, covering
from conformance.core.shapes import TALL
from conformance.core.signature import Signature
from conformance.core.signature_axes import WRITTEN_OUT
from conformance.core.space import Space

SLOW = 0.5  # a smaller weight belongs to a slow function
# dtypes of at most two bytes: 2³¹ elements fit 4 GiB
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "bool", "int16")


@dataclass(frozen=True)
class Scope:
    """A contract, together with the calls that one implementation accepts."""

    contract: Contract[Any]
    space: Space

    @property
    def function(self) -> str:
        return self.contract.function

    @property
    def signature(self) -> Signature:
        return self.contract.signature

    @property
    def weight(self) -> float:
        return self.contract.shapes.weight

    @property
    def illegal(self) -> Changes:
        """The fields of illegal calls. A value that is a function is called with the scope."""
        fields = self.contract.shapes.illegal
        return {name: value(self) if callable(value) else value for name, value in fields.items()}

    @cached_property
    def axes(self) -> list[Axis]:
        """The axes that the function's calls depend on."""
        return [axis for axis in axes_of(self.contract.case_type).values() if axis.live(self.signature)]

    @cached_property
    def live(self) -> set[str]:
        """The fields that matter for the function's calls."""
        return {axis.name for axis in self.axes} | {"layout_of", "law"}

    def laws(self, case: Case) -> list[str]:
        """The laws that apply to the case on this device. There is always one."""
        laws = self.contract.laws.values()
        return [law.name for law in laws if law.holds(case, self.space.device)]

    def cheap_laws(self, case: Case) -> list[str]:
        """The same, if few kernels shall be compiled without laws that need others; not none."""
        laws = self.laws(case)
        return [name for name in laws if not self.contract.laws[name].recompiles] or laws

    # ---- which cases fit

    def accepts(self, argument: str) -> bool:
        """Whether the implementation, or its producer, takes the keyword argument."""
        owner = self.function if argument in self.signature.names else self.signature.producer or self.function
        return self.space.accepts(owner, argument)

    def takes(self, case: Case) -> bool:
        """Whether the implementation accepts the case's arguments, gradients and layout."""
        if case.grads and self.function in self.space.not_differentiable:
            return False
        if case.layout != "contiguous" and self.function in self.space.contiguous_only:
            return False
        if self.function not in self.space.without and self.signature.producer not in self.space.without:
            return True
        named = [a.argument for a in self.axes if a.argument and getattr(case, a.name) != a.default]
        input_arguments = [x.argument for x in self.signature.inputs if x.optional and x.given(case)]
        producer_arguments = [x.name for x in self.signature.made_from if x.optional and x.given(case)]
        is_accepted = all(map(self.accepts, (*named, *input_arguments, *case.arguments())))
        return is_accepted and all(self.space.accepts(self.signature.producer, x) for x in producer_arguments)

    def refused(self, case: Case) -> str | None:
        """Why the case is illegal on every implementation, or None."""
        return self.signature.fits(case)

    def fits(self, case: Case) -> bool:
        return self.signature.fits(case) is None and self.takes(case)

    def case(self, fields: Changes) -> Any:
        """A case with those of these fields that matter. The case need not fit."""
        return self._default.changed(**{name: value for name, value in fields.items() if name in self.live})

    @cached_property
    def _default(self) -> Any:
        return self.contract.case_type(function=self.function)

    def mended(self, case: Any) -> Any:
        """The nearest case that fits: a value that conflicts with earlier fields is replaced."""
        if self.fits(case):
            return case
        names = ("function", "law", "golden", "illegal", "before")
        mended = self._default.changed(**{name: getattr(case, name) for name in names})
        fits = self.fits(mended)
        for axis in axes_of(type(case)).values():
            for changes in axis.nearest(case, mended):
                if fits and mended.has(changes):  # the candidate is the case itself
                    break
                candidate = _case_with(mended, changes)
                if candidate and self.fits(candidate):
                    mended, fits = candidate, True
                    break
        return mended

    # ---- cases near another

    def smaller(self, case: Any) -> Iterator[Any]:
        """Simpler cases: without the law, with a setting at its default, with a smaller field."""
        axes = axes_of(type(case)).values()
        plainer = (changes for axis in axes for changes in axis.plainer(case))
        smaller = (changes for axis in axes for changes in axis.smaller(case))
        for changes in ({"law": ""}, *plainer, *smaller):
            changed = _case_with(case, changes)
            candidate = self.mended(changed) if changed else case
            if candidate != case:
                yield candidate

    def neighbour(self, case: Any) -> Any:
        """Another call of the function: other values and settings."""
        changes: Changes = {"golden": "", "law": "", "before": ()}
        for axis in self.axes:
            changes |= axis.other(case)
        return self.mended(case.changed(**changes))

    def alike(self, case: Any, second_case: Any) -> bool:
        """Whether both cases run the same compiled kernels.

        Strides are products of sizes, so these have a class too: 6·8 is a multiple of 16, 5·8 is
        not.
        """
        axes = axes_of(type(case)).values()
        return (
            (case.layout_of == second_case.layout_of or {case.layout, second_case.layout} <= {*WRITTEN_OUT})
            and all(axis.alike(getattr(case, axis.name), getattr(second_case, axis.name)) for axis in axes)
            and self._strides(case) == self._strides(second_case)
        )

    def _strides(self, case: Any) -> list[bool]:
        """For each two sizes, whether their product, and twice it, is a multiple of 16."""
        sizes = [getattr(case, axis.name) for axis in self.axes if isinstance(axis, Size)]
        return [a * b % divisor == 0 for a, b in combinations(sizes, 2) for divisor in (8, 16)]

    # ---- chosen cases

    def drawn(self) -> st.SearchStrategy[Any]:
        """Random cases: the family's shapes, other axes independently, mended; any valid law."""
        axes = [(axis.name, axis.drawn(self.signature)) for axis in self.axes]
        shapes = self.contract.shapes.drawn(self)

        @st.composite
        def drawn(draw: st.DrawFn) -> Any:
            fields = draw(shapes)
            for name, changes in axes:
                if name not in fields:
                    fields = fields | draw(changes)
            case = self.sliced(self.mended(self.contract.shapes.affordable(self.case(fields), self)))
            laws = self.cheap_laws(case) if self.space.few_kernels else self.laws(case)
            return case.changed(law=draw(st.sampled_from(laws)))

        return drawn()

    def sliced(self, case: Any) -> Any:
        """The case; of contiguous ones every third, by its seed, with a slice of a wider tensor."""
        names = [name for name, dims in self.signature.placed.items() if dims]
        if not names or case.layout != "contiguous" or case.seed % 3:
            return case
        first = case.seed // 3 % len(names)
        placed = (case.changed(layout="sliced", layout_of=name) for name in names[first:] + names[:first])
        return next(filter(self.fits, placed), case)

    def near(self, cases: list[Any]) -> st.SearchStrategy[Any]:
        """One of the cases with one to three fields of a drawn case, mended; any valid law.

        Some fields, as a size that another one limits, are drawn with the others alone.
        """
        names = st.lists(st.sampled_from([axis.name for axis in self.axes]), min_size=1, max_size=3)

        @st.composite
        def changed(draw: st.DrawFn) -> Any:
            case, drawn_case, chosen = draw(st.sampled_from(cases)), draw(self.drawn()), draw(names)
            chosen += ["layout_of"] if "layout" in chosen else []
            mixed = _case_with(case, {name: getattr(drawn_case, name) for name in chosen})
            case = self.mended(self.contract.shapes.affordable(mixed, self)) if mixed else case
            return case.changed(law=draw(st.sampled_from(self.laws(case))))

        return changed()

    def covering(self) -> Covered:
        """The covering array of all axes; its cases get the laws in turn."""
        return self.array(self.contract.shapes.covered, self.contract.shapes.together(self))

    def array(self, base: Changes, together: dict[str, list[Changes]], only: Collection[str] | None = None) -> Covered:
        """A covering array over cases with the fields of `base`.

        Args:
            together: fields covered as one axis, with their values; functions get the case.
            only: the axes to cover; None: all.
        """
        axes = self.covered_axes(base, together, only)
        once = ("layout",) if self.space.few_kernels else ()
        rows, reached, impossible = covering(axes, lambda row: self.fits(self.row(base, row)), once)
        cases = [self.row(base | {"seed": index}, row) for index, row in enumerate(rows)]
        return Covered(self.lawful(cases), reached, impossible)

    def covered_axes(
        self, base: Changes, together: dict[str, list[Changes]], only: Collection[str] | None = None
    ) -> dict[str, tuple[tuple[tuple[str, Any], ...], ...]]:
        """The finite axes with the values that the implementation accepts, as tuples of changes."""
        joint = {name for values in together.values() for changes in values for name in changes}
        covered = {axis.name: axis.covered(self.signature) for axis in self.axes if axis.name not in joint} | together
        taken = {
            name: tuple(tuple(changes.items()) for changes in values if self.takes(self.checked(base | changes)))
            for name, values in covered.items()
            if only is None or name in only
        }
        if self.space.few_kernels:
            taken = {name: self._unlike(values) for name, values in taken.items()}
        return {name: values for name, values in taken.items() if len(values) > 1}

    def _unlike(self, values: tuple[tuple[tuple[str, Any], ...], ...]) -> tuple[tuple[tuple[str, Any], ...], ...]:
        """The changes that run different kernels: of several that run the same, the first."""
        axes, distinct = axes_of(self.contract.case_type), list[Changes]()
        for changes in map(dict, values):
            defaults = {
                name: axes[name].default for name in {name for earlier in values for name, _ in earlier} & {*axes}
            }
            new = defaults | changes
            alike = (
                all(
                    not callable(value) and axes[name].alike(value, (defaults | earlier)[name])
                    if name in axes
                    else value == earlier.get(name)
                    for name, value in new.items()
                )
                for earlier in distinct
            )
            if not any(alike):
                distinct.append(changes)
        return tuple(tuple(changes.items()) for changes in distinct)

    def row(self, base: Changes, row: dict[str, Any]) -> Any:
        """The case of a row of the covering array, of values that `covered_axes` has checked."""
        changes = {**base}
        for values in row.values():
            changes.update(values)
        fields = {name: value for name, value in changes.items() if name in self.live}
        late = {name: value for name, value in changes.items() if callable(value)}
        if not late:
            return self._default.taking(fields)
        case = self._default.taking({name: value for name, value in fields.items() if name not in late})
        return case.changed(**{name: value(case) for name, value in late.items()})

    def checked(self, changes: Changes) -> Any:
        """The case of these fields.

        Raises:
            ValueError: a value that its axis does not have.
        """
        case = self.row(changes, {})
        return case.changed(**case.__dict__)

    def more(self, other_cases: list[Case]) -> list[Case]:
        """The family's cases that run with the covering array."""
        return self.contract.shapes.more(self, other_cases)

    def always(self) -> list[Any]:
        """The family's shapes, with all optional inputs and gradients; laws and layouts in turn."""
        family_shapes = self.contract.shapes.always(self)
        shapes = [self.fullest(shape) for shape in family_shapes if not isinstance(shape, Case)]
        placed = self.placed(self.placed(shapes, "negated"), "sliced")
        whole_cases = [shape for shape in family_shapes if isinstance(shape, Case)]
        return [*self.lawful(placed), *whole_cases, *self.overlapping(), *self.tall()]

    def tall(self) -> list[Any]:
        """A case of `TALL` rows, on a GPU."""
        fields = self.contract.shapes.tall if self.space.device == "cuda" else {}
        return [self.fullest(fields | {"tokens": TALL})] if fields else []

    def overlapping(self) -> list[Any]:
        """Small cases for all tensors whose rows may share memory, one tensor in each case.

        Only the first case is used if few kernels shall be compiled, or if the function is slow.
        """
        covered = self.contract.shapes.covered | self.contract.shapes.far
        row = self.row(covered, {})
        base = self.fullest({name: getattr(row, name) for name in covered})
        placed = [base.changed(layout="overlapping", layout_of=name) for name in self.signature.overlapping]
        fitting = [case for case in placed if self.fits(case)]
        return fitting[:1] if self.space.few_kernels or self.weight < SLOW else fitting

    def placed(self, cases: list[Any], layout: str) -> list[Any]:
        """The cases; contiguous ones with another tensor in this layout, while any is left."""
        placed_cases, remaining = [], [name for name, dims in self.signature.placed.items() if dims]
        for case in cases:
            placed = [case.changed(layout=layout, layout_of=name) for name in remaining if case.layout == "contiguous"]
            chosen = next(filter(self.fits, placed), case)
            remaining = [name for name in remaining if name != chosen.layout_of]
            placed_cases.append(chosen)
        return placed_cases

    def fullest(self, fields: Changes) -> Any:
        """A case with these fields, and all optional inputs of the implementation; with all its
        gradients, if `grads` is no such field.
        """
        axes_by_name = axes_of(self.contract.case_type)
        optional_inputs: Changes = {}
        for x in self.signature.inputs:
            if x.optional in axes_by_name:
                axis = axes_by_name[x.optional]
                values = (changes[x.optional] for changes in axis.covered(self.signature))
                optional_inputs[x.optional] = next(filter(None, values), axis.default)
        case = self.mended(self.case(optional_inputs | fields))
        grads = fields.get("grads", self.signature.all_gradients(case))
        return self.mended(case.changed(grads=grads))

    def doubled(self, case: Any) -> Any:
        """The case in float64, with values that need more than 16 bits, as far as the case has such
        fields.
        """
        dtypes = [axis for axis in self.axes if isinstance(axis, Dtype) and "float" in getattr(case, axis.name)]
        changes: Changes = {axis.name: "float64" for axis in dtypes if not axis.wrong("float64")}
        changes |= {axis.name: "wide" for axis in self.axes if axis.name == "values" and not axis.wrong("wide")}
        return self.mended(case.changed(**changes))

    def far(self) -> list[Any]:
        """Each input and cotangent at far addresses, in each of its dimensions, with sizes of 3 and
        narrow dtypes. If few kernels shall be compiled, in one dimension only, which changes in
        turn. Offsets are beyond 2³¹ elements. The tensors are strided views of a few rows in almost
        unmapped storage, so they cost no memory on a CPU; outputs, which the implementation
        allocates, cannot be far without the memory.
        """
        fields: Changes = {}
        for axis in self.axes:
            if isinstance(axis, Size):
                fields[axis.name] = 3
            elif isinstance(axis, Dtype):
                allowed_values = [value for value in axis.allowed(self.signature, axis.values) if value]
                fields[axis.name] = min(
                    allowed_values, key=lambda name: getattr(torch, name).itemsize, default=axis.default
                )
        base = self.fullest(fields | self.contract.shapes.far)
        placed = [base.changed(layout=layout, layout_of=name) for name, layout in self.signature.layouts(far=True)]
        fitting = [case for case in placed if self.fits(case)]
        return fitting[::2] if self.space.few_kernels else fitting

    def lawful(self, cases: list[Any]) -> list[Any]:
        """The cases with laws in turn.

        If few kernels shall be compiled, a law that runs other kernels has one case.
        """
        cases_with_laws: list[Any] = []
        rare = {name for name, law in self.contract.laws.items() if law.recompiles and self.space.few_kernels}
        for index, case in enumerate(cases):
            laws = self.cheap_laws(case) if self.space.few_kernels else self.laws(case)
            law = next((name for name in self.laws(case) if name in rare), laws[index % len(laws)])
            rare.discard(law)
            cases_with_laws.append(case.changed(law=law))
        return cases_with_laws


def _case_with(case: Any, changes: Changes) -> Any:
    """The case with other fields; None if a value is illegal."""
    try:
        return case.changed(**changes)
    except ValueError:
        return None
