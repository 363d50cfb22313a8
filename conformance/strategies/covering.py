"""Covering arrays: every pair of values of the small finite axes stands in some case.

Greedy, and deterministic: of some candidates made from the first uncovered pair, take the one that covers most pairs.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conformance.case import Case
from conformance.contracts.chunks import ChunksCase
from conformance.contracts.routing import RoutingCase
from conformance.contracts.routing_map import IndicesCase
from conformance.strategies.space import DTYPES, LAYOUTS, MAP_DTYPES, POISONS, Space

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
CANDIDATES = 12


@dataclass(frozen=True)
class Covered:
    """A covering array and what it covers."""

    cases: list[Case]
    pairs: int  # pairs of values that some legal case has
    impossible: int  # pairs that no candidate could have


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    return itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2)


def covering(axes: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool]) -> tuple[list[Row], int, int]:
    """Rows that have every legal pair of values; the number of pairs they have, and of those that no legal row was found for."""
    source = random.Random(0)
    every = [dict((a, b)) for x, y in itertools.combinations(sorted(axes), 2) for a in _values(axes, x) for b in _values(axes, y)]
    uncovered = {next(pairs_of(pair)): pair for pair in every}
    rows: list[Row] = []
    impossible = 0
    while uncovered:
        wanted = next(iter(uncovered.values()))
        made = [row for row in (_completed(axes, wanted, source) for _ in range(20 * CANDIDATES)) if legal(row)][:CANDIDATES]
        if not made:
            impossible += 1
            del uncovered[next(pairs_of(wanted))]
            continue
        best = max(made, key=lambda row: sum(pair in uncovered for pair in pairs_of(row)))
        rows.append(best)
        for pair in pairs_of(best):
            uncovered.pop(pair, None)
    return rows, len(every) - impossible, impossible


def _values(axes: Mapping[str, tuple[Any, ...]], name: str) -> list[tuple[str, Any]]:
    return [(name, value) for value in axes[name]]


def _completed(axes: Mapping[str, tuple[Any, ...]], fixed: Row, source: random.Random) -> Row:
    return {name: fixed.get(name, source.choice(values)) for name, values in axes.items()}


ROUTING = (0b0110, 0b0001, 0b0000, 0b1111, 0b0110, 0b0100, 0b1001)  # seven tokens, four experts, one token without any
ROOM: dict[str, Row] = {"": {}, "align": {"align": 4}, "capacity": {"capacity": 3}, "tight": {"slack": -2}, "ample": {"align": 2, "slack": 3}}


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
        "layout": (("contiguous", ""), *((x, of) for of in ("rows", "probs", "d_rows") for x in LAYOUTS[1:]), *SORT_ONLY),
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
    "multihot_to_indices": {
        "dtype": DTYPES,
        "map_dtype": MAP_DTYPES,
        "topk": (1, 2, 4, 6),
        "layout": (("contiguous", ""), *((x, of) for of in ("routing_map", "probs", "d_probs") for x in LAYOUTS[1:])),
        "grads": ("", "probs"),
        "poison": POISONS,
    },
}


def covering_cases(function: str, space: Space) -> Covered:
    """The covering array of a function's axes, in what the implementation accepts; laws go round over its cases."""
    rows, pairs, impossible = covering(AXES[function], lambda row: _legal(function, row, space))
    cases = [_case(function, row, index, space) for index, row in enumerate(rows)]
    return Covered(cases, pairs, impossible)


def _legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    wanted, of = row.get("grads", "").split("+"), row["layout"][1]
    room = ROOM[row.get("room", "")]
    asked = [*(["align"] if "align" in room else []), *(["capacity"] if "capacity" in room else []), *(["num_rows"] if "slack" in room else [])]
    return (
        all(space.accepts("permute", name) for name in asked)
        and (not row.get("probs") or space.accepts(function, "probs"))
        and not (wanted != [""] and function in space.not_differentiable)
        and not (row["layout"][0] != "contiguous" and function in space.contiguous_only)
        and not ("probs" in wanted and row.get("probs") == "")
        and not (of in ("probs", "d_probs") and row.get("probs") == "")
        and not (of.startswith("d_") and wanted == [""])
        and not (row["dtype"] == "float16" and row.get("values") == "wide" if "dtype" in row else False)
        and not (row.get("dtype") == "float8_e4m3fn" and (wanted != [""] or of == "d_rows"))
    )


def _case(function: str, row: Row, index: int, space: Space) -> Case:
    row = dict(row)
    layout, of = row.pop("layout")
    room = ROOM[row.pop("room", "")]
    fields = row | room | {"layout": layout, "layout_of": of, "seed": index}
    if function == "sort_chunks":
        case: Case = ChunksCase(function=function, sizes=(3, 0, 1, 4), order=(2, 0, 3, 1), hidden=5, **fields)
    elif function == "indices_to_multihot":
        case = IndicesCase(function=function, tokens=5, topk=3, experts=6, **fields)
    else:
        case = RoutingCase(function=function, tokens=7, experts=4, hidden=1 if "align" in AXES[function] else 5, routing=ROUTING, **fields)
    laws = space.laws(case)
    return replace(case, law=laws[index % len(laws)])
