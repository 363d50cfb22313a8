"""A case: one small frozen record of integers and short words that determines a whole call.

Its fields are axes. It holds no tensors: the contract of its function generates them, with the same
bytes on every device and version. So the record is its own replay, as canonical JSON (keys sorted,
defaults omitted). Its id is the first 12 hex digits of the SHA-256 of this JSON.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self

from conformance.core.axes import Axis, Size, choice, declared, seed
from conformance.core.signature import FAR
from conformance.core.signature_axes import Gradients, Layout, Unused

SCHEMA = 1  # incremented when a field changes its meaning: an old corpus is then rejected


class CaseError(ValueError):
    """A malformed case file or case text; the message names the error."""


LARGE = 2**16  # elements


@dataclass(frozen=True, kw_only=True)
class Case:
    """The fields common to all cases; families add fields. The defaults are the smallest case."""

    function: str
    golden: str = ""  # name of a hand-computed case of this function; other fields are ignored
    illegal: str = ""  # name of the rule that this call breaks: it must raise
    law: str = ""  # name of the law checked in addition to the values
    poison: str = choice("nan", "max", "zero", data=True)  # content of fresh memory
    seed: int = seed()  # of the tensors' values
    grads: str = declared(Gradients(default=""))
    unused: str = declared(Unused(default=""))
    layout: str = declared(Layout(default="contiguous"))
    layout_of: str = ""  # the input or cotangent with this layout; set by the axis of `layout`
    before: tuple["Case", ...] = ()  # cases that run before this one in its process; their results are not judged

    family: ClassVar[dict[str, type["Case"]]] = {}  # the class of cases of each function

    def __post_init__(self) -> None:
        self._check(self.__dict__)

    def _check(self, changes: dict[str, Any]) -> None:
        axes = axes_of(type(self))
        for name, value in changes.items():
            axis = axes.get(name)
            if axis and value is not axis.default and (needed := axis.wrong(value)):
                raise ValueError(f"{name} is {value!r}; it must be {needed}")

    def changed(self, **changes: Any) -> Self:
        """The case with other fields, as by `dataclasses.replace`, which checks all fields again.

        Raises:
            ValueError: a value that its axis does not have.
        """
        changed_case = self.taking(changes)
        changed_case._check(changes)
        return changed_case

    def taking(self, fields: dict[str, Any]) -> Self:
        """The case with other fields, whose values are known to be legal for their axes."""
        new_case = object.__new__(type(self))
        new_case.__dict__.update(self.__dict__, **fields)
        assert len(new_case.__dict__) == len(self.__dict__), f"{fields}: not all are fields of {type(self).__name__}"
        return new_case

    def has(self, fields: dict[str, Any]) -> bool:
        """Whether the case has these values in these fields."""
        return all(self.__dict__[name] == value for name, value in fields.items())

    def apart(self) -> str | None:
        """The conflict between fields of one axis, or None."""
        return next(filter(None, (axis.fits(self) for axis in _related_axes(type(self)))), None)

    def clash(self) -> str | None:
        """The conflict between fields, beyond the axes and the signature, or None."""
        return None

    @property
    def sized(self) -> bool:
        """Whether the arguments fix the size of every output, so that no call needs a host sync."""
        return True

    @property
    def is_large(self) -> bool:
        """Whether the reference takes much longer than a kernel for such large tensors."""
        lengths = sorted(getattr(self, axis.name) for axis in axes_of(type(self)).values() if isinstance(axis, Size))
        return len(lengths) > 1 and lengths[-1] * lengths[-2] * self.unit**2 > LARGE

    @property
    def is_heavy(self) -> bool:
        """Whether far addresses of a tensor make the case take gigabytes of a GPU, and seconds."""
        return self.layout in FAR

    @property
    def unit(self) -> int:
        """The elements per unit of its sizes."""
        return 1

    @property
    def row_unit(self) -> int:
        """The rows per unit of its tokens."""
        return self.unit

    def arguments(self) -> tuple[str, ...]:
        """Optional keyword arguments of the call that neither an axis nor an input describes."""
        return ()

    @classmethod
    def serves(cls, *functions: str) -> None:
        """Declare that cases of `functions` are of this class."""
        for function in functions:
            Case.family[function] = cls

    def record(self) -> dict[str, Any]:
        """The fields that differ from their defaults, with the schema."""
        out: dict[str, Any] = {"schema": SCHEMA, "function": self.function}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "before":
                out |= {"before": [case.record() for case in value]} if value else {}
            elif field.name != "function" and value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        return out

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return json.dumps(self.record(), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """Twelve hex digits that name the case."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


