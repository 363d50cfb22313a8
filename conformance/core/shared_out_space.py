"""Cases whose tokens several ranks have: how many of them each has."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import Space

SHARED_ONE_IN = 6  # cases of unconverted families: each has several processes
WORLDS = (2, 4, 2, 3, 1)  # the likeliest first
MOST_TOKENS = 4  # of a rank, times the sequences


@st.composite
def worlds(draw: st.DrawFn, space: Space, each: int = 1, even: bool = False, least: int = 0) -> tuple[int, ...]:
    """The tokens of each rank: multiples of `each`, equally many if they are to be even."""
    ranks = draw(st.sampled_from([n for n in WORLDS if n <= space.ranks]))
    some = st.integers(least, MOST_TOKENS)
    counts = (draw(some),) * ranks if even else tuple(draw(some) for _ in range(ranks))
    return tuple(count * each for count in counts)


@st.composite
def maybe_shared_out(draw: st.DrawFn, case: Any, space: Space) -> Case:
    """The case of one process as it is, or, now and then, one of that kind over ranks, with a law that applies to it."""
    if space.ranks < 2 or draw(st.integers(1, SHARED_ONE_IN)) > 1:
        return case  # type: ignore[no-any-return]
    counts = draw(worlds(space))
    shared = replace(case, counts=counts, tokens=sum(counts), layout="contiguous", layout_of="")
    return replace(shared, law=draw(st.sampled_from(space.laws(shared))))


def shared_out_shapes(function: str, space: Space) -> list[dict[str, Any]]:
    """Of `shared_experts` one, of which few are drawn."""
    if space.ranks < 4 or function != "shared_experts":
        return []
    return [{"counts": (2, 0, 3, 1), "tokens": 6, "hidden": 3, "width": 2, "seed": 1}]
