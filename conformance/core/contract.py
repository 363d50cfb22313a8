"""The contract of one function: its signature, its tensors for a case, and the right results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from conformance.core.axes import FAR, NEAR, Size
from conformance.core.case import Case, axes_of
from conformance.core.scope import Scope, Shapes
from conformance.core.space import Space
from conformance.core.tensors import payload
from conformance.judge import Expectation

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
    expands: bool = False  # all its rows may be one row, with stride 0

    def given(self, case: Case) -> bool:
        return not self.optional or bool(getattr(case, self.optional))

    def dtype(self, case: Case) -> str:
        return getattr(case, self.field) if self.field else self.dtypes[0]


@dataclass(frozen=True)
class Output:
    """A result. It has the dtype of the input `of`, and a cotangent where that input is given and has a gradient."""

    name: str
    dims: str = ""
    of: str = ""
    probed: bool = False  # read by further calls on the result, not returned
    optional: str = ""  # the case's field or property that is true where it is returned


@dataclass(frozen=True)
class Signature:
    """The arguments and results of one function. Layouts, far addresses, gradients and cotangents follow from it."""

    inputs: Sequence[Input]
    outputs: Sequence[Output]
    settings: tuple[str, ...] = ()  # optional keyword arguments, of the function or of its producer
    required: tuple[str, ...] = ()  # keyword arguments that every call has
    producer: str = ""  # the function that makes this one's opaque argument, and takes the settings
    made_from: tuple[Input, ...] = ()  # the producer's inputs
    linear: tuple[str, str] = ("", "")  # the input it is linear in, and the output that is linear in it
    static: tuple[str, ...] = ()  # settings that fix every shape, so that nothing needs to wait for the device
    redundant: tuple[str, ...] = ()  # settings that repeat other arguments; passed to implementations that take them

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
        return (*(x.name for x in self.inputs if x.optional), *(() if self.producer else self.settings))

    @cached_property
    def placed(self) -> dict[str, str]:
        """Dimensions of every tensor whose layout the caller chooses: inputs and cotangents."""
        cotangents = {f"d_{out.name}": out.dims for out in self.outputs if out.name in self.differentiable}
        return {x.name: x.dims for x in self.inputs} | cotangents

    def layouts(self, far: bool) -> Iterator[tuple[str, str]]:
        """(tensor, layout), near or far in each dimension. A vector has no transpose; a cotangent may repeat one row."""
        for name, dims in self.placed.items():
            if far:
                yield from ((name, layout) for layout in FAR[: len(dims)])
                continue
            yield from ((name, layout) for layout in (NEAR if len(dims) > 1 else NEAR[1:] if dims else ()))
            if self.names[name].expands if name in self.names else len(dims) > 1:
                yield name, "expanded"

    # ---- of one case

    def wanted(self, case: Case) -> tuple[str, ...]:
        """Inputs whose gradients the case asks for."""
        return tuple(name for name in case.grads.split("+") if name)

    def has_gradient(self, case: Case, name: str) -> bool:
        return name in self.gradients and self.names[name].given(case) and self.names[name].dtype(case) in FLOATS

    def all_gradients(self, case: Case) -> str:
        """The gradients of all inputs that the case gives."""
        return "+".join(name for name in self.gradients if self.has_gradient(case, name))

    def cotangents(self, case: Case) -> list[str]:
        """Outputs that the case's backward has a cotangent for."""
        outputs = [out for out in self.outputs if out.name in self.differentiable and out.name != case.unused]
        given = [out for out in outputs if self.names[out.of].given(case)] if case.grads else []
        return [out.name for out in given if not out.optional or getattr(case, out.optional)]

    def fits(self, case: Case) -> str | None:
        """Why the case is no call of the function; None: it is one."""
        for name in self.wanted(case):
            if not self.has_gradient(case, name):
                return f"grads asks for {name!r}, which has no gradient in this call"
        if case.unused and not (self.cotangents(case) and case.unused in self.cotangents(replace(case, unused=""))):
            return f"unused is {case.unused!r}, but no other output has a cotangent"
        if case.layout != "contiguous":
            given = {x.name for x in self.inputs if x.given(case)} | {f"d_{name}" for name in self.cotangents(case)}
            dims = self.placed.get(case.layout_of, "")
            if case.layout in FAR[len(dims) :]:
                return f"layout is {case.layout!r}, but {case.layout_of!r} has {len(dims)} dimensions"
            if case.layout_of not in given:
                return f"layout_of is {case.layout_of!r}; this call has {', '.join(sorted(given))}"
        return case.apart() or case.clash()


