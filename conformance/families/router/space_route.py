"""Cases of route: a configuration and its steps, on one rank or several."""

from hypothesis import strategies as st

from conformance.core.axes import Changes, subsets
from conformance.core.model_sizes import FEW_EXPERTS, FEW_ROWS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.shared_out import worlds
from conformance.families.router.cases import SCORES
from conformance.families.router.cases_route import EVALUATED, KINDS
from conformance.families.router.space_chosen import routed

SHARED_ONE_IN = {"gate": 8, "route": 6}  # one case in this many has several processes


def over_ranks(draw: st.DrawFn, scope: Scope) -> bool:
    """Whether the case runs on several processes."""
    return scope.space.most_ranks > 1 and draw(st.integers(1, SHARED_ONE_IN[scope.function])) == 1


@st.composite
def routes(draw: st.DrawFn, scope: Scope) -> Changes:
    """A configuration and up to eight steps: train, evaluate, replay, update, save and restore."""
    sequences = draw(st.sampled_from((1, 1, 2, 3))) if scope.accepts("batch_size") else 1
    experts = draw(st.sampled_from((2, 4, 6, 8, 12, 16)))
    topk = draw(st.integers(1, min(experts - 1, 4)))
    score = draw(st.sampled_from(SCORES[1:] if topk == 1 else SCORES))
    kind_subsets = subsets(list(KINDS))
    fields: Changes = {
        "tokens": draw(st.integers(1, 8)) * sequences,
        "sequences": sequences,
        "experts": experts,
        "topk": topk,
        "score": score,
        "bias": not score.startswith("softmax") and draw(st.booleans()),
        "losses": draw(st.sampled_from(kind_subsets + kind_subsets[-1:] * len(kind_subsets))),
        "padding": draw(st.sampled_from((0, 0, 2, 5))),
        "ranks": draw(st.sampled_from((1, 1, 2, 3))),
        "steps": draw(steps(scope.accepts("replay"))),
        "groups": 0,
        "group_topk": 0,
        "layout": "contiguous",
        "layout_of": "",
    }
    if experts % 4 == 0 and 2 <= topk <= experts // 2 and draw(st.booleans()):
        fields |= {"groups": 4, "group_topk": 2}
    room = fields | {"capacity": 0, "pad": False, "policy": "probs", "sinkhorn": draw(st.integers(0, 11)) == 0}
    if room["sinkhorn"]:
        room |= {"losses": "z", "steps": draw(steps(False))}
    elif draw(st.booleans()):
        policy = draw(st.sampled_from(("probs", "position")))
        room |= {"capacity": draw(st.integers(1, 8)), "pad": draw(st.booleans()), "policy": policy, "dtype": "float32"}
    return room | draw(shared_route(scope, room)) if scope.accepts("ranks") and over_ranks(draw, scope) else room


@st.composite
def shared_route(draw: st.DrawFn, scope: Scope, fields: Changes) -> Changes:
    """The case over ranks, some of which share a sequence, with losses and few steps."""
    even = not scope.accepts("padding_mask") or draw(st.booleans())
    counts = draw(worlds(scope.space, fields["sequences"], even, 1 if fields["capacity"] else 0))
    short_steps = (
        "train",
        "train+finish",
        "train+train",
        "train+finish+train",
        "eval+train+frozen",
        "nograd+train+reload",
    )
    sharing = draw(st.sampled_from([n for n in range(len(counts), 0, -1) if len(counts) % n == 0]))
    changes = {"counts": counts, "tokens": sum(counts), "ranks": sharing, "steps": draw(st.sampled_from(short_steps))}
    if fields["experts"] > 8:
        changes |= {"experts": 8, "topk": min(fields["topk"], 2), "groups": 0, "group_topk": 0}
    return changes | {"losses": fields["losses"] or "aux+seq+global"}


@st.composite
def steps(draw: st.DrawFn, replay: bool) -> str:
    """Steps in a legal order. Some have three or four choices that wait, as in a pipeline."""
    if replay and draw(st.integers(0, 7)) == 0:
        return "record+forward+" * (number := draw(st.integers(3, 4))) + "reload" + "+backward" * number
    out, queued = ["record" if replay and draw(st.booleans()) else "train"], 0
    recorded = int(out[0] == "record")
    for _ in range(draw(st.integers(0, 7))):
        choices = ["train", "train", "finish", "reload", "narrow", "eval", "nograd", "frozen"]
        choices += ["record"] * replay + ["forward"] * bool(recorded) * 2 + ["backward"] * bool(queued) * 2
        step = draw(st.sampled_from(choices))
        in_evaluation = step in ("record", "forward", "backward") and draw(st.integers(0, 3)) == 0
        out.append(EVALUATED * in_evaluation + step)
        recorded, queued = recorded + (step == "record"), queued + (step == "forward") - (step == "backward")
    return "+".join(out)


def _route_together(scope: Scope) -> dict[str, list[Changes]]:
    room: list[Changes] = [{}, {"capacity": 3}, {"capacity": 3, "pad": True}, {"capacity": 3, "policy": "position"}]
    return {"groups": [{}, {"groups": 4, "group_topk": 2}], "room": room, "layout": [{}]}


ROUTE = Shapes(
    drawn=routes,
    covered={"tokens": 12, "experts": 8, "topk": 3},
    models={"experts": FEW_EXPERTS, "tokens": FEW_ROWS},
    together=_route_together,
    always=routed,
    weight=1.2,  # partly over ranks
)
