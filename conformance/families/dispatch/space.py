"""Cases of dispatchers beyond their axes: worlds, sizes of buffers, and one case per law."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes, sizes
from conformance.core.case import Case
from conformance.core.model_sizes import EXPERTS, FEW_ROWS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.space import ALIGNMENTS
from conformance.families.dispatch.cases import MAPPED, SPREADS, DispatchCase
from conformance.families.dispatch.hybridep import RECIPES
from conformance.families.dispatch.values_of_wire import SCALE_DTYPES
from conformance.families.permutation.space import DEEPEP_LAYOUT as DEEPEP_LAYOUT

SHARED_CASES = 3  # rows of the covering array, per function and number of ranks that share GPUs
SHARED_ONE_IN = 5  # random cases of ranks that share GPUs
WORLDS = ((5,), (4, 3), (3, 0, 4), (2, 3, 0, 4))
ROOMS: dict[str, list[Changes]] = {
    "allgather": [{}, {"slack": -1}, {"slack": 2}],
    "alltoall": [{}, {"capacity": 2}, {"slack": -2}, {"slack": 2}],
    "hybridep": [{}, {"align": 4}, {"slack": -2}, {"align": 2, "slack": 3}, {"align": 4, "slack": -1}],
    "deepep": [{}, {"align": 4}, {"slack": 2, "trusted": True}],
    "deepep_low_latency": [{}, {"slack": 2, "trusted": True}],
}
# settings that fix all sizes
NCCL_ALONE = "host_sync"  # a law that ranks on one GPU cannot keep: their transport waits
SIZED: dict[str, Changes] = {
    **{name: {"slack": -1} for name in MAPPED},
    **{name: {"slack": 2, "trusted": True} for name in ("deepep", "deepep_low_latency")},
}
SEQUENCES = {  # the calls of a case of the law `sequence`; the machine of handles grows others
    **dict.fromkeys(("allgather_dispatch", "alltoall_dispatch"), "send+send+first+back+first"),
    **dict.fromkeys(("deepep_dispatch", "hybridep_dispatch"), "send+again+send+first+wider+back"),
}


def dispatcher_of(scope: Scope) -> str:
    return DispatchCase(function=scope.function).dispatcher


# ---- random cases


@st.composite
def worlds(draw: st.DrawFn, scope: Scope) -> Changes:
    """Ranks, their tokens and their experts."""
    space = scope.space
    shared = space.shared_ranks > space.ranks and not draw(st.integers(0, SHARED_ONE_IN - 1))
    ranks = draw(st.integers(space.ranks + 1, space.shared_ranks) if shared else st.integers(1, space.ranks))
    small_counts = st.integers(0, 6)
    count = (
        small_counts
        if shared
        else st.one_of(st.just(0), small_counts, small_counts, small_counts, sizes(0, space.many // 8))
    )
    counts = tuple(draw(st.lists(count, min_size=ranks, max_size=ranks)))
    held = draw(draw(st.sampled_from((*(st.integers(1, 4),) * 9, st.sampled_from((9, 33, 64))))))
    split = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4) if ranks % n == 0])) if "shards" in scope.live else 1
    topk = draw(st.integers(1, min(held * ranks // split, 8)))
    return {"counts": counts, "local_experts": held, "shards": split, "topk": topk}


@st.composite
def rooms(draw: st.DrawFn, scope: Scope) -> Changes:
    """Sizing of buffers."""
    capacity = draw(st.sampled_from((0, 0, 1, 2, 5)))
    room = st.none() | st.integers(-3 if dispatcher_of(scope) in MAPPED else 0, 3)
    return {
        "capacity": capacity,
        "align": draw(st.sampled_from((0, 0, *ALIGNMENTS))),
        "slack": None if capacity and dispatcher_of(scope) == "alltoall" else draw(room),
    }


@st.composite
def codes(draw: st.DrawFn, scope: Scope, ranks: int) -> Changes:
    """Plain rows or, for two dispatches, codes and scales."""
    plain_rows = {"fp8": "", "hidden": draw(st.one_of(st.integers(1, 9), st.integers(1, 9), sizes(1, 70)))}
    if "fp8" not in scope.live:
        return plain_rows
    if dispatcher_of(scope) == "hybridep":
        fp8 = draw(st.sampled_from(("", "", *RECIPES)))
        return {"fp8": fp8, "hidden": draw(st.one_of(st.integers(0, 9), sizes(120, 300)))} if fp8 else plain_rows
    fp8 = draw(st.sampled_from(("", "fp8", "powers")))
    held = draw(st.integers(1, 2))
    small_world = {"local_experts": held, "topk": draw(st.integers(1, min(held * ranks, 8)))}
    return small_world | {"fp8": fp8, "hidden": 128 * draw(st.integers(0, 2))} if fp8 else plain_rows


@st.composite
def dispatches(draw: st.DrawFn, scope: Scope) -> Changes:
    """Any dispatcher's function."""
    fields = draw(worlds(scope)) | draw(rooms(scope)) | {"slots": None, "spread": draw(st.sampled_from(SPREADS))}
    fields |= draw(codes(scope, len(fields["counts"])))
    fields["values"] = draw(st.sampled_from(("dyadic", "integers", "integers", "special", "wide", "reciprocals")))
    differentiable = scope.function not in scope.space.not_differentiable
    if dispatcher_of(scope) != "deepep_low_latency" and differentiable and not draw(st.integers(0, 4)):
        # needed by adjointness, rare otherwise
        plain_values = {"dtype": "float32", "values": "integers", "slack": None, "biases": 0, "unused": ""}
        return fields | plain_values | {"grads": scope.signature.gradients[0]}
    return fields


