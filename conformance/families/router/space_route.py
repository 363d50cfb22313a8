"""Cases of the whole router over several steps, some of them over ranks."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.shared_out_space import maybe_shared_out
from conformance.core.space import POISONS, Space, mostly, some_of
from conformance.families.router.cases_route import RouteCase

SCORES = ("softmax", "softmax_pre", "sigmoid", "sqrtsoftplus")


@st.composite
def route_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """route: a configuration, and up to eight steps of training, evaluation, replay, update, saving and restoring."""
    sequences = draw(st.sampled_from((1, 1, 2, 3))) if space.accepts(function, "batch_size") else 1
    experts = draw(st.sampled_from((2, 4, 6, 8, 12, 16)))
    topk = draw(st.integers(1, min(experts - 1, 4)))
    score = draw(st.sampled_from(SCORES[1:] if topk == 1 else SCORES))
    fields: dict[str, Any] = {
        "tokens": draw(st.integers(1, 8)) * sequences,
        "sequences": sequences,
        "experts": experts,
        "topk": topk,
        "score": score,
        "dtype": draw(mostly("float32", ("bfloat16",))),
        "bias": not score.startswith("softmax") and draw(st.booleans()),
        "rate": draw(st.integers(1, 40)),
        "losses": draw(some_of(("aux", "seq", "global", "z"))),
        "coeff": draw(st.integers(1, 20)),
        "scaling": draw(st.sampled_from((0, 20))),
        "padding": draw(st.sampled_from((0, 0, 2, 5))) if space.accepts(function, "padding_mask") else 0,
        "per_token": draw(st.booleans()),
        "scale": draw(st.integers(1, 32)),
        "ranks": draw(st.sampled_from((1, 1, 2, 3))) if space.accepts(function, "ranks") else 1,
        "grads": draw(mostly("logits", ("",))) if function not in space.not_differentiable else "",
        "seed": draw(st.integers(0, 999)),
        "poison": draw(st.sampled_from(POISONS)),
        "steps": draw(steps(space.accepts(function, "replay"))),
    }
    if experts % 4 == 0 and topk >= 2 and draw(st.booleans()):
        fields |= {"groups": 4, "group_topk": 2} if 2 * experts // 4 >= topk else {}
    if fields["dtype"] == "float32" and draw(st.booleans()):
        fields |= {
            "capacity": draw(st.integers(1, 8)),
            "pad": draw(st.booleans()),
            "policy": draw(st.sampled_from(("probs", "position"))),
        }
    case = RouteCase(function=function, **fields)
    return draw(maybe_shared_out(replace(case, law=draw(st.sampled_from(space.laws(case)))), space))


@st.composite
def steps(draw: st.DrawFn, replay: bool) -> str:
    """Steps that make sense in this order."""
    out, recorded, queued = ["record" if replay and draw(st.booleans()) else "train"], 0, 0
    recorded += out[0] == "record"
    for _ in range(draw(st.integers(0, 7))):
        choices = ["train", "train", "finish", "reload", "eval", "nograd", "frozen"]
        choices += ["record"] * replay + ["forward"] * bool(recorded) * 2 + ["backward"] * bool(queued) * 2
        step = draw(st.sampled_from(choices))
        recorded += step == "record"
        queued += (step == "forward") - (step == "backward")
        out.append(step)
    return "+".join(out)
