"""Cases around a routing map: the map itself is fuzzed, bit by bit when it is small, by distribution when it is large."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.space import (
    ALIGNMENTS,
    DTYPES,
    LAYOUTS,
    MAP_DTYPES,
    MOVED_DTYPES,
    POISONS,
    Space,
    mostly,
    sizes,
    some_of,
)
from conformance.families.permutation.cases import SPREADS, RoutingCase

REAL_SHAPES = (
    (4096, 8, 2),
    (7168, 256, 8),
    (2048, 128, 8),
    (2880, 128, 4),
    (7168, 384, 8),
    (2048, 512, 10),
)  # hidden, experts, top-k of real models


@st.composite
def small(draw: st.DrawFn) -> dict[str, Any]:
    """An explicit map: up to 12 tokens and 8 experts, one bitmask a token."""
    experts = draw(st.integers(1, 8))
    masks = draw(st.lists(st.integers(0, 2**experts - 1), max_size=12))
    return {
        "tokens": len(masks),
        "experts": experts,
        "hidden": draw(sizes(0, 20)),
        "topk": draw(st.integers(1, 8)),
        "routing": tuple(masks),
    }


@st.composite
def spread(draw: st.DrawFn, tokens: int, experts: int, hidden: int) -> dict[str, Any]:
    """A map by distribution, within these sizes."""
    return {
        "tokens": draw(sizes(0, tokens)),
        "experts": draw(sizes(1, experts)),
        "hidden": draw(sizes(1, hidden)),
        "topk": draw(st.integers(1, 8)),
        "spread": draw(st.sampled_from(SPREADS)),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def beyond_blocks(draw: st.DrawFn, space: Space) -> dict[str, Any]:
    """One size beyond every block that a kernel may have, the others small."""
    sizes_ = draw(
        st.sampled_from(
            ((space.many, 3, 2), (space.many // 3, 9, 5), (5, 4, 5000), (3, 600, 3), (40, 300, 2), (200, 7, 130))
        )
    )
    shape = dict(zip(("tokens", "experts", "hidden"), sizes_, strict=True))
    plain = ("uniform", "ragged", "skewed", "sparse", "last_token")
    return shape | {
        "topk": draw(st.integers(1, 3)),
        "spread": draw(st.sampled_from(plain)),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def real(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of real models, for a GPU."""
    hidden, experts, topk = draw(st.sampled_from(REAL_SHAPES))
    tokens = draw(st.sampled_from((1, 17, 65)))
    full = draw(st.sampled_from(("uniform", "skewed", "ragged")))
    return {
        "tokens": tokens,
        "experts": experts,
        "hidden": hidden,
        "topk": topk,
        "spread": full,
        "seed": draw(st.integers(0, 99)),
    }


def shapes(space: Space) -> st.SearchStrategy[dict[str, Any]]:
    """Small maps half of the time; then medium ones, and sizes beyond every block."""
    kinds = [small(), small(), small(), small(), spread(110, 70, 130), spread(40, 20, 300), beyond_blocks(space)]
    return st.sampled_from([*kinds, *kinds, real()] if space.device == "cuda" else kinds).flatmap(lambda kind: kind)


@st.composite
def room(draw: st.DrawFn, space: Space, tokens: int, experts: int) -> dict[str, Any]:
    """How the permuted buffer is sized: as needed, aligned, by capacity, or by a number of rows."""
    owner = "permute"  # unpermute's rows are sized by its producer
    filled = (
        experts > 64 and space.device == "cpu"
    )  # fillers give the first tokens a row for every expert: slow in an interpreter
    offers = [
        name
        for name in ("align", "capacity", "num_rows")
        if space.accepts(owner, name) and not (name == "capacity" and filled)
    ]
    mode = draw(st.sampled_from(["", *offers, *(["align+num_rows"] if {"align", "num_rows"} <= set(offers) else [])]))
    out: dict[str, Any] = {}
    if "align" in mode:
        out["align"] = draw(st.sampled_from(ALIGNMENTS if tokens < 200 else ALIGNMENTS[2:6]))
    if "num_rows" in mode:
        out["slack"] = draw(st.integers(-4, 4))
    if mode == "capacity":
        out["capacity"] = draw(st.integers(1, min(tokens + 3, 40)))
    return out


