"""The finite axes of dispatchers."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, MAP_DTYPES, POISONS, Space
from conformance.families.dispatch.cases import FUNCTIONS, MAPPED, SPREADS, DispatchCase
from conformance.families.dispatch.space import (
    INDEX_DTYPES,
    differentiated,
    dispatcher_of,
    has_probs,
    inputs_of,
    is_dispatch,
    takes,
)

Row = dict[str, Any]
ROOM: dict[str, Row] = {
    "": {},
    "align": {"align": 4},
    "capacity": {"capacity": 2},
    "tight": {"slack": -2},
    "ample": {"align": 2, "slack": 3},
    "worst": {"slack": 2},
}
ROOMS = {
    "alltoall": ("", "capacity"),
    "hybridep": ("", "align", "tight", "ample"),
    "deepep": ("", "align", "worst"),
    "deepep_low_latency": ("", "worst"),
}
WORLDS = {"one": (5,), "two": (4, 3), "three": (3, 0, 4), "four": (2, 3, 0, 4)}


def _axes(function: str) -> dict[str, tuple[Any, ...]]:
    dispatcher, main = dispatcher_of(function), "tokens" if is_dispatch(function) else "rows"
    probs = has_probs(function, Space())
    inputs = inputs_of(function, probs[-1], 1, main)
    given = differentiated(function, probs[-1])
    routes = is_dispatch(function) and "cached" not in function
    axes: dict[str, tuple[Any, ...]] = {
        "world": tuple(WORLDS),
        "spread": SPREADS
        if routes
        else SPREADS[::2],  # what goes back has been spread by dispatch, which is judged for itself
        "dtype": (*DTYPES, "float8_e4m3fn") if routes else DTYPES[:2],
        "values": ("dyadic", "integers", "special"),
        "layout": (
            ("contiguous", ""),
            ("transposed", main),
            *(("strided", of) for of in inputs),
        ),  # others are drawn: a case has several processes
        "grads": ("", main, *(("probs", f"{main}+probs") if len(given) > 1 else ())),
        "poison": POISONS,
    }
    axes |= (
        {"map_dtype": MAP_DTYPES}
        if dispatcher in MAPPED
        else {"index_dtype": INDEX_DTYPES, "repeats": ("", "count each", "last slot")}
    )
    axes |= {"probs": probs} if len(probs) > 1 else {}
    axes |= {"room": ROOMS[dispatcher]} if dispatcher in ROOMS else {}
    axes |= {"shards": (1, 2)} if dispatcher in ("allgather", "alltoall") else {}
    axes |= {"biases": (0, 1, 2)} if function == "deepep_combine" else {}
    axes |= {"scales": (0, 3)} if function == "deepep_dispatch" else {}
    return axes | ({"fp8": ("", "fp8", "powers")} if function == "deepep_low_latency_dispatch" else {})


AXES = {function: _axes(function) for function in FUNCTIONS}
NEEDED = {  # settings of a dispatch, by the field that asks for them
    "hybridep": {"align": "align", "slack": "num_rows"},
    "deepep": {"align": "expert_alignment", "slack": "num_worst_tokens", "repeats": "policy", "scales": "scales"},
    "deepep_low_latency": {"repeats": "policy", "fp8": "use_fp8"},
    "alltoall": {"capacity": "capacity"},
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    dispatcher = dispatcher_of(function)
    needed, room = NEEDED.get(dispatcher, {}), ROOM[row.get("room", "")]
    asked = [
        setting
        for name, setting in needed.items()
        if (room.get(name) if name in ("align", "capacity", "slack") else row.get(name)) not in (None, 0, "")
    ]
    asked += ["expert_tensor_parallel"] if row.get("shards", 1) > 1 else []
    ranks = len(WORLDS[row["world"]])
    return (
        ranks <= space.ranks
        and ranks % row.get("shards", 1) == 0
        and all(space.accepts(f"{dispatcher}_dispatch", name) for name in asked)
        and (row.get("fp8") != "powers" or space.accepts(function, "round_scale"))
        and (not row.get("biases") or space.accepts(function, "biases"))
        and (not row.get("probs") or dispatcher == "deepep_low_latency" or takes(function, space, "probs"))
        and not ("probs" in row["grads"] and row.get("probs") == "")
        and not (row["grads"] and row["dtype"] == "float8_e4m3fn")
        and not (row.get("fp8") and (row["grads"] or row["dtype"] == "float8_e4m3fn" or row["values"] == "special"))
        and _lies_somewhere(function, row)
    )


def _lies_somewhere(function: str, row: Row) -> bool:
    """Whether the call has what the layout is of."""
    of = row["layout"][1]
    if of in ("", "tokens", "rows", "routing_map", "indices"):
        return True
    if of == "scales":
        return bool(row["scales"])
    return ((of != "probs" and of != "d_probs") or row.get("probs") != "") and not (
        of.startswith("d_") and not row["grads"]
    )


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    named = (
        {name: x for name, x in fields.items() if name not in ("world", "room")}
        | ROOM[fields.get("room", "")]
        | {"counts": WORLDS[fields["world"]]}
    )
    common = {
        "local_experts": 2,
        "hidden": 128 if fields.get("fp8") else 5,
        "topk": 2,
        "probs": has_probs(function, Space())[-1],
    }
    return DispatchCase(function=function, **common | named)


def row_of(case: Any) -> Row:
    """The values of the axes that a case of a covering array stands for."""
    fields = {axis: getattr(case, axis) for axis in AXES[case.function] if axis not in ("layout", "room", "world")}
    fields |= {
        "layout": (case.layout, case.layout_of),
        "world": next(name for name, counts in WORLDS.items() if counts == case.counts),
    }
    if "room" in AXES[case.function]:
        plain = {"align": 0, "capacity": 0, "slack": None}
        shown = {name: getattr(case, name) for name in plain}
        fields["room"] = next(name for name in ROOMS[case.dispatcher] if plain | ROOM[name] == shown)
    return fields
