"""The finite axes of quantisation."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, POISONS, Space
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    UNIT,
    VALUES,
    VARIANTS,
    QuantizeCase,
    fits,
)
from conformance.families.quantization.quantize import SUFFIXES
from conformance.families.quantization.space import may_be
from conformance.families.router.axes import layouts

Row = dict[str, Any]

# in units of what groups are multiples of: no splits · empty first, in the middle and last
COUNTS = ((), (0, 3), (2, 0, 1), (1, 2, 0))
HIDDEN = {"block": 133, "mxfp8": 2, "nvfp4": 3}  # in units
WHOLE = 3  # units of rows where no splits are given
STEPS = ("quantize", "quantize+quantize+reduced+quantize+reload+update+quantize")
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "quantize": {
        "scaling": tuple(RECIPES),
        "variant": tuple(range(VARIANTS)),
        "role": ROLES,
        "direction": DIRECTIONS,
        "steps": STEPS,
        "counts": COUNTS,
        "tail": (0, 4),
        "dtype": DTYPES,
        "values": VALUES,
        "gemm": (False, True),
        "index_dtype": ("int64", "int32"),
        "layout": layouts("x", vectors=("splits",), expanded=("d_dequantized",)),
        "grads": ("", "x"),
        "poison": POISONS,
    },
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    of = row["layout"][1]
    if (row["scaling"] != "delayed" and row["steps"] != "quantize") or (
        not row["counts"] and (row["tail"] or of == "splits")
    ):
        return False
    if of == "d_dequantized" and "" not in SUFFIXES[row["direction"]]:
        return False
    kind = {name: row[name] for name in ("scaling", "variant", "role", "direction")}
    if not may_be(space, **kind, experts=len(row["counts"])):
        return False
    if kind["scaling"] != "nvfp4" or kind["variant"] or kind["role"] == "weight" or kind["direction"] == "rowwise":
        return True
    return fits(QuantizeCase(function=function, **kind, dtype=row["dtype"], values=row["values"]))


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    scaling, counts = fields["scaling"], fields["counts"]
    tokens = sum(counts) if counts else WHOLE
    return QuantizeCase(
        function=function,
        tokens=tokens,
        experts=len(counts),
        hidden=HIDDEN.get(scaling, 7 // UNIT.get(scaling, 1)),
        **fields,
    )