@st.composite
def permutation_cases(draw: st.DrawFn, space: Space, function: str, main: str) -> RoutingCase:
    """Cases of permute (main input: tokens) and unpermute (main input: rows)."""
    shape = draw(shapes(space))
    large = shape["tokens"] * shape["hidden"] > 20_000
    moved = function == "permute" and not draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(MOVED_DTYPES if moved else DTYPES))
    with_probs = space.accepts(function, "probs")
    probs = draw(st.sampled_from(("", "float32", "float32", "bfloat16"))) if with_probs else ""
    inputs = (main, *(("probs",) if probs else ()))
    grads = draw(some_of(inputs)) if dtype in DTYPES and function not in space.not_differentiable else ""
    case = RoutingCase(
        function=function,
        **shape,
        **draw(room(space, shape["tokens"], shape["experts"])),
        dtype=dtype,
        probs=probs,
        zero_probs=bool(probs) and draw(st.booleans()),
        values=draw(mostly("dyadic", ("special",) if dtype == "float16" else ("wide", "special"))),
        map_dtype="bool" if large else draw(mostly("bool", MAP_DTYPES[1:])),
        poison=draw(st.sampled_from(POISONS)),
        grads=grads,
    )
    if function not in space.contiguous_only:
        case = _with_layout(draw, case, main)
    if grads and function == "permute" and probs and not draw(st.integers(0, 3)):
        case = replace(case, unused=draw(st.sampled_from(("rows", "probs"))))
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


def _with_layout(draw: st.DrawFn, case: RoutingCase, main: str) -> RoutingCase:
    """One input or cotangent in another memory layout, a third of the time."""
    if draw(st.integers(0, 2)):
        return case
    cotangents = [f"d_{'tokens' if main == 'rows' else 'rows'}"] if case.grads else []
    where = draw(
        st.sampled_from(
            [
                main,
                *(["routing_map"] if case.function == "permute" else []),
                *(["probs"] if case.probs else []),
                *cotangents,
            ]
        )
    )
    layouts = [*LAYOUTS[1:], *(["expanded"] if where.startswith("d_") or where == "tokens" else [])]
    if (
        case.tokens <= 4
        and (where.startswith("d_") or where in (main, "probs", "routing_map"))
        and case.dtype in ("bfloat16", "float16", "uint8")
    ):
        layouts += ["wide_rows", "wide_columns"]
    return replace(case, layout=draw(st.sampled_from(layouts)), layout_of=where)


@st.composite
def pad_cases(draw: st.DrawFn, space: Space) -> RoutingCase:
    """Cases of pad_routing_map, reachable and out of reach."""
    shape = draw(shapes(space)) | {"hidden": 1}
    case = RoutingCase(
        function="pad_routing_map",
        **shape,
        align=draw(st.sampled_from(ALIGNMENTS)),
        map_dtype=draw(mostly("bool", MAP_DTYPES[1:])),
        poison=draw(st.sampled_from(POISONS)),
    )
    if not draw(st.integers(0, 3)) and case.function not in space.contiguous_only:
        layouts = [
            *LAYOUTS[1:],
            *(["wide_rows", "wide_columns"] if case.tokens <= 4 and case.map_dtype in ("bool", "uint8") else []),
        ]
        case = replace(case, layout=draw(st.sampled_from(layouts)), layout_of="routing_map")
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


@st.composite
def multihot_cases(draw: st.DrawFn, space: Space) -> RoutingCase:
    """Cases of multihot_to_indices, with fewer, as many and more experts a token than slots."""
    case = RoutingCase(
        function="multihot_to_indices",
        **(draw(shapes(space)) | {"hidden": 1}),
        dtype=draw(st.sampled_from(DTYPES)),
        zero_probs=draw(st.booleans()),
        map_dtype=draw(mostly("bool", MAP_DTYPES[1:])),
        poison=draw(st.sampled_from(POISONS)),
        grads=""
        if "multihot_to_indices" in space.not_differentiable
        else draw(st.sampled_from(("", "probs", "probs"))),
    )
    if not draw(st.integers(0, 3)) and case.function not in space.contiguous_only:
        where = draw(st.sampled_from(["routing_map", "probs", *(["d_probs"] if case.grads else [])]))
        narrow = case.tokens <= 4 and case.dtype != "float32" and case.map_dtype in ("bool", "uint8")
        layouts = [*LAYOUTS[1:], *(["wide_rows", "wide_columns"] if narrow else [])]
        case = replace(case, layout=draw(st.sampled_from(layouts)), layout_of=where)
    return replace(case, law=draw(st.sampled_from(space.laws(case))))
