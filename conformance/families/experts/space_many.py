"""Rows that exceed the numbers which counters hold, and rows at the ends of a tuner's classes of
sizes.
"""

from typing import Any

from conformance.core.axes import Changes
from conformance.core.case import in_turn
from conformance.core.scope import Scope

# more rows of an expert than 15 bits count; columns are whole lines, as in the cases of large tiles
PAST_15_BITS: Changes = {"tokens": 33003, "experts": 2, "counts": (33000, 3), "hidden": 16, "width": 16}
AROUND_4096 = (4095, 4096, 4097)


def many_rows(scope: Scope) -> list[Any]:
    """On a GPU: many rows for a product, or for both layers, without a law."""
    if scope.space.device != "cuda":
        return []
    return [scope.fullest(PAST_15_BITS | {"dtype": "bfloat16", "probs": "", "bias1": "", "bias2": ""})]


def around_a_class(scope: Scope) -> list[Any]:
    """On a GPU: calls of 4,095, 4,096 and 4,097 rows, each of which follows the others."""
    if scope.space.device != "cuda" or scope.function not in ("glu", "grouped_linear"):
        return []
    fields: Changes = {"experts": 1, "hidden": 16, "width": 16, "dtype": "bfloat16"}
    return in_turn([scope.case(fields | {"tokens": n}) for n in AROUND_4096])
