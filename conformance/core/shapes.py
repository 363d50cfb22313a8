"""What a family says about one function's cases that no axis can."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.case import Case


@dataclass(frozen=True)
class Shapes:
    """One function's choices that no axis can make: fields that depend on each other, sizes that always run."""

    drawn: Callable[[Any], st.SearchStrategy[Changes]] = lambda scope: st.just({})  # axes draw the other fields
    affordable: Callable[[Any, Any], Any] = lambda case, scope: case  # the case without what takes too long
    covered: Changes = field(default_factory=dict)  # fields of all cases of the covering array
    together: Callable[[Any], dict[str, list[Changes]]] = lambda scope: {}  # fields covered as one axis
    more: Callable[[Any, list[Case]], list[Case]] = lambda scope, others: []  # run with the covering array
    always: Callable[[Any], list[Any]] = lambda scope: []  # fields of cases that always run, or whole cases
    far: Changes = field(default_factory=dict)  # fields of far cases, besides three of every size in narrow dtypes
    illegal: Changes = field(default_factory=lambda: {"tokens": 2, "experts": 2})  # fields of illegal calls
    weight: float = 1  # how much of a run the function has
