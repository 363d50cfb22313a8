"""Spaces of layers: a router, experts and their options, in one process or over ranks."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.model_sizes import FEW_ROWS, MEDIUM_WIDTHS, NARROW_WIDTHS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.shared_out import worlds
from conformance.families.layer.cases import KIND, LayerCase
from conformance.families.layer.layer import SIGNATURE
from conformance.families.router.cases import SCORES
from conformance.families.router.cases_route import KINDS
from moe_ref.config import DISPATCHERS

RANKED_ONE_IN = 5  # one process per rank
RECIPES = ("", "", "", "", "current", "block", "mxfp8", "delayed")
ALIGNED = {"": (0,), "mxfp8": (32,)}  # other recipes: any
MOST_RANKS = 3
GRADIENTS = ("", "x+router_weight")


@st.composite
def layers(draw: st.DrawFn, scope: Scope) -> Changes:
    """Sizes, a router that fits, and ranks that divide the experts."""
    recipe = draw(st.sampled_from(RECIPES))
    long_rows = recipe == "mxfp8"
    sequences = draw(st.sampled_from((1, 1, 2))) if scope.accepts("batch_size") else 1
    counts = draw(ranks(scope, sequences))
    held = draw(st.integers(1, 4))
    shards = 2 if len(counts) == 2 and draw(st.booleans()) else 1
    experts = held * max(len(counts), 1) // shards
    topk = draw(st.integers(1, min(experts, 4)))
    score = draw(st.sampled_from(SCORES[1:] if topk == 1 else SCORES))
    fields: Changes = {
        "counts": counts,
        "tokens": sum(counts) if counts else draw(st.integers(1, 12 // sequences)) * sequences,
        "hidden": draw(st.integers(1, 2 if long_rows else 12)),
        "width": shards * draw(st.integers(1, 2 if long_rows else 9)),
        "latent": draw(st.sampled_from((0, 0, 1) if long_rows else (0, 0, 1, 3, 5))),
        "shared": draw(st.sampled_from((0, 1) if long_rows else (0, 1, 2, 4))),
        "experts": experts,
        "shards": shards,
        "topk": topk,
        "score": score,
        "bias": not score.startswith("softmax") and draw(st.booleans()),
        "recipe": recipe,
        "align": draw(st.sampled_from(ALIGNED.get(recipe, (0, 16, 64, 256)))),
        "kind": draw(st.sampled_from(KIND)),
        "sinkhorn": False,  # a chosen case has it
        "dispatcher": draw(st.sampled_from(DISPATCHERS)),
        "sequences": sequences,
        "groups": 0,
        "group_topk": 0,
    }
    fields |= {"fc2_bias": False, "interleave": draw(st.sampled_from((0, 1)))} if shards > 1 else {}
    fields["gate"] = bool(fields["shared"]) and draw(st.booleans())
    if experts % 2 == 0 and topk % 2 == 0 and experts >= 4 and draw(st.booleans()):
        fields |= {"groups": 2, "group_topk": draw(st.sampled_from((1, 2) if topk <= experts // 2 else (2,)))}
    room = draw(st.sampled_from((0, 0, 1, 4, 12) if counts else (0, 0, 0, 0, 0, 1, 9)))
    fields |= {"budget": room, "rerun": bool(room) and draw(st.booleans())} | ({"pad": False} if room else {})
    if counts:
        fields |= {"layout": "contiguous", "layout_of": ""}
        fields["programs"] = draw(st.sampled_from((0, 3))) if fields["dispatcher"] == "hybridep" else 0
    all_gradients = scope.signature.all_gradients(scope.case(fields))
    return fields | {
        "grads": draw(st.sampled_from((*("",) * 3, *(all_gradients,) * 6, *all_gradients.split("+"), *GRADIENTS)))
    }


@st.composite
def ranks(draw: st.DrawFn, scope: Scope, sequences: int) -> tuple[int, ...]:
    """Tokens per rank of some cases; empty: one process."""
    single_process = not scope.accepts("group") or scope.space.most_ranks < 2 or draw(st.integers(1, RANKED_ONE_IN)) > 1
    return () if single_process else draw(worlds(scope.space, sequences))[:MOST_RANKS]


ROUTERS: tuple[Changes, ...] = (
    {"score": "sigmoid", "bias": True},
    {"score": "softmax"},
    {"score": "softmax_pre", "groups": 2, "group_topk": 1},
    {"score": "sqrtsoftplus", "bias": True, "groups": 2, "group_topk": 2, "scaling": 20},
)
ROOMS: tuple[Changes, ...] = ({}, {"capacity": 3}, {"capacity": 3, "pad": True}, {"capacity": 2, "policy": "position"})
PRODUCTS: tuple[Changes, ...] = (
    {},
    {"recipe": "current", "align": 16},
    {"recipe": "block"},
)
BLOCKS: Changes = {"recipe": "mxfp8", "align": 32, "hidden": 1, "width": 1, "dtype": "bfloat16", "router_dtype": "fp32"}
GATES: tuple[Changes, ...] = (
    {},
    {"kind": "squared_relu"},
    {"kind": "geglu", "clamp": 6, "interleave": 2, "shared_interleave": 1},
    {"clamp": 6, "offset": 8, "shared_interleave": 1},
    {"stored": True, "offset": -4, "interleave": 1},
)
SEQUENCES: Changes = {"losses": "seq", "sequences": 2}
HALVES: Changes = {"dtype": "float16", "router_dtype": "fp32"}
LOSSES: tuple[Changes, ...] = (
    {"losses": ""},
    {"losses": "z", "per_token": True},
    {"losses": "+".join(KINDS), "divisor": 3},
)
SHARED: tuple[Changes, ...] = ({}, {"shared": 2}, {"shared": 3, "gate": True})
SIZES: Changes = {"tokens": 7, "hidden": 5, "width": 6, "experts": 4, "topk": 2}
# every dispatcher over ranks, one of which has no tokens
WORLDS: tuple[Changes, ...] = (
    {"counts": (4, 3), "experts": 4, "dispatcher": "alltoall", "shared": 2, "latent": 3},
    {"counts": (4, 3), "experts": 4, "dispatcher": "alltoall", "budget": 5},
    {"counts": (3, 0, 4), "experts": 6, "dispatcher": "allgather", "losses": "aux+global", "shared": 2, "budget": 7},
    {
        "counts": (2, 4),
        "experts": 4,
        "dispatcher": "deepep",
        "dtype": "bfloat16",
        "capacity": 3,
        "router_dtype": "fp32",
        "shared": 2,
        "scaling": 20,
    },
    {"counts": (3, 4), "experts": 4, "dispatcher": "hybridep", "capacity": 3, "pad": True, "bias": True, "programs": 3},
    {"counts": (5,), "experts": 3, "dispatcher": "deepep", "budget": 7},
    {"counts": (4, 3), "experts": 4, "dispatcher": "hybridep", "budget": 6, "shared": 2},
    # nearly every token goes to both ranks, by several copies
    {"counts": (9, 6), "experts": 8, "topk": 5, "dispatcher": "hybridep", "budget": 44, "dtype": "bfloat16"},
    {"counts": (6, 3), "experts": 4, "dispatcher": "allgather", "losses": "aux+global", "shared": 2, "padding": 3}
    | {"capacity": 3},
    # only one rank drops a row, the first or the second, of another rank's token
    {"counts": (4, 3), "experts": 4, "dispatcher": "alltoall", "budget": 7, "rerun": True, "padding": 0, "seed": 5},
    {"counts": (4, 3), "experts": 4, "dispatcher": "alltoall", "budget": 7, "rerun": True, "padding": 0, "seed": 8},
    {"counts": (4, 3), "experts": 3, "dispatcher": "alltoall", "shards": 2, "fc2_bias": False, "budget": 8},
    # a dispatcher without shards: each is an expert, with a part of the width; a token has six
    {"counts": (3, 2), "experts": 4, "topk": 3, "dispatcher": "deepep", "shards": 2, "fc2_bias": False},
    # experts that are filled give a token more of them than it chose; more than arrive from itself
    {"counts": (5, 3), "experts": 4, "dispatcher": "deepep", "capacity": 4, "pad": True, "law": "sent_again"},
    {"counts": (4, 3), "experts": 4, "dispatcher": "deepep", "budget": 7, "rerun": True, "padding": 0, "seed": 5},
    {"counts": (4, 3), "experts": 4, "dispatcher": "allgather", "shared": 2, "roomless": True},
    # sizes are equal, but each rank has its own padding, states and shares of experts
    {"counts": (4, 4), "experts": 4, "dispatcher": "alltoall", "padding": 3, "losses": "aux+z", "bias": True},
    {"counts": (4, 4), "experts": 4, "dispatcher": "alltoall", "recipe": "delayed", "losses": ""},
    {"counts": (3, 4), "experts": 4, "dispatcher": "hybridep", "shards": 2, "fc2_bias": False},
)


def everything(case: LayerCase) -> str:
    """The gradients of all parameters that the case gives."""
    return SIGNATURE.all_gradients(case)


def given(turn: int) -> Callable[[LayerCase], str]:
    """One of the tensors that the case gives, chosen by its seed and a turn."""

    def name(case: LayerCase) -> str:
        names = [x.name for x in SIGNATURE.inputs if x.given(case)]
        return names[(case.seed + turn) % len(names)]

    return name


# by the seed all tensors have their turn; a vector that is transposed is strided
LAYOUTS: tuple[Changes, ...] = (
    {"layout": "contiguous", "layout_of": ""},
    {"layout": "transposed", "layout_of": given(10)},
    {"layout": "sliced", "layout_of": given(4)},
    {"layout": "shifted", "layout_of": "d_output"},
)


def together(scope: Scope) -> dict[str, list[Changes]]:
    """Options that exclude each other as one axis; ranks have cases of their own."""
    return {
        "router": [*ROUTERS],
        "room": [*ROOMS],
        "products": [*PRODUCTS],
        "sharing": [*SHARED],
        "latent": [{"latent": latent} for latent in (0, 3)],
        "dispatcher": [{"dispatcher": DISPATCHERS[0], "budget": 0, "rerun": False, "shards": 1}],
        "counts": [{"counts": ()}],
        "layout": [*LAYOUTS],
        "gates": [*GATES],
        "losses": [*LOSSES],
        "evaluation": [{"evaluation": False}],
        "grads": [{"grads": grads} for grads in (*GRADIENTS, everything)],
        "sequences": [{"sequences": 1}],
    }


def always(scope: Scope) -> list[Any]:
    """Worlds of ranks; and sizes one above a power of two, some with more experts than rows."""
    gpu = scope.space.device == "cuda"
    size: Changes = {"tokens": 129, "hidden": 65, "width": 33} if gpu else {"tokens": 33, "hidden": 17, "width": 9}
    worlds_ = [of_world(world) for world in WORLDS if len(world["counts"]) <= scope.space.most_ranks]
    base = SIZES | {"tokens": 6, "losses": "aux+seq+z", "bias": True}
    rerun_fields: Changes = {"roomless": True, "rerun": True}
    batched = [base | {"sequences": 2}, base | {"sequences": 2} | rerun_fields] if scope.accepts("batch_size") else []
    worlds_ += [
        of_world(
            {"counts": (4, 0, 2), "experts": 6, "dispatcher": name, "losses": "seq", "sequences": 2, "seed": index}
        )
        for index, name in enumerate(DISPATCHERS)
        if batched and scope.space.most_ranks > 2
    ]
    evaluated = [base | {"evaluation": True}] if scope.accepts("training") else []
    chosen = [
        size | {"experts": 8, "topk": 3, "dtype": "bfloat16"},
        SIZES | BLOCKS,
        # a recipe beside probs on the input and biases
        {"recipe": "delayed", "align": 16, "tokens": 4, "hidden": 3, "width": 2, "experts": 3, "topk": 2}
        | {"on_input": True},
        SIZES
        | {"losses": "aux+global", "per_token": True, "dtype": "bfloat16", "router_dtype": "fp32", "wide_router": True},
        SIZES | {"losses": "z", "sinkhorn": True},
        SIZES
        | {"dtype": "float16", "router_dtype": "fp32", "shared": 2, "latent": 3, "fc2_bias": True, "losses": "aux"},
        # tensors that several stages read, each with its own strides
        *(
            SIZES | {"shared": 2, "losses": "", "layout": layout, "layout_of": "x"}
            for layout in ("transposed", "sliced")
        ),
        SIZES | {"budget": 5, "shared": 2, "losses": ""},
        SIZES | {"budget": 9, "rerun": True, "dtype": "bfloat16", "losses": ""},
        SIZES | {"roomless": True, "shared": 2, "losses": ""},
        SIZES | {"losses": ""} | rerun_fields,
    ]
    # bytes of rows in addition to those of integers; on a GPU a width whose kernels other cases
    # have
    grads, hidden = "x+fc1_weight+fc2_weight", 250 if gpu else 64
    less: Changes = SIZES | {
        "tokens": 256 if gpu else 40,
        "hidden": hidden,
        "width": hidden,
        "grads": grads,
        "law": "kept",
    }
    forms: tuple[Changes, ...] = (
        *({}, {"seed": 1, "recipe": "current"}, {"seed": 2, "dtype": "bfloat16"}),
        SIZES | {"tokens": 5, "seed": 4, "recipe": "delayed"},
        SIZES | {"tokens": 5, "seed": 3, "law": "delayed"},
        SIZES | {"seed": 5, "law": "delayed"},
        SIZES | {"jitter": True, "law": "jittered", "grads": ""},
        SIZES | {"jitter": True, "layout": "sliced", "layout_of": "noise", "law": ""},
    )
    recomputing_cases = [scope.case(less | form) for form in forms]
    many_rows = {"tokens": 260, "hidden": 3, "width": 2, "experts": 3, "topk": 2, "grads": "x+fc1_weight+fc2_weight"}
    return [
        *chosen,
        *(lines_of_rows(scope) if gpu else []),
        *recomputing_cases,
        scope.case(many_rows),
        *batched,
        *evaluated,
        *(worlds_ + in_room(scope) if scope.accepts("group") else []),
        *(fields | {"budget": 5, "rerun": True} for fields in evaluated),
    ]


def lines_of_rows(scope: Scope) -> list[Any]:
    """Tokens of whole lines, as a GPU may gather them: without gradients; and in FP8 by blocks,
    where neither the tokens nor the activation are whole blocks; by each law.
    """
    many: Changes = {"tokens": 520, "hidden": 64, "width": 48, "experts": 4, "topk": 2, "dtype": "bfloat16"}
    many |= {"latent": 0, "shared": 48}  # all of them are whole lines
    row_cases = [many, *scope.lawful([scope.mended(scope.case(many))])]
    deep = many | {"hidden": 336, "shared": 0, "grads": ""}  # no whole number of steps
    forms: list[Changes] = [{"budget": 400}, {"budget": 1100}, {"clamp": 8, "offset": 8, "fc1_bias": True}]
    forms += [{"padding": 2, "dtype": "float16", "router_dtype": "fp32"}]
    coded = many | {"recipe": "block", "hidden": 144, "width": 208, "shared": 0}
    coded |= {"grads": "x+router_weight+fc1_weight+fc2_weight"}
    less: list[Changes] = [{"budget": 400}, {"fc2_bias": True}, {"grads": "fc2_weight"}]
    less += [{"grads": "", "law": "graph_capture"}]
    less += [{"clamp": 8, "offset": 8, "dtype": "float16", "router_dtype": "fp32"}]
    return [*row_cases, *_by_each_law(scope, deep, forms), *_by_each_law(scope, coded, less)]


def _by_each_law(scope: Scope, form: Changes, other_fields: list[Changes]) -> list[Any]:
    """A case with each of its laws in turn, and other cases near it without a law."""
    base_case, *variants = (scope.mended(scope.case(form | fields)) for fields in ({}, *other_fields))
    cases = [*(base_case.changed(law=law) for law in scope.laws(base_case)), *variants]
    return [case for case in cases if scope.fits(case)]


def of_world(world: Changes) -> Changes:
    """All sizes of a case of WORLDS."""
    return SIZES | world | {"tokens": sum(world["counts"])}


def in_room(scope: Scope) -> list[LayerCase]:
    """On a GPU: one rank for each dispatcher, whose host must not wait for the device."""
    if scope.space.device != "cuda":
        return []
    single_rank = SIZES | {"counts": (SIZES["tokens"],), "budget": 9, "law": "host_sync"}
    return [scope.case(single_rank | {"dispatcher": name}) for name in DISPATCHERS]


MOE_LAYER = Shapes(
    drawn=layers,
    covered=SIZES,
    models={"hidden": MEDIUM_WIDTHS, "width": NARROW_WIDTHS, "tokens": FEW_ROWS},
    together=together,
    always=always,
    illegal={"tokens": 2, "experts": 2, "latent": 1, "shared": 1},
    weight=0.25,
)