_AXES: dict[Any, dict[str, Axis]] = {}
_RELATED: dict[Any, list[Axis]] = {}


def axes_of(cls: type[Case]) -> dict[str, Axis]:
    """The axes of a class by field. The family's come first: the common fields depend on them."""
    if cls not in _AXES:
        common = {field.name for field in fields(Case)}
        declared = sorted((field for field in fields(cls) if "axis" in field.metadata), key=lambda f: f.name in common)
        _AXES[cls] = {field.name: replace(field.metadata["axis"], name=field.name) for field in declared}
    return _AXES[cls]


def _related_axes(cls: type[Case]) -> list[Axis]:
    """The axes whose values depend on other fields."""
    if cls not in _RELATED:
        _RELATED[cls] = [axis for axis in axes_of(cls).values() if type(axis).fits is not Axis.fits]
    return _RELATED[cls]


def case_from(record: Any) -> Case:
    """The case that a decoded JSON record describes.

    Raises:
        CaseError: an unknown schema, function or field, or a value of the wrong type.
    """
    if not isinstance(record, dict):
        raise CaseError(f"a case is a JSON object, not {type(record).__name__}")
    record_fields = dict(record)
    schema = record_fields.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise CaseError(f"schema is {schema!r}; this version reads {SCHEMA}")
    function = record_fields.get("function")
    cls = Case.family.get(function) if isinstance(function, str) else None
    if cls is None:
        raise CaseError(f"function is {function!r}; known are {', '.join(sorted(Case.family))}")
    fields_by_name = {field.name: field for field in fields(cls)}
    for name, value in record_fields.items():
        if name not in fields_by_name:
            raise CaseError(f"{name!r} is no field of a {function} case; its fields are {', '.join(fields_by_name)}")
        record_fields[name] = _earlier(value) if name == "before" else _decoded(name, value, fields_by_name[name])
    try:
        case = cls(**record_fields)
    except (TypeError, ValueError) as error:
        raise CaseError(str(error)) from None
    reason = case.apart()
    if reason:
        raise CaseError(reason)
    return case


def _earlier(value: Any) -> tuple[Case, ...]:
    """The cases that run before another."""
    if not isinstance(value, list):
        raise CaseError(f"before is {value!r}; it must be a list of cases")
    cases = tuple(placed(index, case_from, record) for index, record in enumerate(value))
    if any(case.before for case in cases):
        raise CaseError("a case in before has a before of its own; list its cases first")
    return cases


def in_turn(cases: list[Any]) -> list[Any]:
    """The cases in turn, each with the others as calls before it in its process, in order."""
    return [replace(case, before=(*cases[i + 1 :], *cases[:i])) for i, case in enumerate(cases)]


def placed(index: int, read: Callable[[Any], Case], record: Any) -> Case:
    """The result of `read(record)`. An error says which entry of `before` it is about."""
    try:
        return read(record)
    except CaseError as error:
        raise CaseError(f"before[{index}]: {error}") from None


def _decoded(name: str, value: Any, field: Any) -> Any:
    """`value` in the field's type: the type of the default, or the annotation if it is None."""
    example = "" if field.default is MISSING else field.default
    if example is None:
        example = () if "tuple" in str(field.type) else 0
    if isinstance(example, tuple):
        if not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise CaseError(f"{name} is {value!r}; it must be a list of integers")
        return tuple(value)
    if type(value) is not type(example):
        raise CaseError(f"{name} is {value!r}; it must be of type {type(example).__name__}")
    return value
