"""Cases whose tokens several ranks have: how many of them each has."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import Space

SHARED_ONE_IN = {"gate": 8, "shared_experts": 6, "route": 6}  # cases: each has several processes
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
    if space.ranks < 2 or draw(st.integers(1, SHARED_ONE_IN[case.function])) > 1:
        return case  # type: ignore[no-any-return]
    if case.function == "route":
        shared = draw(_routes(case, space))
    else:
        counts = draw(worlds(space))
        shared = replace(case, counts=counts, tokens=sum(counts), layout="contiguous", layout_of="")
    return replace(shared, law=draw(st.sampled_from(space.laws(shared))))


@st.composite
def _routes(draw: st.DrawFn, case: Any, space: Space) -> Any:
    """A router with losses or a bias over ranks of which some share a sequence; no longer than two of its steps and an update."""
    if not space.accepts("route", "ranks"):
        return case
    even = not space.accepts("route", "padding_mask") or draw(st.booleans())
    counts = draw(worlds(space, case.sequences, even, 1 if case.capacity else 0))
    steps = draw(
        st.sampled_from(
            ("train", "train+finish", "train+train", "train+finish+train", "eval+train+frozen", "nograd+train+reload")
        )
    )
    sharing = draw(st.sampled_from([n for n in range(len(counts), 0, -1) if len(counts) % n == 0]))
    groups = {} if case.experts <= 8 else {"experts": 8, "topk": min(case.topk, 2), "groups": 0, "group_topk": 0}
    losses = case.losses or "aux+seq+global"
    return replace(case, counts=counts, tokens=sum(counts), ranks=sharing, steps=steps, losses=losses, **groups)


def shared_out_shapes(function: str, space: Space) -> list[dict[str, Any]]:
    """Of `shared_experts` one, of which few are drawn; of `route` a sequence over two ranks and over four, two sequences over two each, and
    ranks without tokens, with all losses and the bias; none of others.
    """
    if space.ranks < 4:
        return []
    if function == "shared_experts":
        return [{"counts": (2, 0, 3, 1), "tokens": 6, "hidden": 3, "width": 2, "seed": 1}]
    if function != "route" or not all(space.accepts(function, name) for name in ("ranks", "padding_mask")):
        return []
    common = {"experts": 6, "topk": 2, "losses": "aux+seq+global+z", "bias": True, "seed": 3}
    uneven = {"counts": (3, 0, 2, 4), "tokens": 9, "padding": 2}
    return [
        common | {"counts": (3, 3), "tokens": 6, "ranks": 2, "steps": "train+finish+train"},
        common | uneven | {"ranks": 4, "per_token": True, "losses": "aux+seq+global", "steps": "train"},
        common | uneven | {"ranks": 2, "per_token": True, "steps": "train+train+finish"},
        common | {"counts": (4, 2), "tokens": 6, "sequences": 2, "ranks": 1, "steps": "train+finish"},
    ]
