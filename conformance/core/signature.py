"""Signatures: arguments and results, which imply layouts, far addresses and gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conformance.core.tensors import SHARED, STRANGE

NEAR = ("transposed", "strided", "shifted")
FAR = ("wide_rows", "wide_columns", "wide_depth")  # by dimension
LAYOUTS = ("contiguous", *NEAR, "sliced", "uneven", "negated", *SHARED, *FAR)

FLOATS = ("float32", "bfloat16", "float16", "float64")  # dtypes that have a gradient


@dataclass(frozen=True)
class Input:
    """A tensor argument, with one letter per dimension."""

    name: str
    dims: str
    dtypes: tuple[str, ...] = ()  # drawn; empty: all values of `field`
    field: str = "dtype"  # the case's field that has the dtype; empty: always the one in `dtypes`
    gradient: bool = False
    optional: str = ""  # the case's field or property that is true where it is given
    expands: bool = False  # whether all rows may be one row, with stride 0
    masked: bool = False  # NaN where no element is read: a value has its place
    part_of: str = ""  # the keyword argument, a record, that the tensor is passed in; empty: it is passed itself

    @property
    def argument(self) -> str:
        return self.part_of or self.name

    def given(self, case: Any) -> bool:
        return not self.optional or bool(getattr(case, self.optional))

    def dtype(self, case: Any) -> str:
        return getattr(case, self.field) if self.field else self.dtypes[0]


@dataclass(frozen=True)
class Output:
    """A result of `of`'s dtype, with a cotangent where `of` is given and differentiable."""

    name: str
    dims: str = ""
    of: str = ""
    probed: bool = False  # read by further calls on the result, not returned
    optional: str = ""  # the case's field or property that is true where it is returned


