"""The finite axes of permutation and quantisation in one step."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, LAYOUTS, MAP_DTYPES, POISONS, Space
from conformance.families.fused.permute_and_quantize import PermutedQuantizationCase, fits
from conformance.families.fused.space import FUNCTION, may_be
from conformance.families.quantization.cases import DIRECTIONS, RECIPES, ROLES, VALUES, VARIANTS
from conformance.families.quantization.quantize import SUFFIXES
from conformance.families.quantization.space import HIDDEN

Row = dict[str, Any]

ROUTING = (0b0110, 0b0001, 0b0000, 0b1111, 0b0110, 0b0100, 0b1001)  # seven tokens, four experts, one token without any
ROOM: dict[str, Row] = {
    "": {},
    "align": {"align": 4},
    "capacity": {"capacity": 3},
    "tight": {"slack": -2},
    "ample": {"align": 2, "slack": 3},
}

_LAYOUTS = [(layout, of) for of in ("tokens", "probs", "d_dequantized") for layout in LAYOUTS[1:]]
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    FUNCTION: {
        "scaling": tuple(RECIPES),
        "variant": tuple(range(VARIANTS)),
        "role": ROLES,
        "direction": DIRECTIONS,
        "room": tuple(ROOM),
        "dtype": DTYPES,
        "values": VALUES,
        "probs": ("", "float32", "bfloat16"),
        "map_dtype": MAP_DTYPES,
        "gemm": (False, True),
        "layout": (
            ("contiguous", ""),
            *_LAYOUTS,
            ("transposed", "routing_map"),
            ("expanded", "d_dequantized"),
            ("strided", "d_probs"),
        ),
        "grads": ("", "tokens", "probs", "tokens+probs"),
        "poison": POISONS,
    },
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    of, wanted = row["layout"][1], row["grads"].split("+")
    if row["probs"] == "" and ("probs" in wanted or of in ("probs", "d_probs")):
        return False
    if of == "d_dequantized" and "" not in SUFFIXES[row["direction"]]:
        return False
    kind = {name: row[name] for name in ("scaling", "variant", "role", "direction")}
    if not may_be(space, **kind, **ROOM[row["room"]], probs=row["probs"]):
        return False
    if kind["scaling"] != "nvfp4":
        return True
    if not _fits(kind, "bfloat16", "dyadic"):
        return False
    return _fits(kind, "float32", "dyadic") or _fits(kind, row["dtype"], row["values"])


def _fits(kind: Row, dtype: str, values: str) -> bool:
    return fits(PermutedQuantizationCase(function=FUNCTION, **kind, dtype=dtype, values=values))


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    fields = fields | ROOM[fields.pop("room")]
    hidden = HIDDEN.get(fields["scaling"], 7)
    return PermutedQuantizationCase(function=function, tokens=7, experts=4, hidden=hidden, routing=ROUTING, **fields)
