"""Cases of dispatchers: worlds of every size that there is room for, with ranks that have nothing, and routings of every kind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import ALIGNMENTS, DTYPES, LAYOUTS, MAP_DTYPES, MOVED_DTYPES, Space, mostly, sizes, some_of
from conformance.families.dispatch.cases import MAPPED, SPREADS, DispatchCase
from conformance.families.dispatch.hybridep import RECIPES
from conformance.families.experts.space import finished

Row = dict[str, Any]
INDEX_DTYPES = ("int64", "int32")


def dispatcher_of(function: str) -> str:
    return DispatchCase(function=function).dispatcher


def is_dispatch(function: str) -> bool:
    return function.endswith("dispatch")


def is_cached(function: str) -> bool:
    return "cached" in function


def takes(function: str, space: Space, setting: str) -> bool:
    """Whether the function, and the dispatch that it comes after, have the setting."""
    before = f"{dispatcher_of(function)}_dispatch"
    return all(space.accepts(name, setting) for name in (function, before))


def has_probs(function: str, space: Space) -> tuple[str, ...]:
    """The dtypes that probabilities may have; empty where none need be given."""
    if function == "deepep_low_latency_combine":
        return ("float32", "bfloat16")
    if function == "deepep_low_latency_dispatch":
        return ("",)
    return ("", "float32", "bfloat16") if takes(function, space, "probs") else ("",)


def differentiated(function: str, probs: str) -> tuple[str, ...]:
    """The inputs that may require a gradient."""
    main = "tokens" if is_dispatch(function) else "rows"
    also = probs and not is_cached(function) and function not in ("allgather_combine", "alltoall_combine")
    return (main, "probs") if also else (main,)


def inputs_of(function: str, probs: str, scales: int, grads: str, unused: str = "") -> tuple[str, ...]:
    """Names of inputs and cotangents that a case has, which may lie anyhow."""
    dispatcher, given = dispatcher_of(function), differentiated(function, probs)
    sent = is_dispatch(function) and not is_cached(function)
    routing = (
        ("routing_map",)
        if sent and dispatcher in MAPPED
        else ("indices",)
        if sent or function == "deepep_low_latency_combine"
        else ()
    )
    also = ("scales",) * bool(scales and function == "deepep_dispatch")
    if function == "deepep_low_latency_dispatch":
        returned: tuple[str, ...] = ("ordered",)
    elif function == "deepep_low_latency_combine":
        returned = ("tokens",)
    else:
        returned = tuple({"tokens": "rows", "rows": "tokens"}.get(name, name) for name in given)
    return (*given, *routing, *also, *(f"d_{name}" for name in returned if grads and name != unused))


@st.composite
def worlds(draw: st.DrawFn, space: Space, shards: bool) -> Row:
    """Ranks with their tokens, and their experts."""
    ranks = draw(st.integers(1, space.ranks))
    few = st.integers(0, 6)
    count = st.one_of(st.just(0), few, few, few, sizes(0, space.many // 8))
    counts = tuple(draw(st.lists(count, min_size=ranks, max_size=ranks)))
    held = draw(draw(st.sampled_from((*(st.integers(1, 4),) * 9, st.sampled_from((9, 33, 64))))))
    split = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4) if ranks % n == 0])) if shards else 1
    experts = held * ranks // split
    return {"counts": counts, "local_experts": held, "shards": split, "topk": draw(st.integers(1, min(experts, 8)))}


@st.composite
def rooms(draw: st.DrawFn, function: str, space: Space) -> Row:
    """How buffers are sized."""
    dispatcher = dispatcher_of(function)
    slack = st.none() | st.integers(-3, 3)
    if dispatcher == "alltoall" and takes(function, space, "capacity"):
        return {"capacity": draw(st.sampled_from((0, 0, 1, 2, 5)))}
    room: Row = {}
    names = {"hybridep": ("align", "num_rows"), "deepep": ("expert_alignment", "num_worst_tokens")}.get(
        dispatcher, ("", "")
    )
    if names[0] and space.accepts(f"{dispatcher}_dispatch", names[0]):
        room["align"] = draw(st.sampled_from((0, 0, *ALIGNMENTS)))
    if names[1] and space.accepts(f"{dispatcher}_dispatch", names[1]):
        room["slack"] = draw(slack) if dispatcher == "hybridep" else draw(st.none() | st.integers(0, 3))
    return room | ({"slack": draw(st.none() | st.integers(0, 3))} if dispatcher == "deepep_low_latency" else {})


@st.composite
def dispatch_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """Any function of a dispatcher."""
    dispatcher, before = dispatcher_of(function), f"{dispatcher_of(function)}_dispatch"
    fields: Row = draw(
        worlds(space, dispatcher in ("allgather", "alltoall") and space.accepts(before, "expert_tensor_parallel"))
    ) | draw(rooms(function, space))
    fields |= {
        "spread": draw(st.sampled_from(SPREADS)),
        "hidden": draw(st.one_of(st.integers(1, 9), st.integers(1, 9), sizes(1, 70))),
    }
    fp8 = [""]
    if function == "deepep_low_latency_dispatch" and space.accepts(function, "use_fp8"):
        fp8 += ["fp8", *(["powers"] if space.accepts(function, "round_scale") else [])]
    if function == "hybridep_dispatch" and space.accepts(function, "recipe"):
        fp8 = ["", "", *RECIPES]
    fields["fp8"] = draw(st.sampled_from(fp8))
    if fields["fp8"] and dispatcher == "hybridep":
        fields["hidden"] = draw(st.one_of(st.integers(0, 9), sizes(120, 300)))
    elif fields["fp8"]:
        fields |= {"hidden": 128 * draw(st.integers(0, 2)), "local_experts": min(fields["local_experts"], 2)}
        fields["topk"] = min(fields["topk"], fields["local_experts"] * len(fields["counts"]))
    copies = is_dispatch(function) and not fields["fp8"]
    fields["dtype"] = draw(st.sampled_from((*DTYPES, *MOVED_DTYPES) if copies else DTYPES))
    fields["probs"] = draw(st.sampled_from(has_probs(function, space)))
    fields["zero_probs"] = draw(st.booleans()) if fields["probs"] else False
    styles = [
        *(["special"] if not fields["fp8"] or dispatcher == "hybridep" else []),
        *(["wide"] if fields["dtype"] != "float16" else []),
    ]
    fields["values"] = draw(st.sampled_from(("dyadic", "integers", "integers", *styles)))
    if dispatcher in MAPPED:
        fields["map_dtype"] = draw(st.sampled_from(MAP_DTYPES))
    else:
        fields["index_dtype"] = draw(st.sampled_from(INDEX_DTYPES))
        fields |= draw(policies(function, space, fields["probs"]))
    if dispatcher == "deepep" and space.accepts(before, "scales"):
        fields["scales"] = draw(st.sampled_from((0, 0, 1, 3)))
    if function == "deepep_combine" and space.accepts(function, "biases"):
        fields["biases"] = draw(st.integers(0, 2))
    if (
        function not in space.not_differentiable
        and fields["dtype"] in DTYPES
        and (not fields["fp8"] or dispatcher == "hybridep")
    ):
        given = differentiated(function, fields["probs"])
        fields["grads"] = draw(some_of(given))
        if (
            fields["grads"]
            and len(given) > 1
            and function != "deepep_low_latency_combine"
            and not draw(st.integers(0, 3))
        ):
            fields["unused"] = draw(st.sampled_from(("tokens" if given[0] == "rows" else "rows", "probs")))
    if (
        fields.get("grads") and dispatcher != "deepep_low_latency" and not draw(st.integers(0, 2))
    ):  # as adjointness needs it: rare otherwise
        fields |= {
            "grads": given[0],
            "unused": "",
            "dtype": "float32",
            "values": "integers",
            "slack": None,
            "biases": 0,
        }
    case = DispatchCase(function=function, **fields)
    if not draw(st.integers(0, 3)) and function not in space.contiguous_only:
        case = replace(case, layout=draw(st.sampled_from(LAYOUTS[1:])), layout_of=draw(st.sampled_from(_inputs(case))))
    return finished(draw, case, space)


def _inputs(case: DispatchCase) -> tuple[str, ...]:
    return inputs_of(case.function, case.probs, case.scales, case.grads, case.unused)


@st.composite
def policies(draw: st.DrawFn, function: str, space: Space, probs: str) -> Row:
    """What becomes of experts that a token names twice, and of probabilities 0."""
    if not space.accepts(f"{dispatcher_of(function)}_dispatch", "policy"):
        return {}
    drop = {"drop_zeros": draw(mostly("", ("yes",))) == "yes"} if probs and dispatcher_of(function) == "deepep" else {}
    return {"repeats": draw(mostly("", ("count each", "last slot")))} | drop


def dispatch_shapes(function: str, space: Space) -> list[Row]:
    """More tokens than one block of any kernel, more experts than a warp has lanes, and wide rows; on as many ranks as there are."""
    long = (space.many // 4, *(3,) * (space.ranks - 1))
    probs = has_probs(function, space)[-1]
    common: Row = {
        "probs": probs,
        "seed": 1,
        "grads": "" if function in space.not_differentiable else "+".join(differentiated(function, probs)),
    }
    wide = 4097 if space.device == "cuda" else 513
    found = [
        common | {"counts": long, "local_experts": 2, "topk": 2, "hidden": 3},
        common | {"counts": (2,) * space.ranks, "local_experts": 33, "topk": 8, "hidden": 3},
        common | {"counts": (3,) * space.ranks, "local_experts": 2, "topk": 2, "hidden": wide},
    ]
    if function == "hybridep_dispatch" and space.accepts(function, "recipe"):
        found += [common | row | {"counts": (4, 0, 3, 2)[: space.ranks]} for row in as_codes(space, wide)]
    return found


def as_codes(space: Space, wide: int) -> list[Row]:
    """Rows that travel as codes and scales: each recipe with padding, with and without room, in every dtype, and where values are strange."""
    padded: Row = {"align": 4} if space.accepts("hybridep_dispatch", "align") else {}
    tight: Row = {"slack": -2} if space.accepts("hybridep_dispatch", "num_rows") else {}
    ample: Row = {"slack": 2} if space.accepts("hybridep_dispatch", "num_rows") else {}
    few: Row = {"local_experts": 2, "topk": 2, "hidden": 130}
    return [
        few | {"fp8": "fp8", "dtype": "bfloat16", "values": "wide"} | padded,
        few | {"fp8": "powers", "dtype": "float16", "spread": "skewed"} | padded | tight,
        few
        | {"fp8": "least", "dtype": "bfloat16", "local_experts": 4, "topk": 4, "spread": "ragged", "grads": ""}
        | padded
        | ample,
        few | {"fp8": "least", "values": "special", "spread": "one_rank"} | padded,
        few | {"fp8": "fp8", "spread": "same", "hidden": wide, "grads": ""} | ample,
        few | {"fp8": "powers", "dtype": "bfloat16", "spread": "local", "local_experts": 33, "topk": 8},
    ]


SIZED: dict[
    str, tuple[str, Row]
] = {  # the setting that fixes all sizes, and a case that has it; of HybridEP one in which the fullest rank overflows
    "alltoall": ("capacity", {"capacity": 2}),
    "deepep": ("num_worst_tokens", {"slack": 2}),
    "hybridep": ("num_rows", {"slack": -1}),
}


def law_cases(function: str, space: Space, others: Sequence[Case]) -> list[Case]:
    """A small plain case for each law that none of the others asks of several ranks with rows."""
    some: Row = {
        "counts": (3, 2)[: space.ranks],
        "local_experts": 2,
        "topk": 2,
        "hidden": 3,
        "values": "integers",
        "seed": 1,
    }
    plain = DispatchCase(function=function, probs="float32" if "float32" in has_probs(function, space) else "", **some)
    setting, room = SIZED.get(plain.dispatcher, ("", {}))
    possible = [plain]
    if setting and space.accepts(f"{plain.dispatcher}_dispatch", setting):
        possible.append(replace(plain, **room))
    if function not in space.not_differentiable:
        possible.append(replace(plain, grads=differentiated(function, "")[0]))
    asked = {
        case.law
        for case in others
        if isinstance(case, DispatchCase) and case.spread != "empty" and case.ranks >= plain.ranks
    }
    found: dict[str, Case] = {}
    for case in possible:
        for law in space.laws(case):
            found.setdefault(law, replace(case, law=law))
    return [case for law, case in found.items() if law not in asked]


def far_dispatch(function: str, space: Space) -> list[Case]:
    """Three tokens on one rank, every input and cotangent once with far rows and once with far columns."""
    probs = has_probs(function, space)[-1]
    grads = "" if function in space.not_differentiable else "+".join(differentiated(function, probs))
    scales = (
        3
        if dispatcher_of(function) == "deepep" and space.accepts(f"{dispatcher_of(function)}_dispatch", "scales")
        else 0
    )
    plain = DispatchCase(
        function=function,
        counts=(3,),
        local_experts=3,
        topk=2,
        hidden=3,
        dtype="bfloat16",
        probs=probs,
        grads=grads,
        scales=scales,
        seed=1,
    )
    dims = {"rows": 3 if function == "deepep_low_latency_combine" else 2, "d_ordered": 3}
    if dispatcher_of(function) in MAPPED:
        vectors = ("probs", "d_probs") if function.endswith("combine") else ("d_probs",)
        dims |= dict.fromkeys(vectors, 1)
    if function == "hybridep_combine":
        dims["d_probs"] = 2
    layouts = ("wide_rows", "wide_columns", "wide_depth")
    return [
        replace(plain, layout=layout, layout_of=name)
        for name in _inputs(plain)
        for layout in layouts[: dims.get(name, 2)]
    ]