@dataclass(frozen=True)
class Signature:
    """The arguments and results of one function."""

    inputs: Sequence[Input]
    outputs: Sequence[Output]
    settings: tuple[str, ...] = ()  # optional keyword arguments, of the function or of its producer
    required: tuple[str, ...] = ()  # keyword arguments, or records of inputs, that every call has
    producer: str = ""  # the function that makes this one's opaque argument, and takes the settings
    made_from: tuple[Input, ...] = ()  # the producer's inputs
    linear: tuple[str, str] = ("", "")  # (input, output) of the linear map
    static: tuple[str, ...] = ()  # settings that fix every shape: no host sync
    redundant: tuple[str, ...] = ()  # settings implied by other arguments; may be omitted
    random: bool = False  # a call may draw from torch's generators

    @cached_property
    def names(self) -> dict[str, Input]:
        return {x.name: x for x in self.inputs}

    @cached_property
    def every_input(self) -> tuple[Input, ...]:
        return (*self.inputs, *self.made_from)

    @cached_property
    def letters(self) -> set[str]:
        """The letters of all dimensions."""
        return {
            letter for dims in (*(x.dims for x in self.every_input), *(x.dims for x in self.outputs)) for letter in dims
        }

    @cached_property
    def gradients(self) -> list[str]:
        """Inputs that have a gradient."""
        return [x.name for x in self.inputs if x.gradient]

    @cached_property
    def differentiable(self) -> list[str]:
        """Outputs that have a cotangent."""
        return [out.name for out in self.outputs if out.of and self.names[out.of].gradient]

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """Keyword arguments that an implementation may lack."""
        inputs = dict.fromkeys(x.argument for x in self.inputs if x.optional and x.argument not in self.required)
        return (*inputs, *(() if self.producer else self.settings))

    @cached_property
    def placed(self) -> dict[str, str]:
        """Dimensions of every tensor whose layout the caller chooses: inputs and cotangents.

        Also of the producer's inputs, except where an input has the same name.
        """
        cotangents = {f"d_{out.name}": out.dims for out in self.outputs if out.name in self.differentiable}
        return {x.name: x.dims for x in (*self.made_from, *self.inputs)} | cotangents

    def layouts(self, far: bool) -> Iterator[tuple[str, str]]:
        """(tensor, layout), near or far; no vector is transposed, a cotangent may be expanded.

        The producer's own cases have its inputs far.
        """
        producer_inputs = {x.name for x in self.made_from} - {*self.names}
        for name, dims in self.placed.items():
            if far:
                yield from ((name, layout) for layout in FAR[: len(dims)] if name not in producer_inputs)
                continue
            yield from ((name, layout) for layout in (NEAR if len(dims) > 1 else NEAR[1:] if dims else ()))
            if self.names[name].expands if name in self.names else len(dims) > 1 and name not in producer_inputs:
                yield name, "expanded"

    @cached_property
    def overlapping(self) -> list[str]:
        """Inputs and cotangents whose rows may share memory, because any values are legal.

        No maps, indices, counts, noise, parts of records and `masked` inputs.
        """
        values = [x for x in self.inputs if x.field == "dtype" or x.gradient]
        unmasked = {x.name for x in values if not x.part_of and not x.masked}
        producer_inputs = {x.name for x in self.made_from}
        return [
            name
            for name, dims in self.placed.items()
            if len(dims) > 1 and name not in producer_inputs and (name in unmasked or name not in self.names)
        ]

    def negatable(self, case: Any) -> Iterator[str]:
        """Inputs and cotangents that torch can negate lazily; none where NaNs are moved."""
        if getattr(case, "values", "") in STRANGE:
            return
        for x in (*self.made_from, *self.inputs):
            if x.given(case) and x.dtype(case) in FLOATS:
                yield x.name
        of = {out.name: self.names[out.of] for out in self.outputs if out.of}
        yield from (f"d_{name}" for name in self.cotangents(case) if of[name].dtype(case) in FLOATS)

    # ---- properties of one case

    def wanted(self, case: Any) -> tuple[str, ...]:
        """Inputs whose gradients the case asks for."""
        return tuple(name for name in case.grads.split("+") if name)

    def has_gradient(self, case: Any, name: str) -> bool:
        return name in self.gradients and self.names[name].given(case) and self.names[name].dtype(case) in FLOATS

    def all_gradients(self, case: Any) -> str:
        """The gradients of all inputs that the case gives."""
        return "+".join(name for name in self.gradients if self.has_gradient(case, name))

    def cotangents(self, case: Any) -> list[str]:
        """Outputs that the case's backward has a cotangent for."""
        outputs = [out for out in self.outputs if out.name in self.differentiable and out.name != case.unused]
        present_outputs = [out for out in outputs if self.names[out.of].given(case)] if case.grads else []
        return [out.name for out in present_outputs if not out.optional or getattr(case, out.optional)]

    def fits(self, case: Any) -> str | None:
        """Why the case describes no call of the function; None if it describes one."""
        for name in self.wanted(case):
            if not self.has_gradient(case, name):
                return f"grads asks for {name!r}, which has no gradient in this call"
        used = self.cotangents(case)
        if case.unused and not (used and used != self.cotangents(case.changed(unused=""))):
            return f"unused is {case.unused!r}, but no other output has a cotangent"
        if case.layout != "contiguous":
            tensors = {x.name for x in self.every_input if x.given(case)}
            tensors |= {f"d_{name}" for name in self.cotangents(case)}
            dims = self.placed.get(case.layout_of, "")
            if case.layout == "negated" and case.layout_of not in self.negatable(case):
                return f"layout is 'negated', but {case.layout_of!r} is no tensor that torch can negate, bit by bit"
            if case.layout == "overlapping" and case.layout_of not in self.overlapping:
                return f"layout is 'overlapping', but rows of {case.layout_of!r} may not share memory"
            if case.layout in FAR[len(dims) :]:
                return f"layout is {case.layout!r}, but {case.layout_of!r} has {len(dims)} dimensions"
            if case.layout_of not in tensors:
                return f"layout_of is {case.layout_of!r}; this call has {', '.join(sorted(tensors))}"
        return case.apart() or case.clash()