@dataclass(frozen=True)
class Problem:
    """One call: CPU master copies of its inputs, their memory layouts, cotangents and gradients."""

    function: str
    required: dict[str, Any]  # passed by position, in this order
    settings: dict[str, Any] = field(default_factory=dict)  # passed by keyword
    layouts: dict[str, str] = field(default_factory=dict)  # by the name of an input or cotangent
    wanted: tuple[str, ...] = ()  # inputs that require grad
    cotangents: dict[str, Tensor] = field(default_factory=dict)  # by output; absent: unused
    producer: "Problem | None" = None  # makes the opaque input that this call consumes
    produced: Any = None  # the result of the reference's producer
    blame: str = ""  # the argument that makes the call illegal
    script: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = (
        None  # several calls: (implementation, placed inputs) -> named outputs
    )
    first: dict[str, Any] = field(default_factory=dict)  # arguments of a script's first call
    read: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = (
        None  # reads the outputs' contents after all calls: (implementation, outputs)
    )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in (self.required | self.settings).items() if isinstance(x, Tensor)}

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments passed to `supports`: of the call, or of a script's first call."""
        first = self.first if self.script else self.required
        return {name: x for name, x in (first | self.settings).items() if not isinstance(x, Opaque)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Problem":
        """The same call with other values."""
        required = {name: tensors.get(name, x) for name, x in self.required.items()}
        settings = {name: tensors.get(name, x) for name, x in self.settings.items()}
        return replace(self, required=required, settings=settings)


class Opaque:
    """Placeholder in a Problem for the producer's result."""

    def __init__(self, field_name: str) -> None:
        self.field_name = field_name


C = TypeVar("C", bound=Case)


class Contract(ABC, Generic[C]):
    """Inputs, expected outputs and laws of one function."""

    function: str
    signature: Signature | None = None  # None: an unconverted family
    case_type: type[Case]  # of a contract with a signature
    outputs: tuple[str, ...]  # what the function returns, in order
    primary: str  # the output that the controls corrupt
    optional: tuple[str, ...] = ()  # keyword arguments that an implementation may lack
    redundant: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()  # functions that must be offered with it
    static: tuple[str, ...] = ()
    shapes: Shapes = Shapes()  # filled by the catalogue, as are the next three
    laws: dict[str, Any] = {}  # noqa: RUF012
    golden: dict[str, tuple[Problem, dict[str, Expectation]]] = {}  # noqa: RUF012
    illegal: dict[str, Any] = {}  # noqa: RUF012  (rule name -> function that breaks it)

    def __init_subclass__(cls) -> None:
        if vars(cls).get("signature"):
            declare(cls, vars(cls)["signature"])

    def adopt(self, other: "Contract[Any]") -> None:
        """Take over the function, the signature and what follows from it, of the contract that this one wraps."""
        names = ("function", "signature", "outputs", "primary", "optional", "redundant", "companions", "static")
        for name in (*names, *(["case_type"] if other.signature else [])):
            setattr(self, name, getattr(other, name))

    @abstractmethod
    def legal(self, case: C) -> Problem:
        """The legal call that the case describes."""

    @abstractmethod
    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        """The reference's outputs and gradients on the master copies, under these declarations."""

    def neighbour(self, case: C) -> C:
        """Another case of this function, with other values and settings."""
        return Scope(self, Space()).neighbour(case)

    def simpler(self, case: C) -> Iterator[C]:
        """Smaller cases to try, the boldest first."""
        return Scope(self, Space()).smaller(case)

    def problem(self, case: C) -> Problem:
        """The call that the case describes."""
        if case.golden:
            return self.golden[case.golden][0]
        problem = expanded(self.legal(case))
        return self.illegal[case.illegal](problem) if case.illegal else problem

    def call(
        self,
        case: C,
        required: dict[str, Any],
        settings: dict[str, Any] | None = None,
        *,
        lengths: dict[str, int] | None = None,
        **more: Any,
    ) -> Problem:
        """The call with these arguments and the case's gradients, cotangents and layout.

        Args:
            lengths: dimensions by letter, where the case has no such size or has it in other units.
            more: further fields of the Problem.
        """
        assert self.signature is not None
        known = {
            axis.letter: getattr(case, name) for name, axis in axes_of(type(case)).items() if isinstance(axis, Size)
        }
        known |= lengths or {}
        wanted, cotangents = self.signature.wanted(case), {}
        for out in self.signature.outputs:
            if out.name in self.signature.cotangents(case):
                shape = tuple(known[letter] for letter in out.dims)
                cotangents[out.name] = self.cotangent(case, out.name, shape, self.signature.names[out.of].dtype(case))
        return Problem(
            self.function, required, settings or {}, {case.layout_of: case.layout}, wanted, cotangents, **more
        )

    def cotangent(self, case: C, output: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """With NaN and infinities where a linear function's input has them; they may reach no gradient but their own."""
        assert self.signature is not None
        special = output == self.signature.linear[1] and getattr(case, "values", "") == "special"
        return payload(case.seed, f"d_{output}", shape, dtype, "special" if special else "dyadic")

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        """The error in the function's terms, if one element determines it."""
        return None


def declare(owner: Any, signature: Signature) -> None:
    """Set the signature and its derived attributes on a contract or a class of contracts."""
    owner.signature = signature
    owner.outputs = tuple(out.name for out in signature.outputs if not out.probed)
    owner.primary = vars(owner).get("primary", owner.outputs[0])
    owner.optional, owner.static, owner.redundant = signature.optional, signature.static, signature.redundant


def expanded(problem: Problem) -> Problem:
    """The problem with the first entry repeated in the master copy of an expanded input."""
    for name, layout in problem.layouts.items():
        if layout == "expanded":
            masters = {k: x[:1].expand(x.shape).clone() for k, x in problem.tensors.items() if k == name and len(x)}
            cotangents = {
                k: x[:1].expand(x.shape).clone() if f"d_{k}" == name and len(x) else x
                for k, x in problem.cotangents.items()
            }
            return replace(problem.with_tensors(masters), cotangents=cotangents)
    return problem


def accumulator_of(declared: Mapping[str, Any], storage: torch.dtype) -> torch.dtype:
    """The declared dtype of accumulators."""
    return storage if declared.get("accumulator") == "storage" else torch.float32


def leaf(x: Tensor) -> Tensor:
    """A float64 copy that requires grad."""
    return x.detach().to(torch.float64, copy=True).requires_grad_()


def computed_in(declared: Mapping[str, Any], *tensors: Tensor | None) -> torch.dtype:
    """float64 if an input has this dtype, else the declared accumulator."""
    given = [x for x in tensors if x is not None]
    return torch.float64 if any(x.dtype == torch.float64 for x in given) else accumulator_of(declared, given[0].dtype)
