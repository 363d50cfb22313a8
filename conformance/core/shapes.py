"""A family's choices of cases beyond the axes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.case import Case

TALL = 2**16 + 1  # more rows than 16 bits, or the second dimension of a grid, can count


@dataclass(frozen=True)
class Shapes:
    """One function's choices beyond the axes: dependent fields, sizes that always run."""

    drawn: Callable[[Any], st.SearchStrategy[Changes]] = lambda scope: st.just({})  # joint fields
    affordable: Callable[[Any, Any], Any] = lambda case, scope: case  # limits the cost
    covered: Changes = field(default_factory=dict)  # fields of all cases of the covering array
    together: Callable[[Any], dict[str, list[Changes]]] = lambda scope: {}  # covered as one axis
    # further cases that run with the covering array
    more: Callable[[Any, list[Case]], list[Case]] = lambda scope, others: []
    always: Callable[[Any], list[Any]] = lambda scope: []  # fields of cases, or whole cases
    # lengths of released models, in elements, by field: see `core.model_sizes`
    models: dict[str, tuple[int, ...]] = field(default_factory=dict)
    of_models: Changes = field(default_factory=dict)  # their dtype, and other fields of all cases there
    model_rows: tuple[Changes, ...] = ()  # further cases there, of options that choose a kernel together
    far: Changes = field(default_factory=dict)  # of far cases, which have sizes 3, narrow dtypes
    # of a narrow case of TALL rows, on a GPU; none: `always` has one, or it would be slow
    tall: Changes = field(default_factory=dict)
    illegal: Changes = field(default_factory=lambda: {"tokens": 2, "experts": 2})
    real: Callable[[Any], Changes] | None = None  # fields of the case of a model's size that is timed
    weight: float = 1  # the function's share of a run
    kernels: bool = True  # whether its calls compile kernels; without any, a GPU runs the cases of a CPU
