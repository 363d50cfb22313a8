"""Cases whose kernels have several tiles in each dimension.

Most cases are small, so that the smallest failing one is near and an interpreter is quick. A GPU's
kernels hold such a case in one tile: what the second one does, an option at a time, only a wide
case shows.
"""

from typing import Any

from conformance.core.axes import Size
from conformance.core.case import axes_of
from conformance.core.ranks import ranks_of
from conformance.core.scope import Scope
from conformance.core.signature import FAR

MANY = 16  # experts whose matrices, of a wide case, take the reference seconds
LINE = 16  # a kernel knows whether a size is a multiple
TRIED = 2 * LINE + 1  # lengths, of which one is a multiple of an interleave


def widened(scope: Scope, case: Any, whole_lines: bool = False) -> Any:
    """The case at its family's wide sizes, with the same options and without a law; None where it
    has none, is large already or far, has MANY experts, or is on several ranks.

    Args:
        whole_lines: multiples of LINE, for which there are other kernels; else sizes that run the
            case's own.
    """
    lengths = scope.contract.shapes.wide
    costs = case.layout in FAR or case.is_large or ("width" in lengths and getattr(case, "experts", 1) > MANY)
    if not lengths or costs or ranks_of(scope.contract, case):
        return None
    found = case
    for name, length in lengths.items():
        values = [length(case)] if callable(length) else _lengths(case, name, length, whole_lines)
        made = (scope.mended(found.changed(**{name: value}, law="")) for value in values)
        found = next((other for other in made if getattr(other, name) in values and _same_options(case, other)), found)
    return found if found.has({"law": ""}) and found != case else None


def _lengths(case: Any, name: str, length: int, whole_lines: bool) -> list[int]:
    """Sizes, in units, of `length` elements or a few more."""
    unit = case.row_unit if name == "tokens" else case.unit
    least, whole = -(-length // unit), (whole_lines and unit == 1) or getattr(case, name) % LINE == 0
    return [n for n in range(least, least + TRIED) if (n % LINE == 0) == whole]


def _same_options(case: Any, other: Any) -> bool:
    """Whether all fields but sizes, data and the law are equal."""
    free = {name for name, axis in axes_of(type(case)).items() if isinstance(axis, Size) or axis.data} | {"law"}
    return all(value == getattr(other, name) for name, value in case.__dict__.items() if name not in free)
