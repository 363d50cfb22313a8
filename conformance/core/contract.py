"""The contract of one function: its signature, its tensors for a case, and the right results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from conformance.core.axes import Size
from conformance.core.case import Case, axes_of
from conformance.core.shapes import Shapes
from conformance.core.signature import Signature
from conformance.core.tensors import SHARED, laid_out, payload
from conformance.judge import Expectation


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
    on_device: bool = False  # only the device sees what is illegal: a result that shows the error is enough
    draws: bool = False  # it may draw from torch's generators
    same_as: "Problem | None" = None  # a legal call whose results are also right for the illegal one
    # several calls: (implementation, placed inputs) -> named outputs
    script: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    first: dict[str, Any] = field(default_factory=dict)  # arguments of a script's first call
    others: tuple[str, ...] = ()  # functions that this call needs in addition to the companions of all calls
    omitted: tuple[str, ...] = ()  # redundant settings, which are left out if the implementation has a default for them
    # reads the outputs' contents after all calls: (implementation, outputs)
    read: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in (self.required | self.settings).items() if isinstance(x, Tensor)}

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments passed to `supports`: of the call, or of a script's first call."""
        first = self.first if self.script else self.required
        return {name: x for name, x in (first | self.settings).items() if not isinstance(x, Opaque)}

    @property
    def masters(self) -> dict[str, Tensor]:
        """The tensors that each call is given a copy of: inputs, and cotangents as d_<output>."""
        return self.tensors | {f"d_{name}": x for name, x in self.cotangents.items()}

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
    signature: Signature
    case_type: type[Case]
    outputs: tuple[str, ...]  # in the order of the returned tuple
    primary: str  # the output that the controls corrupt
    optional: tuple[str, ...] = ()  # keyword arguments that an implementation may lack
    redundant: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()  # functions that must be offered with it
    static: tuple[str, ...] = ()
    has_stages: bool = False  # see `stages`
    shapes: Shapes = Shapes()  # filled by the catalogue, as are the next three
    laws: dict[str, Any] = {}  # noqa: RUF012
    golden: dict[str, tuple[Problem, dict[str, Expectation]]] = {}  # noqa: RUF012
    illegal: dict[str, Any] = {}  # noqa: RUF012  (rule name -> function that breaks it)

    def __init_subclass__(cls) -> None:
        if vars(cls).get("signature"):
            declare(cls, vars(cls)["signature"])

    def adopt(self, wrapped: "Contract[Any]") -> None:
        """Copy the function, its signature and the derived attributes from the wrapped contract."""
        derived = ("outputs", "primary", "optional", "redundant", "companions", "static")
        for name in ("function", "case_type", "signature", *derived):
            setattr(self, name, getattr(wrapped, name))

    @abstractmethod
    def legal(self, case: C) -> Problem:
        """The legal call that the case describes."""

    @abstractmethod
    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        """The reference's outputs and gradients on the master copies, under these declarations."""

    def problem(self, case: C) -> Problem:
        """The call that the case describes, legal or illegal."""
        if case.golden:
            return self.golden[case.golden][0]
        problem = shared(self.legal(case))
        return self.illegal[case.illegal](problem) if case.illegal else problem

    def call(
        self,
        case: C,
        required: dict[str, Any],
        settings: dict[str, Any] | None = None,
        *,
        lengths: dict[str, int] | None = None,
        **problem_fields: Any,
    ) -> Problem:
        """The call with these arguments and the case's gradients, cotangents and layout.

        Args:
            required: the arguments that are passed by position.
            settings: the arguments that are passed by keyword.
            lengths: dimensions by letter, where the case has no such size or has it in other units.
            problem_fields: further fields of the Problem.
        """
        known_lengths = {
            axis.letter: getattr(case, name) for name, axis in axes_of(type(case)).items() if isinstance(axis, Size)
        }
        known_lengths |= lengths or {}
        wanted, cotangents = self.signature.wanted(case), {}
        for out in self.signature.outputs:
            if out.name in self.signature.cotangents(case):
                shape = tuple(known_lengths[letter] for letter in out.dims)
                cotangents[out.name] = self.cotangent(case, out.name, shape, self.signature.names[out.of].dtype(case))
        return Problem(
            self.function, required, settings or {}, {case.layout_of: case.layout}, wanted, cotangents, **problem_fields
        )

    def cotangent(self, case: C, output: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """The cotangent of an output.

        If an input of a linear function has NaN and infinities, so has the cotangent, because they
        reach one gradient each.
        """
        values = getattr(case, "values", "") if output == self.signature.linear[1] else ""
        style = {"special": "special", "edges": "ends", "every": "ends"}.get(values, "dyadic")
        return payload(case.seed, f"d_{output}", shape, dtype, style)

    def stages(self, case: C) -> dict[str, Any]:
        """The stages of the function by name, in the order of the calls: cases that judge each
        stage by itself, on the reference's inputs. Empty for a function of one stage.
        """
        return {}

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        """The error in the function's terms, if one element determines it."""
        return None


def declare(owner: Any, signature: Signature) -> None:
    """Set the signature and its derived attributes on a contract or a class of contracts."""
    owner.signature = signature
    owner.outputs = tuple(out.name for out in signature.outputs if not out.probed)
    owner.primary = vars(owner).get("primary", owner.outputs[0])
    owner.optional, owner.static, owner.redundant = signature.optional, signature.static, signature.redundant


def shared(problem: Problem) -> Problem:
    """The problem with the values that an input has whose elements share memory."""
    for name, layout in problem.layouts.items():
        if layout in SHARED:
            masters = {k: _master(x, layout) for k, x in problem.tensors.items() if k == name}
            cotangents = {k: _master(x, layout) if f"d_{k}" == name else x for k, x in problem.cotangents.items()}
            return replace(problem.with_tensors(masters), cotangents=cotangents)
    return problem


def _master(x: Tensor, layout: str) -> Tensor:
    return laid_out(x, layout).clone(memory_format=torch.contiguous_format)


def accumulator_of(declared: Mapping[str, Any], storage: torch.dtype) -> torch.dtype:
    """The declared dtype of accumulators; float64 for values in float64, unless declared."""
    default = torch.float64 if storage == torch.float64 else torch.float32
    return {"storage": storage, "float32_only": torch.float32}.get(declared.get("accumulator", ""), default)


def leaf(x: Tensor) -> Tensor:
    """A float64 copy that requires grad."""
    return x.detach().to(torch.float64, copy=True).requires_grad_()


def computed_in(declared: Mapping[str, Any], *tensors: Tensor | None) -> torch.dtype:
    """The declared accumulator of values of the widest input's dtype, or of the first one's."""
    dtypes = [x.dtype for x in tensors if x is not None]
    return accumulator_of(declared, torch.float64 if torch.float64 in dtypes else dtypes[0])


def narrowed(accumulator: torch.dtype, *tensors: Tensor | None) -> int:
    """How many factors of a product are rounded to float32 before it, because they are float64."""
    return sum(x is not None and x.dtype == torch.float64 and accumulator == torch.float32 for x in tensors)