@st.composite
def groups(draw: st.DrawFn, scope: Scope) -> Changes:
    """Groups that divide the experts, and their shards."""
    held, count, shards = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens = draw(sizes(0, scope.space.many // 8))
    return {"tokens": tokens, "experts": held * count, "groups": count, "shards": shards}


def near(case: DispatchCase, scope: Scope) -> DispatchCase:
    """The case without a far layout, because far layouts have cases of their own."""
    return replace(case, layout="contiguous", layout_of="") if case.layout.startswith("wide") else case


# ---- chosen cases

SIXTEEN_BITS: Changes = {"dtype": "bfloat16", "probs": "float32"}
DOUBLES: Changes = {"dtype": "float64", "probs": "float64", "values": "wide"}
NO_PROBS: Changes = {"dtype": "bfloat16", "probs": ""}
CROWDED: Changes = {"topk": 3, "spread": "skewed"}
AT_SCALES: Changes = {"values": "scales", "hidden": 256, "local_experts": 2, "topk": 2}


def together(scope: Scope) -> dict[str, list[Changes]]:
    """Buffer sizes as one axis; few layouts, because a case costs several processes."""
    main, *_ = scope.signature.inputs
    strided = [name for name, dims in scope.signature.placed.items() if dims]
    layouts = [("contiguous", ""), ("transposed", main.name), *(("strided", name) for name in strided)]
    fp8: list[Changes] = [{}]
    if dispatcher_of(scope) == "deepep_low_latency":
        fp8 += [{"fp8": name, "hidden": 128} for name in ("fp8", "powers")]
    axes = {
        "counts": [{"counts": counts} for counts in WORLDS if len(counts) <= scope.space.ranks],
        "room": ROOMS.get(dispatcher_of(scope), [{}]),
        "layout": [{"layout": layout, "layout_of": name} for layout, name in layouts],
        "unused": [{"unused": ""}],
        "fp8": fp8 if "fp8" in scope.live else [{"fp8": ""}],
    }
    if not scope.signature.producer:
        return axes
    # the dispatch, tested separately, has spread the rows
    return axes | {"spread": [{"spread": spread} for spread in SPREADS[::2]], "scales": [{"scales": 0}]}


# each recipe with padding, with and without room, in every dtype, and special values
AS_CODES: tuple[Changes, ...] = (
    {"fp8": "least", "dtype": "bfloat16", "local_experts": 4, "topk": 4, "spread": "ragged", "align": 4, "slack": 2},
    {"fp8": "fp8", "spread": "same", "slack": 2},
    {"fp8": "fp8", "dtype": "bfloat16", "values": "wide", "align": 4},
    {"fp8": "powers", "dtype": "float16", "spread": "skewed", "align": 4, "slack": -2},
    {"fp8": "least", "values": "special", "spread": "one_rank", "align": 4},
    {"fp8": "fp8", "values": "reciprocals", "seed": 2},
    {"fp8": "powers", "values": "reciprocals", "dtype": "bfloat16", "align": 4},
    {"fp8": "powers", "dtype": "bfloat16", "spread": "local", "local_experts": 33, "topk": 8},
)


_MAPS: tuple[Changes, ...] = tuple(
    {"tokens": 5, "experts": 4, "groups": 2, "shards": 2, "dtype": dtype} for dtype in ("bool", "int64", "uint8")
)


def _of_deepep(small_world: Changes, ranks: int, several: int) -> list[Changes]:
    """Cases of DeepEP: dropped slots of probability 0, rows of 8 bits, a room that the caller
    guarantees, and scales of each dtype.
    """
    dropped: Changes = small_world | {
        "counts": (5, 4)[:ranks],
        "probs": "float32",
        "zero_probs": True,
        "drop_zeros": True,
    }
    packed: Changes = {"values": "reciprocals", "scales": 3, "hidden": 5, "dtype": "float8_e4m3fn"}
    codes_: Changes = small_world | {"counts": (5, 4)[:ranks], "hidden": 5}
    token_counts, far_apart = (2, 1)[:ranks], (3, 0, 1, 2, 4, 3)
    distant: Changes = {"counts": token_counts, "local_experts": 5, "topk": 6, "slots": far_apart * sum(token_counts)}
    return [
        dropped,
        *(distant | {"repeats": repeats} for repeats in ("last slot", "count each")),
        dropped | {"repeats": "count each"},
        dropped | {"repeats": "last slot", "scales": 3},
        dropped | {"values": "special", "seed": 3},
        small_world | {"counts": (5, 4)[:ranks]} | packed,
        small_world | {"counts": (5, 4)[:several], "probs": "float32", "align": 4, "slack": 2, "trusted": True},
        *(codes_ | {"scale_dtype": dtype, "scales": 3} for dtype in SCALE_DTYPES),
        codes_ | {"scales": 4, "seed": 2},  # 16 bytes of a row, which may travel at once
    ]


def shapes(scope: Scope) -> list[Any]:
    """Cases of all ranks: more than one block of tokens, more experts than a warp has lanes, and
    wide rows.
    """
    small_world: Changes = {"local_experts": 2, "topk": 2}
    common: Changes = {"probs": "bfloat16", "seed": 1, "scales": 0, "biases": 0}
    ranks, several = scope.space.ranks, scope.space.most_ranks  # several may share a GPU
    wide_hidden = 4097 if scope.space.device == "cuda" else 513
    rows = [
        # more tokens of a rank, and more rows for one, than 8 bits count
        small_world | {"counts": (max(scope.space.many // 4, 260), *(3,) * (ranks - 1)), "hidden": 3} | CROWDED,
        {"counts": (2,) * ranks, "local_experts": 33, "topk": 8, "hidden": 3},
        small_world | {"counts": (3,) * ranks, "hidden": wide_hidden},
        # each rank adds one row of a token: sums of some ranks are no numbers of 16 bits
        {"counts": (3,) * several, "local_experts": 1, "topk": several, "hidden": 65} | SIXTEEN_BITS,
    ]
    if scope.function.endswith("_combine"):  # float64 has an accumulator of its own
        doubled: Changes = {"counts": (5, 2)[:ranks], "local_experts": 3, "topk": 3, "hidden": 33} | DOUBLES
        rows += [doubled, *([doubled | {"dtype": "float32"}] if "probs" in scope.live else [])]
    else:
        rows.append({"counts": (5, 2)[:ranks], "local_experts": 3, "topk": 3, "hidden": 5} | DOUBLES)
    if scope.function == "allgather_combine":  # sums of ranks by the dtype of the probs
        fine: Changes = {"dtype": "float32", "probs": "float64", "values": "wide", "slack": 2}
        rows.append({"counts": (3,) * several, "local_experts": 1, "topk": several, "hidden": 65} | fine)
    if scope.function == "alltoall_combine" and several > 2:
        sharded: Changes = {"counts": (3,) * several, "shards": several, "local_experts": 2, "topk": 2, "hidden": 65}
        rows.append(sharded | NO_PROBS)
    if scope.function == "deepep_low_latency_combine":  # a probability of 0 hides no NaN
        rows.append(small_world | {"counts": (5, 2)[:ranks], "hidden": 33, "values": "special", "zero_probs": True})
    if scope.function in [f"{name}_dispatch" for name in MAPPED]:  # a budget of no row
        rows.append({"counts": (2, 1)[:ranks], "local_experts": 1, "topk": 1, "hidden": 3, "slack": -3})
        last: Changes = {"counts": (*(0,) * (ranks - 1), 260), "local_experts": 1, "topk": 1, "hidden": 3}
        rows.append(last | {"spread": "same", "slack": -1})  # a token behind 255 others of its rank has no room
    if dispatcher_of(scope) == "hybridep" and ranks > 1:  # the only token has the number of the budget's rows
        lone_token: Changes = {"counts": (4, 0), "local_experts": 1, "topk": 1, "hidden": 3}
        rows.append(lone_token | {"slots": (-1, -1, -1, 1), "slack": 2})
    if scope.function in ("allgather_dispatch", "alltoall_dispatch"):  # gradients of many copies, on one rank too
        copies: Changes = {"local_experts": 5, "topk": 5, "hidden": 65, "grads": "tokens"} | SIXTEEN_BITS
        rows.append({"counts": (3, 2)[:ranks], "spread": "local"} | copies)
    if scope.function == "deepep_dispatch":
        rows += _of_deepep(small_world, ranks, several)
    if dispatcher_of(scope) == "deepep_low_latency" and "fp8" in scope.live and not scope.signature.producer:
        forms: tuple[Changes, ...] = ({}, {"fp8": "powers"}, {"values": "reciprocals"}, {"dtype": "float16"})
        rows += [AT_SCALES | {"counts": (5, 2)[:ranks], "fp8": "fp8"} | form for form in forms]
    if scope.function != "hybridep_dispatch" or not scope.accepts("recipe"):
        return [common | row for row in rows]
    coded = common | small_world | {"hidden": 130, "counts": (4, 0, 3, 2)[:ranks]}
    forwards = [
        replace(scope.fullest(coded | row), grads="") for row in (AS_CODES[0], AS_CODES[1] | {"hidden": wide_hidden})
    ]
    static = [
        replace(case, law=law if law in scope.laws(case) else "")
        for case, law in zip(forwards, ("host_sync", "graph_capture"), strict=True)
    ]
    return [*(common | row for row in rows), *(coded | row for row in AS_CODES[2:]), *static]


def more_cases(scope: Scope, other_cases: list[Case]) -> list[Case]:
    """Cases of laws.

    Where ranks share GPUs, also the first cases of the covering array of several GPUs for each
    number of ranks that share them: the first ones cover the most pairs.
    """
    space = scope.space
    if space.shared_ranks <= space.ranks:
        return law_cases(scope, other_cases)
    whole_scope = replace(scope, space=replace(space, ranks=space.shared_ranks, shared_ranks=0))
    covering: list[Any] = whole_scope.covering().cases
    shared = [
        case
        for ranks in range(space.ranks + 1, space.shared_ranks + 1)
        for case in [case for case in covering if case.ranks == ranks][:SHARED_CASES]
    ]
    laws = [case for case in law_cases(whole_scope, [*other_cases, *shared]) if case.law != NCCL_ALONE]
    return shared + laws + [case for case in law_cases(scope, other_cases) if case.law == NCCL_ALONE]


def law_cases(scope: Scope, other_cases: list[Case]) -> list[Case]:
    """A small plain case for each law that no other case checks with several ranks and rows."""
    counts = (3, 2)[: scope.space.ranks]
    some: Changes = {"counts": counts, "local_experts": 2, "topk": 2, "hidden": 3, "values": "integers", "seed": 1}
    plain_case = scope.mended(scope.case(some | {"probs": "float32"}))
    sequence = {"journey": SEQUENCES.get(scope.function, "")}
    sized = {name: x for name, x in SIZED[plain_case.dispatcher].items() if name in scope.live}
    changes: tuple[Changes, ...] = (
        *({}, sized),
        *({"grads": scope.signature.gradients[0]}, sequence),
    )
    checked_laws = {
        case.law
        for case in other_cases
        if isinstance(case, DispatchCase) and case.spread != "empty" and case.ranks >= plain_case.ranks
    }
    cases_by_law: dict[str, Case] = {}
    for case in (replace(plain_case, **changed_fields) for changed_fields in changes):
        for law in scope.laws(case) if scope.fits(case) else ():
            cases_by_law.setdefault(law, replace(case, law=law))
    return [case for law, case in cases_by_law.items() if law not in checked_laws]


COLLECTIVE = Shapes(
    drawn=dispatches,
    affordable=near,
    covered={"counts": WORLDS[0], "local_experts": 2, "hidden": 5, "topk": 2, "probs": "bfloat16"},
    together=together,
    more=more_cases,
    always=shapes,
    far={"counts": (3,), "topk": 2, "dtype": "bfloat16", "probs": "bfloat16", "seed": 1, "biases": 0},
    illegal={"counts": lambda scope: (2, 1)[: scope.space.ranks]},
    weight=0.25,
)
FLATTEN_EXPERTS = Shapes(
    drawn=groups,
    covered={"tokens": 5, "experts": 6},
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    together=lambda scope: {"groups": [{"groups": groups} for groups in (1, 2, 3)]},
    always=lambda scope: [{"tokens": scope.space.many // 4, "experts": 12, "groups": 4, "shards": 3}, *_MAPS],
    far={"experts": 4, "groups": 2, "shards": 2},
    tall={"experts": 2},
)
ALLGATHER_DISPATCH = ALLGATHER_COMBINE = ALLTOALL_DISPATCH = ALLTOALL_COMBINE = COLLECTIVE
DEEPEP_DISPATCH = DEEPEP_CACHED_DISPATCH = DEEPEP_COMBINE = COLLECTIVE
DEEPEP_LOW_LATENCY_DISPATCH = DEEPEP_LOW_LATENCY_COMBINE = COLLECTIVE
HYBRIDEP_DISPATCH = HYBRIDEP_CACHED_DISPATCH = HYBRIDEP_COMBINE = COLLECTIVE
