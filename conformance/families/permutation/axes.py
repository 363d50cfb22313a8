"""The finite axes of permutation and of the map's other forms."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, LAYOUTS, MAP_DTYPES, POISONS, Space
from conformance.families.permutation.cases import RoutingCase
from conformance.families.permutation.chunks import ChunksCase
from conformance.families.permutation.routing_map import IndicesCase

Row = dict[str, Any]

ROUTING = (0b0110, 0b0001, 0b0000, 0b1111, 0b0110, 0b0100, 0b1001)  # seven tokens, four experts, one token without any
ROOM: dict[str, Row] = {
    "": {},
    "align": {"align": 4},
    "capacity": {"capacity": 3},
    "tight": {"slack": -2},
    "ample": {"align": 2, "slack": 3},
}


def _permutation_axes(function: str, main: str) -> dict[str, tuple[Any, ...]]:
    cotangent = "d_tokens" if main == "rows" else "d_rows"
    layouts = [(layout, of) for of in (main, "probs", cotangent) for layout in LAYOUTS[1:]]
    return {
        "dtype": DTYPES,
        "probs": ("", "float32", "bfloat16"),
        "room": tuple(ROOM),
        "values": ("dyadic", "wide", "special"),
        "map_dtype": MAP_DTYPES,
        "layout": (
            ("contiguous", ""),
            *layouts,
            ("transposed", "routing_map"),
            ("strided", "routing_map"),
            ("expanded", cotangent),
            *([("strided", "d_probs")] if function == "permute" else []),
        ),
        "grads": ("", main, "probs", f"{main}+probs"),
        "poison": POISONS,
    }


SORT_ONLY = (("expanded", "d_rows"), ("strided", "d_probs"), ("strided", "chunk_sizes"), ("strided", "order"))

AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "permute": _permutation_axes("permute", "tokens"),
    "unpermute": _permutation_axes("unpermute", "rows"),
    "sort_chunks": {
        "dtype": (*DTYPES, "float8_e4m3fn"),
        "probs": ("", "float32", "bfloat16"),
        "values": ("dyadic", "special"),
        "index_dtype": ("int64", "int32"),
        "tail": (0, 2),
        "layout": (
            ("contiguous", ""),
            *((x, of) for of in ("rows", "probs", "d_rows") for x in LAYOUTS[1:]),
            *SORT_ONLY,
        ),
        "grads": ("", "rows", "probs", "rows+probs"),
        "poison": POISONS,
    },
    "pad_routing_map": {
        "align": (1, 2, 5, 16),
        "map_dtype": MAP_DTYPES,
        "layout": (("contiguous", ""), *((x, "routing_map") for x in LAYOUTS[1:])),
        "poison": POISONS,
    },
    "indices_to_multihot": {
        "dtype": DTYPES,
        "index_dtype": ("int64", "int32", "int16"),
        "repeats": (False, True),
        "empty": (0, 3),
        "zero_probs": (False, True),
        "layout": (("contiguous", ""), *((x, of) for of in ("indices", "probs", "d_probs") for x in LAYOUTS[1:])),
        "grads": ("", "probs"),
        "poison": POISONS,
    },
    "deepep_layout": {
        "ranks": (1, 2, 6),
        "index_dtype": ("int64", "int32", "int16"),
        "repeats": (False, True),
        "empty": (0, 3),
        "layout": (("contiguous", ""), *((x, "indices") for x in LAYOUTS[1:])),
        "poison": POISONS,
    },
    "multihot_to_indices": {
        "dtype": DTYPES,
        "map_dtype": MAP_DTYPES,
        "topk": (1, 2, 4, 6),
        "layout": (("contiguous", ""), *((x, of) for of in ("routing_map", "probs", "d_probs") for x in LAYOUTS[1:])),
        "grads": ("", "probs"),
        "poison": POISONS,
    },
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    wanted, of = row.get("grads", "").split("+"), row["layout"][1]
    room = ROOM[row.get("room", "")]
    asked = [
        *(["align"] if "align" in room else []),
        *(["capacity"] if "capacity" in room else []),
        *(["num_rows"] if "slack" in room else []),
    ]
    return (
        all(space.accepts("permute", name) for name in asked)
        and (not row.get("probs") or space.accepts(function, "probs"))
        and not ("probs" in wanted and row.get("probs") == "")
        and not (of in ("probs", "d_probs") and row.get("probs") == "")
        and not (row["dtype"] == "float16" and row.get("values") == "wide" if "dtype" in row else False)
        and not (row.get("dtype") == "float8_e4m3fn" and (wanted != [""] or of == "d_rows"))
    )


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    fields = fields | ROOM[fields.pop("room", "")]
    if function == "sort_chunks":
        return ChunksCase(function=function, sizes=(3, 0, 1, 4), order=(2, 0, 3, 1), hidden=5, **fields)
    if Case.family[function] is IndicesCase:
        return IndicesCase(function=function, tokens=5, topk=3, experts=6, **fields)
    return RoutingCase(
        function=function, tokens=7, experts=4, hidden=1 if "align" in AXES[function] else 5, routing=ROUTING, **fields
    )
