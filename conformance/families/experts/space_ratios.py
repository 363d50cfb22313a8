"""Products that are large enough for their ratios to say something, which drawn ones in an interpreter seldom are."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.experts.axes import may_be_low
from conformance.families.experts.cases import GroupedCase

FUNCTIONS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
UNEVEN: dict[str, Any] = {
    "tokens": 80,
    "experts": 2,
    "counts": (31, 49),
}  # more rows than 4096 elements need: those that cancel are not judged
SHORT: dict[str, dict[str, Any]] = {  # a contraction of a few terms, 64 columns
    "grouped_linear": UNEVEN | {"hidden": 33, "width": 64},
    "grouped_dgrad": UNEVEN | {"hidden": 64, "width": 33},
    "grouped_wgrad": {"tokens": 40, "experts": 2, "counts": (21, 19), "hidden": 64, "width": 40},
}
SHORT_BLOCKS: dict[str, dict[str, Any]] = {  # the same in sixteens
    "grouped_linear": {"tokens": 5, "experts": 2, "counts": (3, 2), "hidden": 2, "width": 4},
    "grouped_dgrad": {"tokens": 5, "experts": 2, "counts": (3, 2), "hidden": 4, "width": 2},
    "grouped_wgrad": {"tokens": 3, "experts": 2, "counts": (2, 1), "hidden": 4, "width": 3},
}


def ratio_cases(function: str, space: Space) -> list[Case]:
    """In high precision, and by a scale for a tensor, for blocks of 128, and for blocks of 16; where noise is not taken, rounded to nearest."""
    if function not in FUNCTIONS:
        return []
    found: list[Case] = [GroupedCase(function=function, dtype="bfloat16", **SHORT[function])]
    for scaling, sizes in (("current", SHORT), ("block", SHORT), ("nvfp4", SHORT_BLOCKS)):
        variants = [
            GroupedCase(function=function, dtype="bfloat16", scaling=scaling, variant=variant, **sizes[function])
            for variant in range(2)
        ]
        found += [case for case in variants if may_be_low(function, case, space)][:1]
    return found
