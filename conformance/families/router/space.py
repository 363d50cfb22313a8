"""Cases of the router: logits with and without ties, and every legal setting."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.shared_out_space import maybe_shared_out
from conformance.core.space import DTYPES, LAYOUTS, LOGIT_DTYPES, POISONS, Space, mostly, sizes, some_of
from conformance.families.router.cases import SCORES, SPREADS, GateCase, LoadCase, LogitsCase

REAL_ROUTERS = (
    (8, 2),
    (60, 4),
    (64, 6),
    (72, 3),
    (128, 4),
    (128, 8),
    (256, 8),
    (384, 8),
    (512, 10),
)  # experts and top-k of real models
SINKHORN_SPREADS = ("distinct", "ties", "near", "negative", "equal")


@st.composite
def shape(draw: st.DrawFn, space: Space) -> dict[str, Any]:
    """Tokens, experts and top-k: small; of real routers; or with one size beyond every block."""
    kind = draw(st.sampled_from(("small", "small", "small", "medium", "real", "beyond")))
    if kind == "small":
        experts = draw(st.integers(1, 12))
        return {"tokens": draw(sizes(0, 9)), "experts": experts, "topk": draw(st.integers(1, experts))}
    if kind == "medium":
        experts = draw(sizes(1, 70))
        return {"tokens": draw(sizes(0, 40)), "experts": experts, "topk": draw(st.integers(1, min(experts, 12)))}
    if kind == "real":
        experts, topk = draw(st.sampled_from(REAL_ROUTERS))
        return {"tokens": draw(sizes(1, 40 if space.device == "cpu" else 4000)), "experts": experts, "topk": topk}
    tokens, experts, topk = draw(
        st.sampled_from(
            ((space.many, 5, 2), (3, 600, 3), (2, 1024, 2), (2, 2048, 4), (9, 40, 32), (space.many // 3, 17, 1))
        )
    )
    return {"tokens": tokens, "experts": experts, "topk": topk}


def _laid_out(
    draw: st.DrawFn,
    function: str,
    space: Space,
    matrices: tuple[str, ...],
    vectors: tuple[str, ...],
    cotangents: tuple[str, ...],
) -> dict[str, str]:
    """One input or cotangent in another layout, or none."""
    if function in space.contiguous_only or not draw(st.booleans()):
        return {}
    choices = [(layout, of) for of in (*matrices, *cotangents) for layout in LAYOUTS[1:]]
    choices += [("strided", of) for of in vectors] + [("expanded", of) for of in cotangents]
    layout, of = draw(st.sampled_from(choices))
    return {"layout": layout, "layout_of": of}


def _finished(draw: st.DrawFn, case: Case, space: Space) -> Case:
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


def _common(draw: st.DrawFn) -> dict[str, Any]:
    return {"seed": draw(st.integers(0, 999)), "poison": draw(st.sampled_from(POISONS))}


@st.composite
def topk_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """topk_indices and topk_routing."""
    fields = draw(shape(space)) | _common(draw)
    grads = draw(mostly("logits", ("",))) if function not in space.not_differentiable else ""
    scores = [
        s
        for s in SCORES
        if s == "softmax" or space.accepts(function, "pre_softmax" if s == "softmax_pre" else "score_function")
    ]
    score = draw(st.sampled_from(scores))
    fields |= {
        "score": score,
        "dtype": draw(mostly("float32", LOGIT_DTYPES[1:])),
        "spread": draw(st.sampled_from(SPREADS)),
        "grads": grads,
    }
    if space.accepts(function, "scaling_factor"):
        fields["scaling"] = draw(st.sampled_from((0, 0, 4, 20, 35)))
    if not score.startswith("softmax") and space.accepts(function, "expert_bias"):
        fields["bias"] = draw(st.sampled_from(("", "small", "large")))
    if space.accepts(function, "num_groups") and space.accepts(function, "group_topk"):
        fields |= draw(_groups(fields["experts"], fields["topk"]))
    if space.accepts(function, "precomputed_indices"):
        fields["precomputed"] = draw(st.sampled_from((False,) * 5 + (True,)))
    vectors = (
        *(["expert_bias"] if fields.get("bias") else []),
        *(["precomputed_indices"] if fields.get("precomputed") else []),
    )
    fields |= _laid_out(draw, function, space, ("logits",), vectors, ("d_probs",) if grads else ())
    return _finished(draw, LogitsCase(function=function, **fields), space)


@st.composite
def _groups(draw: st.DrawFn, experts: int, topk: int) -> dict[str, int]:
    """Legal group limits, half of the time, if there are any."""
    fits = [
        (groups, kept)
        for groups in range(2, min(experts, 16) + 1)
        if experts % groups == 0
        for kept in range(1, min(groups, topk) + 1)
        if kept * (experts // groups) >= topk
    ]
    if not fits or draw(st.booleans()):
        return {}
    groups, kept = draw(st.sampled_from(fits))
    return {"groups": groups, "group_topk": kept}


@st.composite
def balancing_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """aux_loss_scores, z_loss and sinkhorn_routing."""
    fields = draw(shape(space)) | _common(draw)
    grads = draw(mostly("logits", ("",))) if function not in space.not_differentiable else ""
    fields |= {
        "dtype": draw(mostly("float32", LOGIT_DTYPES[1:] if function != "sinkhorn_routing" else DTYPES[1:])),
        "grads": grads,
    }
    fields["spread"] = draw(st.sampled_from(SINKHORN_SPREADS if function == "sinkhorn_routing" else SPREADS))
    if function == "aux_loss_scores":
        fields["score"] = draw(
            st.sampled_from(
                [
                    s
                    for s in ("softmax", "sigmoid", "sqrtsoftplus")
                    if s == "softmax" or space.accepts(function, "score_function")
                ]
            )
        )
    if function != "sinkhorn_routing" and space.accepts(function, "padding_mask"):
        fields["padding"] = draw(st.sampled_from((0, 0, 1, 4, 8)))
    if function == "z_loss":
        fields |= {"coeff": draw(st.integers(0, 20)), "topk": 1}
    if function == "sinkhorn_routing":
        fields["evaluation"] = draw(st.booleans())
        fields |= {
            "tokens": min(fields["tokens"], 64),
            "experts": min(fields["experts"], 64),
            "topk": min(fields["topk"], 8, fields["experts"], 64),
        }
    cotangent = {"aux_loss_scores": "d_scores", "sinkhorn_routing": "d_probs"}.get(function)
    vectors = ("padding_mask",) if fields.get("padding") else ()
    fields |= _laid_out(draw, function, space, ("logits",), vectors, (cotangent,) if grads and cotangent else ())
    return _finished(draw, LogitsCase(function=function, **fields), space)


@st.composite
def load_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """drop_tokens, load_balancing_loss and update_expert_bias."""
    fields = draw(shape(space)) | _common(draw)
    main = {"drop_tokens": "probs", "load_balancing_loss": "scores"}.get(function, "")
    grads = draw(mostly(main, ("",))) if main and function not in space.not_differentiable else ""
    vectors: tuple[str, ...] = ()
    if function == "drop_tokens":
        fields |= {
            "values": draw(st.sampled_from(("distinct", "ties", "zeros", "negative"))),
            "map_dtype": draw(mostly("bool", ("uint8", "int32", "int64"))),
        }
        fields["capacity"] = draw(sizes(0, max(2 * fields["tokens"] * fields["topk"] // fields["experts"], 3)))
        fields["policy"] = (
            draw(st.sampled_from(("probs", "position"))) if space.accepts(function, "drop_policy") else "probs"
        )
        fields["pad"] = draw(st.booleans()) if space.accepts(function, "pad_to_capacity") else False
        fields["dtype"] = draw(mostly("float32", DTYPES[1:]))
    elif function == "load_balancing_loss":
        fields |= {
            "values": draw(st.sampled_from(("distinct", "zeros", "negative"))),
            "map_dtype": draw(st.sampled_from(("int64", "int32"))),
        }
        fields |= {
            "sequences": draw(st.sampled_from((1, 1, 2, 3))),
            "coeff": draw(st.integers(0, 20)),
            "dtype": draw(mostly("float32", LOGIT_DTYPES[1:])),
        }
        fields["total"] = draw(st.sampled_from(("number", "number", "device", "zero")))
        vectors = ("tokens_per_expert",)
    else:
        fields |= {
            "rate": draw(st.integers(0, 500)),
            "bias": draw(st.sampled_from((0, 1, 4, 100))),
            "even": draw(st.sampled_from((False, False, False, True))),
        }
        fields["map_dtype"] = draw(st.sampled_from(("int64", "int32", "uint8")))
        vectors = ("expert_bias", "tokens_per_expert")
    matrices = {"drop_tokens": ("probs", "routing_map"), "load_balancing_loss": ("scores",)}.get(function, ())
    fields |= _laid_out(
        draw, function, space, matrices, vectors, ("d_probs",) if grads and function == "drop_tokens" else ()
    )
    return _finished(draw, LoadCase(function=function, **fields), space)


@st.composite
def gate_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """gate, jitter and attach_loss."""
    fields: dict[str, Any] = {
        "tokens": draw(sizes(0, 40)),
        "hidden": draw(sizes(1, 140)),
        "dtype": draw(mostly("float32", DTYPES[1:])),
    } | _common(draw)
    vectors: tuple[str, ...] = ()
    possible: tuple[str, ...] = {"gate": ("x", "weight"), "attach_loss": ("x", "loss")}.get(function, ())
    if function == "gate":
        fields |= {"experts": draw(sizes(1, 40)), "weight_dtype": draw(mostly("", ("float32", "bfloat16")))}
        fields["router_dtype"] = (
            draw(st.sampled_from(("", "fp32", "fp64"))) if space.accepts(function, "router_dtype") else ""
        )
        if space.accepts(function, "bias") and draw(st.booleans()):
            fields["bias"] = True
            possible, vectors = (*possible, "bias"), ("bias",)
    elif function == "jitter":
        fields["eps"] = draw(st.integers(0, 15))
    else:
        fields["scale"] = draw(st.integers(-20, 40))
    grads = draw(some_of(possible)) if possible and function not in space.not_differentiable else ""
    cotangents = ({"gate": "d_logits", "attach_loss": "d_x"}[function],) if grads else ()
    fields |= {"grads": grads} | _laid_out(
        draw, function, space, ("x", "weight") if function == "gate" else ("x",), vectors, cotangents
    )
    case = _finished(draw, GateCase(function=function, **fields), space)
    return draw(maybe_shared_out(case, space)) if function == "gate" else case
