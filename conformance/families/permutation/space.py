"""Cases of permutation beyond their axes: routing maps that are drawn, shapes that every run has,
and limits of cost.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes, sizes
from conformance.core.case import axes_of
from conformance.core.model_sizes import EXPERTS, FEW_ROWS, MODEL_WIDTHS
from conformance.core.scope import NARROW, Scope
from conformance.core.shapes import Shapes
from conformance.families.permutation.cases import HEAVY_ALIGN, SPREADS, ChunksCase, IndicesCase, RoutingCase
from conformance.families.permutation.permute import Permute

# hidden, experts, top-k of real models
REAL_SHAPES = ((4096, 8, 2), (7168, 256, 8), (2048, 128, 8), (2880, 128, 4), (7168, 384, 8), (2048, 512, 10))
COVERED: Changes = {  # the map of every covering array: T = 7, E = 4, one token without experts
    "routing": (0b0110, 0b0001, 0b0000, 0b1111, 0b0110, 0b0100, 0b1001),
    "tokens": 7,
    "experts": 4,
    "hidden": 5,
}
# mutually exclusive, so covered as one axis
ROOM: list[Changes] = [{}, {"align": 4}, {"capacity": 3}, {"slack": -2}, {"align": 2, "slack": 3}]
PATTERNS: tuple[Changes, ...] = ({"dtype": "bfloat16"}, {"dtype": "float16", "seed": 1})
PADDED = {"align": 5}
FAR: Changes = {"routing": (0b101, 0b010, 0b111), "topk": 3}
# 2ⁿ + 1 tokens: a loop that ends early misses the last block; seed 1: two experts per token
LONG: Changes = {"experts": 5, "topk": 2, "seed": 1, "spread": "uniform"}
MERGED: Changes = {"values": "wide", "grads": "rows+probs"}  # products and their sums that float32 cannot hold
# a byte for each of four experts: 256 tokens of one in each of a few blocks overflow it
FOUR: Changes = {"experts": 4, "map_dtype": "bool"}
TWO: Changes = {"experts": 2, "topk": 1}
WIDE: Changes = {"tokens": 33, "experts": 257, "topk": 3, "seed": 1, "spread": "uniform"}


def long(scope: Scope) -> Changes:
    """More tokens than one block; fewer on the CPU, where kernels are interpreted."""
    return LONG | {"tokens": 2049 if scope.space.device == "cuda" else 257}


# ---- routing maps


def maps(scope: Scope) -> st.SearchStrategy[Changes]:
    """Small explicit maps (half), medium maps, maps beyond any block, real models (GPU)."""
    kinds = [*[explicit()] * 4, spread(110, 70, 130), spread(40, 20, 300), beyond_blocks(scope)]
    if scope.space.device == "cuda":
        kinds = [*kinds, *kinds, real()]
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def explicit() -> st.SearchStrategy[Changes]:
    """An explicit map, one bit per (token, expert)."""
    table = axes_of(RoutingCase)["routing"].drawn(Permute.signature)
    sizes_beside = st.tuples(st.integers(1, 8), sizes(0, 20))
    return st.tuples(table, sizes_beside).map(lambda x: x[0] | {"topk": x[1][0], "hidden": x[1][1], "spread": "all"})


def spread(tokens: int, experts: int, hidden: int) -> st.SearchStrategy[Changes]:
    """A map by distribution, of at most these sizes."""
    return distribution(st.tuples(sizes(0, tokens), sizes(1, experts), sizes(1, hidden)), SPREADS, topk=8)


def beyond_blocks(scope: Scope) -> st.SearchStrategy[Changes]:
    """One size larger than any kernel's block, the others small."""
    many = scope.space.many
    shapes = ((many, 3, 2), (many // 3, 9, 5), (5, 4, 5000), (3, 600, 3), (40, 300, 2), (200, 7, 130))
    return distribution(st.sampled_from(shapes), ("uniform", "ragged", "skewed", "sparse", "last_token"), topk=3)


def real() -> st.SearchStrategy[Changes]:
    """Sizes of real models."""
    common_spreads = ("uniform", "skewed", "ragged")
    return st.sampled_from(
        [
            distribution(
                st.tuples(st.sampled_from((1, 17, 65)), st.just(experts), st.just(hidden)), common_spreads, topk, topk
            )
            for hidden, experts, topk in REAL_SHAPES
        ]
    ).flatmap(lambda shape: shape)


def distribution(
    shape: st.SearchStrategy[Any], spreads: tuple[str, ...], topk: int, least: int = 1
) -> st.SearchStrategy[Changes]:
    """A map by one of the spreads; shape: (tokens, experts, hidden)."""
    drawn = st.tuples(shape, st.integers(least, topk), st.sampled_from(spreads), st.integers(0, 999))
    names = ("tokens", "experts", "hidden", "topk", "spread", "seed")
    return drawn.map(lambda x: {"routing": None} | dict(zip(names, (*x[0], *x[1:]), strict=True)))


def affordable(case: RoutingCase, scope: Scope) -> RoutingCase:
    """The case within limits on time and address space."""
    far = case.layout.startswith("wide")
    if far and (case.tokens > 4 or case.dtype not in NARROW or case.map_dtype not in NARROW):
        case = replace(case, layout="contiguous", layout_of="")
    if case.tokens * case.hidden > 20_000:
        case = replace(case, map_dtype="bool")
    many = case.tokens >= 200 or case.experts * case.hidden > 8_000
    if many and case.align > 16:
        case = replace(case, align=16)
    # a filled capacity gives the first tokens a row per expert: slow when interpreted
    filled = case.experts > 64 and scope.space.device == "cpu"
    return replace(case, capacity=0 if filled else min(case.capacity, case.tokens + 3))


def _permuted(scope: Scope) -> list[Any]:
    """A last block of one token; many experts; wide rows; and room for more rows than the one token
    takes.
    """
    align = {"align": 4} if scope.accepts("align") else {}
    cuda = scope.space.device == "cuda"
    columns = {"tokens": 5, "experts": 4, "topk": 2, "hidden": 4097 if cuda else 513, "spread": "uniform"}
    shapes = [long(scope) | align | {"hidden": 3}, WIDE | align | {"hidden": 3}, columns]
    main = scope.signature.inputs[0].name
    one_column = {"tokens": 5, "experts": 3, "topk": 2, "hidden": 1, "spread": "uniform", "seed": 1} | _gaps(main)
    crowded = {"tokens": 3, "experts": 40, "topk": 33, "hidden": 9, "spread": "uniform", "dtype": "bfloat16"}
    double = {"tokens": 5, "experts": 4, "topk": 3, "hidden": 3, "spread": "uniform", "dtype": "float64"}
    double |= {"probs": "float32", "values": "wide"}
    # more room than a token takes; too little for the first, or the last, of nine experts alone
    roomy: Changes = {"tokens": 1, "experts": 3, "topk": 2, "hidden": 5, "capacity": 4, "align": 0}
    full: Changes = {"tokens": 3, "experts": 9, "topk": 1, "hidden": 2, "capacity": 2, "align": 0}
    limited = [roomy, *(full | {"routing": (expert,) * 3} for expert in (1, 1 << 8))]
    rows = [*shapes, crowded, double, one_column, *_strange(scope), *_rows_of_one_expert(scope), *_forward_rows(scope)]
    return [*rows, *(limited if scope.accepts("capacity") else [])]


def _forward_rows(scope: Scope) -> list[Any]:
    """Tokens that stay where they are, without gradients; probabilities that float32 cannot hold;
    and probabilities without columns beside them.
    """
    few_tokens: Changes = {"tokens": 5, "hidden": 3, "grads": ""}
    still = scope.case(few_tokens | {"experts": 1, "topk": 1, "spread": "all"})
    fine_probs: Changes = {"tokens": 5, "hidden": 3, "experts": 3, "topk": 2, "spread": "uniform", "probs": "float64"}
    rows = [
        *([still] if scope.fits(still) else []),
        fine_probs if scope.function == Permute.function else fine_probs | MERGED,
    ]
    bare = {"tokens": 5, "hidden": 0, "experts": 3, "topk": 2, "spread": "uniform", "probs": "float32", "align": 4}
    # sums of two dtypes, of which the wider one's bits and range are needed
    apart: Changes = {"tokens": 5, "hidden": 3, "experts": 4, "topk": 3, "spread": "uniform"} | MERGED
    sums = [apart | {"dtype": dtype, "probs": "float64", "values": "wide"} for dtype in ("float16", "bfloat16")]
    sums[0] |= {"values": "dyadic", "hidden": 129}  # a float16 has no wide values, but long sums
    rows += sums if scope.function != Permute.function else []
    return [*rows, *([bare] if scope.function == Permute.function and scope.accepts("align") else [])]


def _full(scope: Scope) -> list[Changes]:
    """Only one token has experts, the first or the last, also in a later tile, with more experts
    than slots; and there are more slots than a tile has, and than there are experts.
    """
    full = ((7, 3, 4), (3, 4, 7), (*[1] * 128, 7))
    rows: list[Changes] = [{"tokens": len(routing), "experts": 3, "topk": 2, "routing": routing} for routing in full]
    return [*rows, {"tokens": 5, "experts": 3, "topk": 130, "spread": "ragged"}]


def _gaps(name: str) -> Changes:
    """A layout that only the strides show: for rows of one element, the stride of the row."""
    return {"layout": "strided", "layout_of": name}


def _strange(scope: Scope) -> list[Any]:
    """Every 16-bit pattern; and strange values at the ends of rows, unless other shapes draw
    them.
    """
    edges: Changes = {"tokens": 7, "experts": 3, "topk": 2, "hidden": 5, "spread": "uniform", "values": "edges"}
    all_patterns: Changes = {
        "tokens": 16,
        "experts": 2,
        "topk": 1,
        "hidden": 4096,
        "spread": "uniform",
        "values": "every",
    }
    patterns = [scope.case(all_patterns | kind) for kind in (PATTERNS[0], PATTERNS[1] | PADDED)]
    patterns = [case for case in patterns if scope.function == Permute.function and scope.fits(case)]
    if scope.space.device == "cuda":
        return patterns[:1]
    return [*(edges | kind for kind in ({"dtype": "float32"}, *PATTERNS)), *patterns]


def _rows_of_one_expert(scope: Scope) -> list[Changes]:
    """Rows of one expert: exactly as many as a tile has; more than 8 bits count, and on a GPU more
    than 15 and 16 bits count; as many for one of four experts; room for more than a tile; and on a
    GPU more than 15 bits count, with as many rows of fewer tokens.
    """
    one_hot: Changes = {"experts": 2, "topk": 1, "hidden": 1, "spread": "one_hot", "probs": ""}
    rows: tuple[int, ...] = (128, 256, 32769, 65538) if scope.space.device == "cuda" else (64, 128, 258)
    rows_of_counts = [one_hot | {"tokens": n} for n in (rows if scope.function == Permute.function else rows[:1])]
    rows_of_counts.append(one_hot | FOUR | {"tokens": 32768 if scope.space.device == "cuda" else 768})
    if scope.accepts("capacity"):
        rows_of_counts.append(one_hot | {"tokens": 69, "capacity": 67, "align": 0})
    if scope.accepts("capacity") and scope.space.device == "cuda":
        rows_of_counts.append(one_hot | {"tokens": 32770, "capacity": 32769, "align": 0})
    if scope.accepts("align"):
        rows_of_counts.append(one_hot | {"tokens": 67, "align": 256})
    if scope.space.device == "cuda" and scope.function == Permute.function:
        rows_of_counts.append({"tokens": 4100, "experts": 8, "topk": 8, "hidden": 1, "spread": "all", "probs": ""})
    if scope.space.device == "cuda":  # experts, tokens and columns past a block together
        rows_of_counts.append({"tokens": 300, "experts": 300, "topk": 3, "hidden": 67, "spread": "uniform"})
    return rows_of_counts


def _past_32_bits(scope: Scope) -> list[RoutingCase]:
    """GPU only: offsets past 2³¹ elements; expert 0's segment is padded to 2²¹ rows."""
    if scope.space.device != "cuda" or not scope.accepts("align"):
        return []
    fields: Changes = {"tokens": 2, "experts": 2, "hidden": 1026, "routing": (0b01, 0b10)}
    return [RoutingCase(function=scope.function, dtype="uint8", align=HEAVY_ALIGN, **fields)]


def _room(scope: Scope) -> dict[str, list[Changes]]:
    return {"room": ROOM}


# ---- chunks


@st.composite
def chunks(draw: st.DrawFn, scope: Scope) -> Changes:
    """Few chunks of any size, many small chunks, empty chunks, in any order."""
    fields = draw(axes_of(ChunksCase)["sizes"].drawn(scope.signature))
    small_chunks = sum(fields["sizes"]) < 40 and not draw(st.integers(0, 3))
    return fields | {
        "order": tuple(draw(st.permutations(range(len(fields["sizes"]))))),
        "tail": draw(st.sampled_from((0, 0, 1, 5))),
        "hidden": draw(sizes(0, 1100 if small_chunks else 140)),
        "seed": draw(st.integers(0, 99)),
    }


def affordable_chunks(case: ChunksCase, scope: Scope) -> ChunksCase:
    """The case without a far layout beyond the address space."""
    cheap = sum(case.sizes) + case.tail <= 4 and case.dtype in NARROW and case.probs != "float32"
    return case if cheap or not case.layout.startswith("wide") else replace(case, layout="contiguous", layout_of="")


def _chunked(scope: Scope) -> list[Any]:
    """More chunks than one block; strange values at the ends of rows; every 16-bit pattern."""
    cuda = scope.space.device == "cuda"
    counts = (33, 257 if cuda else 65)
    orders = {n: tuple((i * 7 + 3) % n for i in range(n)) for n in counts}
    rows: list[Changes] = [{"sizes": tuple(i % 4 for i in range(n)), "order": orders[n], "hidden": 3} for n in counts]
    # orders that move nothing but two neighbours
    rows += [{"sizes": (1,) * 6, "order": swapped, "hidden": 2} for swapped in ((1, 0, 2, 3, 4, 5), (0, 1, 3, 2, 4, 5))]
    rows += [{"sizes": (1,) * 6, "order": (0, 1, 2, 3, 5, 4), "hidden": 2}]
    if cuda:
        return [*rows, {"sizes": (65537, 3, 32768), "order": (2, 0, 1), "hidden": 1}]
    pair: Changes = {"sizes": (9, 7), "order": (1, 0)}
    return [
        pair | {"hidden": 1} | _gaps("rows"),
        *(*rows, {"sizes": (1, *[0] * 128, 1), "order": tuple(range(130))[::-1], "hidden": 1, "probs": ""}),
        *(pair | {"hidden": 5, "values": "edges"} | kind for kind in ({"dtype": "float32"}, *PATTERNS)),
        *(scope.case(pair | {"hidden": 4097, "values": "every"} | kind) for kind in PATTERNS),
    ]


# ---- expert indices


@st.composite
def slots(draw: st.DrawFn, scope: Scope) -> Changes:
    """Empty and used slots, more slots than experts, sizes larger than any block."""
    small = st.tuples(sizes(0, 12), st.integers(1, 8), st.integers(1, 8))
    medium = st.tuples(sizes(0, 140), st.integers(1, 12), sizes(1, 70))
    large = st.sampled_from(((600, 2, 9), (2100, 1, 3), (3, 9, 600), (9, 40, 30)))
    tokens, topk, experts = draw(st.one_of(small, medium, large))
    divisors = [n for n in range(1, experts + 1) if experts % n == 0]
    fields = {"tokens": tokens, "topk": topk, "experts": experts, "empty": draw(st.sampled_from((0, 0, 1, 4, 8)))}
    return fields | {"slots": (), "ranks": draw(st.sampled_from(divisors))}


def affordable_slots(case: IndicesCase, scope: Scope) -> IndicesCase:
    """The case without a far layout beyond the address space."""
    probs = case.dtype in NARROW or "probs" not in scope.signature.names
    cheap = case.tokens <= 4 and case.index_dtype == "int16" and probs
    return case if cheap or not case.layout.startswith("wide") else replace(case, layout="contiguous", layout_of="")


def _indexed(scope: Scope) -> list[Changes]:
    """A last block of one token; many experts; more slots than warp lanes; few and many ranks."""
    if scope.function != "deepep_layout":
        return [long(scope), WIDE, {"tokens": 5, "experts": 50, "topk": 33}]
    real = {"tokens": 65, "experts": 256, "topk": 8, "ranks": 64}
    repeated = {"tokens": 5, "experts": 50, "topk": 33, "ranks": 25, "repeats": True}
    return [long(scope) | {"ranks": 5}, WIDE, real, repeated]


FAR_SLOTS: Changes = {"experts": 4, "ranks": 2, "index_dtype": "int16", "slots": (0, 3, 1, 3, -1, 2, 2, 3, 0)}
INDICES_TO_MULTIHOT = Shapes(
    drawn=slots,
    affordable=affordable_slots,
    covered={"tokens": 5, "topk": 3, "experts": 6},
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    always=_indexed,
    far=FAR_SLOTS,
    tall=TWO,
)
DEEPEP_LAYOUT = replace(INDICES_TO_MULTIHOT, together=lambda scope: {"ranks": [{"ranks": n} for n in (1, 2, 6)]})


def of_a_model(scope: Scope) -> Changes:
    """The permutation of a layer of Qwen3-30B-A3B."""
    kind = {"spread": "uniform", "dtype": "bfloat16", "probs": "float32"}
    return kind | {"tokens": scope.space.real_tokens, "experts": 128, "topk": 8, "hidden": 2048}


OF_MODELS: Changes = {"routing": None, "spread": "uniform", "topk": 2}  # each token has two experts


UNPERMUTE = Shapes(
    drawn=maps,
    affordable=affordable,
    covered=COVERED,
    models={"hidden": MODEL_WIDTHS, "experts": EXPERTS, "tokens": FEW_ROWS},
    of_models=OF_MODELS,
    model_rows=tuple({"experts": experts, "probs": "float32", "dtype": "bfloat16"} for experts in (32, 128, 1024)),
    together=_room,
    always=_permuted,
    far=FAR,
    tall=TWO | {"hidden": 2},
    weight=3,
    real=of_a_model,
)
PERMUTE = replace(UNPERMUTE, always=lambda scope: [*_permuted(scope), *_past_32_bits(scope)], tall={})
SORT_CHUNKS = Shapes(
    drawn=chunks,
    affordable=affordable_chunks,
    covered={"sizes": (3, 0, 1, 4), "order": (2, 0, 3, 1), "hidden": 5},
    models={"hidden": MODEL_WIDTHS},
    together=lambda scope: {"order": [{"order": (2, 0, 3, 1)}, {"order": (0, 1, 2, 3)}]},  # the second moves nothing
    always=_chunked,
    far={"sizes": (1, 1, 1), "order": (2, 0, 1)},
    illegal={"sizes": (2, 3), "order": (1, 0)},
    weight=2,
)
PAD_ROUTING_MAP = Shapes(
    drawn=maps,
    affordable=affordable,
    covered=COVERED | {"align": 2},
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    always=lambda scope: [
        *(long(scope) | {"align": 256, "spread": "sparse"}, WIDE | {"align": 16}),
        FOUR | {"tokens": 32768 if scope.space.device == "cuda" else 768, "spread": "one_hot", "align": 256},
    ],
    far=FAR | {"align": 2},
    tall=TWO | {"align": 16},
)
MULTIHOT_TO_INDICES = Shapes(
    drawn=maps,
    affordable=affordable,
    covered=COVERED,
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    always=lambda scope: [long(scope), WIDE, {"tokens": 5, "experts": 50, "topk": 33, "spread": "all"}, *_full(scope)],
    far=FAR,
    tall=TWO,
)
