"""Cases of sort_chunks, and of what reads expert indices."""

from dataclasses import replace

from hypothesis import strategies as st

from conformance.core.space import DTYPES, LAYOUTS, MOVED_DTYPES, POISONS, Space, mostly, sizes, some_of
from conformance.families.permutation.chunks import ChunksCase
from conformance.families.permutation.routing_map import IndicesCase


@st.composite
def chunk_cases(draw: st.DrawFn, space: Space) -> ChunksCase:
    """A few chunks of any size, many small ones, empty ones, and rows behind the last."""
    many = not draw(st.integers(0, 4))
    chunk = st.integers(0, 3) if many else st.one_of(st.just(0), st.integers(0, 9), sizes(0, 130))
    chunks = tuple(draw(st.lists(chunk, min_size=20 if many else 0, max_size=150 if many else 8)))
    order = tuple(draw(st.permutations(range(len(chunks)))))
    rows = sum(chunks)
    dtype = draw(st.sampled_from(MOVED_DTYPES))
    probs = draw(st.sampled_from(("", "float32", "bfloat16"))) if space.accepts("sort_chunks", "probs") else ""
    differentiable = dtype in DTYPES and "sort_chunks" not in space.not_differentiable
    grads = draw(some_of(("rows", *(("probs",) if probs else ())))) if differentiable else ""
    case = ChunksCase(
        function="sort_chunks",
        sizes=chunks,
        order=order,
        tail=draw(st.sampled_from((0, 0, 1, 5))),
        hidden=draw(sizes(0, 1100 if rows < 40 and not draw(st.integers(0, 3)) else 140)),
        dtype=dtype,
        probs=probs,
        values=draw(mostly("dyadic", ("wide", "special"))),
        index_dtype=draw(st.sampled_from(("int64", "int32"))),
        poison=draw(st.sampled_from(POISONS)),
        grads=grads,
        seed=draw(st.integers(0, 99)),
    )
    if not draw(st.integers(0, 3)) and case.function not in space.contiguous_only:
        where = draw(st.sampled_from(["rows", *(["probs"] if probs else []), *(["d_rows"] if grads else [])]))
        layouts = [*LAYOUTS[1:], *(["expanded"] if where == "d_rows" else [])]
        if rows + case.tail <= 4 and dtype in ("bfloat16", "float16", "uint8") and probs != "float32":
            layouts += ["wide_rows", "wide_columns"]
        case = replace(case, layout=draw(st.sampled_from(layouts)), layout_of=where)
    if grads and probs and not draw(st.integers(0, 3)):
        case = replace(case, unused=draw(st.sampled_from(("rows", "probs"))))
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


@st.composite
def index_cases(draw: st.DrawFn, space: Space, function: str) -> IndicesCase:
    """Slots with and without experts, with and without repeats, more slots than experts, and sizes beyond every block."""
    layout = function == "deepep_layout"  # which has ranks, and no probs
    tokens, topk, experts = draw(
        st.one_of(
            st.tuples(sizes(0, 12), st.integers(1, 8), st.integers(1, 8)),
            st.tuples(sizes(0, 140), st.integers(1, 12), sizes(1, 70)),
            st.sampled_from(((600, 2, 9), (2100, 1, 3), (3, 9, 600), (9, 40, 30))),
        )
    )
    case = IndicesCase(
        function=function,
        tokens=tokens,
        topk=topk,
        experts=experts,
        ranks=draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0])) if layout else 1,
        empty=draw(st.sampled_from((0, 0, 1, 4, 8))),
        repeats=draw(st.booleans()),
        dtype="float32" if layout else draw(st.sampled_from(DTYPES)),
        index_dtype=draw(st.sampled_from(("int64", "int32", "int16"))),
        zero_probs=not layout and draw(st.booleans()),
        poison=draw(st.sampled_from(POISONS)),
        grads="" if layout or function in space.not_differentiable else draw(st.sampled_from(("", "probs", "probs"))),
        seed=draw(st.integers(0, 999)),
    )
    if not draw(st.integers(0, 3)) and case.function not in space.contiguous_only:
        where = draw(st.sampled_from(["indices", *([] if layout else ["probs"]), *(["d_probs"] if case.grads else [])]))
        wide = tokens <= 4 and (layout or case.dtype != "float32") and case.index_dtype == "int16"
        case = replace(
            case,
            layout=draw(st.sampled_from([*LAYOUTS[1:], *(["wide_rows", "wide_columns"] if wide else [])])),
            layout_of=where,
        )
    return replace(case, law=draw(st.sampled_from(space.laws(case))))
