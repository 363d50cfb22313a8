"""A case: one small frozen record of integers and short words from which everything else is made.

Its fields are axes. A case has no tensors: the contract of its function makes them, the same bytes
on every device and version. So a case is its own replay: canonical JSON (defaults left out, keys
sorted), and an id, the first 12 hex digits of that text's SHA-256.
"""

import hashlib
import json
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

from conformance.core.axes import Axis, Gradients, Layout, Unused, choice, declared, seed

SCHEMA = 1  # raised when a field changes its meaning, so that an old corpus cannot be misread


class CaseError(ValueError):
    """A case file or case text that cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The fields of every case. Families add fields; a default is the value in the smallest case."""

    function: str
    golden: str = ""  # name of a hand-computed case of this function; the other fields are then ignored
    illegal: str = ""  # name of a rule that this call breaks: it must raise
    law: str = ""  # name of the law that is checked besides the values
    poison: str = choice("nan", "max", "zero")  # content of fresh memory
    seed: int = seed()  # of the tensors' values
    grads: str = declared(Gradients(default=""))
    unused: str = declared(Unused(default=""))
    layout: str = declared(Layout(default="contiguous"))
    layout_of: str = ""  # the input or cotangent that has this layout; the axis of `layout` sets it

    family: ClassVar[dict[str, type["Case"]]] = {}  # class by function

    def __post_init__(self) -> None:
        for axis in axes_of(type(self)).values():
            value = getattr(self, axis.name)
            if value is not axis.default and (needed := axis.wrong(value)):
                raise ValueError(f"{axis.name} is {value!r}; it must be {needed}")

    def apart(self) -> str | None:
        """Why fields of one axis do not fit each other; None: they do."""
        return next(filter(None, (axis.fits(self) for axis in axes_of(type(self)).values())), None)

    def clash(self) -> str | None:
        """Why these fields exclude each other, beyond the axes and the signature; None: they do not."""
        return None

    @property
    def sized(self) -> bool:
        """Whether the arguments fix the size of every output, so that no call waits for the device."""
        return True

    def arguments(self) -> tuple[str, ...]:
        """Optional keyword arguments of the call, besides those that axes and inputs name."""
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
            if field.name != "function" and value != field.default:
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


def axes_of(cls: type[Case]) -> dict[str, Axis]:
    """The axes of a class by field: the family's own first, because the fields of every case depend on them."""
    if cls not in _AXES:
        common = {field.name for field in fields(Case)}
        declared = sorted((field for field in fields(cls) if "axis" in field.metadata), key=lambda f: f.name in common)
        _AXES[cls] = {field.name: replace(field.metadata["axis"], name=field.name) for field in declared}
    return _AXES[cls]


def case_from(record: Any) -> Case:
    """The case that a decoded JSON record describes.

    Raises:
        CaseError: an unknown schema, function or field, or a value of the wrong type.
    """
    if not isinstance(record, dict):
        raise CaseError(f"a case is a JSON object, not {type(record).__name__}")
    rest = dict(record)
    schema = rest.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise CaseError(f"schema is {schema!r}; this version reads {SCHEMA}")
    function = rest.get("function")
    cls = Case.family.get(function) if isinstance(function, str) else None
    if cls is None:
        raise CaseError(f"function is {function!r}; known are {', '.join(sorted(Case.family))}")
    known = {field.name: field for field in fields(cls)}
    for name, value in rest.items():
        if name not in known:
            raise CaseError(f"{name!r} is no field of a {rest['function']} case; its fields are {', '.join(known)}")
        rest[name] = _decoded(name, value, known[name])
    try:
        case = cls(**rest)
    except (TypeError, ValueError) as error:
        raise CaseError(str(error)) from None
    reason = case.apart()
    if reason:
        raise CaseError(reason)
    return case


def _decoded(name: str, value: Any, field: Any) -> Any:
    """`value` as the field's type, which its default shows, or, where that is None, its annotation."""
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
