"""The finite axes of activations that are quantised at once: fewer values than each half has by itself, for those are tested there."""

from collections.abc import Callable
from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, POISONS, Space
from conformance.families.experts.axes import GATES, PLAIN
from conformance.families.experts.cases import WEIGHTS
from conformance.families.fused.cases import BACKWARD, FUNCTIONS, OF_GATES, RECIPES_HERE, QuantizedActivationCase
from conformance.families.quantization.cases import DIRECTIONS, VARIANTS
from conformance.families.quantization.quantize import SUFFIXES

Row = dict[str, Any]

COUNTS = ((), (0, 3), (2, 0, 1))  # in units of what groups are multiples of: no splits · empty first and in the middle
WIDTH = {"block": 130, "mxfp8": 1, "nvfp4": 2}  # in units
WHOLE = 2  # units of rows where no splits are given
_AXES: dict[str, tuple[Any, ...]] = {
    "scaling": tuple(RECIPES_HERE),
    "variant": tuple(range(VARIANTS)),
    "direction": DIRECTIONS,
    "rounded": (False, True),
    "counts": COUNTS,
    "tail": (0, 4),
    "dtype": DTYPES,
    "probs": ("", "float32", "bfloat16"),
    "weights": WEIGHTS,
    "values": ("dyadic", "rows", "bounds", "special"),
    "index_dtype": ("int64", "int32"),
    "poison": POISONS,
}
_SETTINGS = {"offset": (0, 8, -4), "clamp": (0, 6), "alpha": (0, 1702), "interleave": (0, 1, 2)}


def _axes(function: str) -> dict[str, tuple[Any, ...]]:
    backward = function in BACKWARD
    own = {"kind": GATES[:4], **_SETTINGS} if function in OF_GATES else {"kind": PLAIN[:4]}
    layouts = (
        ("contiguous", ""),
        ("transposed", "h"),
        ("strided", "probs"),
        ("shifted", "d_out") if backward else ("expanded", "d_dequantized"),
    )
    return _AXES | own | {"layout": layouts} | ({} if backward else {"grads": ("", "h", "h+probs")})


AXES = {function: _axes(function) for function in FUNCTIONS}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    of = row["layout"][1]
    return (
        not ((row["tail"] or of == "splits") and not row["counts"])
        and not ((row["weights"] != "plain" or of == "probs" or "probs" in row.get("grads", "")) and not row["probs"])
        and not (of == "d_dequantized" and "" not in SUFFIXES[row["direction"]])
        and not (row.get("alpha") and row["kind"] not in ("", "quick_geglu"))
        and not (_is_transformed(row) and not _may_be_transformed(row))
        and all(space.accepts(function, name) or not needed(function, row) for name, needed in _NEEDED.items())
    )


def _is_transformed(row: Row) -> bool:
    return (
        row["scaling"] == "nvfp4"
        and bool(RECIPES_HERE["nvfp4"][row["variant"]].hadamard)
        and row["direction"] != "rowwise"
    )


def _may_be_transformed(row: Row) -> bool:
    return row["dtype"] == "bfloat16" and row["rounded"] and not (row["direction"] == "columnwise" and row.get("grads"))


_NEEDED: dict[str, Callable[[str, Row], bool]] = {  # by setting: whether a row has need of it
    "splits": lambda function, row: bool(row["counts"]),
    "rowwise": lambda function, row: row["direction"] == "columnwise",
    "columnwise": lambda function, row: row["direction"] != "rowwise",
    "state": lambda function, row: row["scaling"] == "delayed",
    "noise": lambda function, row: function in BACKWARD and row["scaling"] == "nvfp4",
    "round_before_quantize": lambda function, row: row["rounded"],
    **{name: lambda function, row, name=name: bool(row.get(name)) for name in ("kind", *_SETTINGS, "probs")},  # type: ignore[misc]
}


def _sized(row: Row) -> dict[str, Any]:
    counts = row["counts"]
    return {
        "tokens": sum(counts) if counts else WHOLE,
        "experts": len(counts),
        "counts": counts,
        "width": WIDTH.get(row["scaling"], 6),
    }


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    return QuantizedActivationCase(function=function, **fields | _sized(fields))
