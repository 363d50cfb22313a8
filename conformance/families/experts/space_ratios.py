"""Products that are large enough for error ratios. In an interpreter drawn products seldom are."""

from typing import Any

from conformance.core.scope import Scope

UNEVEN: dict[str, Any] = {
    "tokens": 80,
    "experts": 2,
    "counts": (31, 49),
}  # more than 4096 elements: cancelling rows are not judged
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


def ratio_cases(scope: Scope) -> list[Any]:
    """Products in high precision, and with one scale per tensor, per block of 128 and of 16."""
    short, blocks = ({"dtype": "bfloat16"} | sizes[scope.function] for sizes in (SHORT, SHORT_BLOCKS))
    cases = [scope.case(short)]
    for scaling, sizes in (("current", short), ("block", short), ("nvfp4", blocks)):
        variants = [scope.case(sizes | {"scaling": scaling, "variant": variant}) for variant in range(2)]
        cases += list(filter(scope.fits, variants))[:1]
    return cases
