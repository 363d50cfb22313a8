"""Cases of expert MLPs: segments, settings of the activation between the layers, and what stands beside the products."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.shared_out_space import maybe_shared_out
from conformance.core.space import LOGIT_DTYPES, Space, mostly, sizes, some_of
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts.axes_mlp import gated, inputs_of, may_be_low
from conformance.families.experts.mlp import BIASES, VALUES, WEIGHTS, MlpCase
from conformance.families.experts.precision import may_override
from conformance.families.experts.shared import SharedCase
from conformance.families.experts.space import LOW_SHARE, PROB_DTYPES, few_segments, finished, laid_out, segments
from conformance.families.quantization.cases import RECIPES, UNIT, VARIANTS
from moe_ref.config import GATED, PLAIN
from moe_ref.config.quantization import OVERRIDES

DIMENSIONS = {"probs": 1, "tokens_per_expert": 1, "fc1_weight": 3, "fc2_weight": 3}  # of an input that has not two
RECOMPUTED = ("", "", "moe_act", "moe")
LOW_WIDTHS = {1: 20, 16: 3, 32: 2}  # at most, by the unit that columns are counted in
FINITE: dict[str, Any] = {"values": "rows", "dtype": "bfloat16"}
_SIZES = st.sampled_from((0,) + (1,) * 15).flatmap(lambda least: sizes(least, 20 * least))  # seldom nothing at all
_SEGMENTS = st.sampled_from((False,) + (True,) * 7).flatmap(
    lambda some: segments().filter(lambda found: found["tokens"]) if some else segments()
)


@st.composite
def mlp_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """grouped_mlp and sequential_mlp."""
    case: Any = draw(high_mlp_cases(function, space))
    if not (low := draw(recipes(function, case, space))):
        return case
    unit = UNIT.get(low["scaling"], 1)
    fields: dict[str, Any] = draw(few_segments(9 if unit == 1 else 3)) | {
        "hidden": draw(sizes(1, LOW_WIDTHS[unit])),
        "width": draw(sizes(1, LOW_WIDTHS[unit])),
    }
    align = -(-case.align // unit) * unit
    layout = {} if case.layout != "expanded" else {"layout": "contiguous", "layout_of": ""}
    return fitted(
        draw, replace(case, **FINITE | low | fields | layout, align=align, interleave=min(case.interleave, 1)), space
    )


def recipes(function: str, case: Any, space: Space) -> st.SearchStrategy[dict[str, Any]]:
    """A recipe that the function can be asked for, or none; one in so many is in low precision, for which an interpreter pays most."""
    plain: list[dict[str, Any]] = [
        {"scaling": scaling, "variant": variant} for scaling in RECIPES for variant in range(VARIANTS)
    ]
    overridden = [
        low | {"override": override}
        for low in plain
        for override in OVERRIDES
        if case.grads and may_override(low["scaling"])
    ]
    every = [*plain, *plain, *overridden]
    possible = [
        low for low in every if may_be_low(function, type(case)(function=function, dtype="bfloat16", **low), space)
    ]
    return st.integers(1, LOW_SHARE[space.device]).flatmap(
        lambda i: st.sampled_from(possible) if i == 1 and possible else st.just({})
    )


def fitted(draw: st.DrawFn, case: Any, space: Space) -> Case:
    """With values and a dtype that the recipe takes, and without the gradients that it does not."""
    kinds = [{"values": values, "dtype": dtype} for values in ("dyadic", "rows") for dtype in ("float32", "bfloat16")]
    possible = [kind for kind in kinds if may_be_low(case.function, replace(case, **kind), space)]
    if not possible:
        case, possible = (
            replace(case, grads="", **({"layout": "contiguous", "layout_of": ""} if case.layout_of == "d_out" else {})),
            kinds,
        )
    case = replace(case, **draw(st.sampled_from(possible)), law="")
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


@st.composite
def high_mlp_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """The same, in high precision."""
    fields: dict[str, Any] = draw(_SEGMENTS) | {"hidden": draw(_SIZES), "width": draw(_SIZES)}
    fields |= {"values": draw(st.sampled_from(VALUES)), "dtype": draw(mostly("float32", LOGIT_DTYPES[1:]))}
    fields |= draw(mlp_settings(function, space, fields["width"]))
    if space.accepts(function, "probs") and draw(st.integers(0, 4)):
        fields |= {"probs": draw(st.sampled_from(PROB_DTYPES)), "weights": draw(st.sampled_from(WEIGHTS))}
        fields["early"] = space.accepts(function, "round_before_probs") and draw(st.booleans())
        fields["on_input"] = space.accepts(function, "probs_on_input") and not draw(st.integers(0, 2))
    for field, name in BIASES.items():
        fields[field] = draw(st.sampled_from(("", "", *PROB_DTYPES))) if space.accepts(function, name) else ""
    fields["align"] = draw(st.sampled_from((0, 0, 1, 3, 8, 16))) if space.accepts(function, "align") else 0
    fields["recompute"] = draw(st.sampled_from(RECOMPUTED)) if space.accepts(function, "recompute") else ""
    fields["index_dtype"] = draw(st.sampled_from(("int64", "int32")))
    possible = inputs_of(function, fields)
    fields["grads"] = draw(st.just("") | some_of(possible)) if function not in space.not_differentiable else ""
    vectors = ("tokens_per_expert", *(name for name in possible if name in ("probs", *BIASES.values())))
    cotangents = ("d_out",) if fields["grads"] else ()
    fields |= laid_out(draw, function, space, ("rows", "fc1_weight", "fc2_weight"), vectors, cotangents)
    return finished(draw, MlpCase(function=function, **fields), space)


@st.composite
def shared_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """shared_experts."""
    case: Any = draw(high_shared_cases(function, space))
    if case.counts or not (low := draw(recipes(function, case, space))):
        return case
    unit = UNIT.get(low["scaling"], 1)
    tall = draw(sizes(1, 9 if unit == 1 else 3))
    sized: dict[str, Any] = {
        "tokens": tall,
        "hidden": draw(sizes(1, LOW_WIDTHS[unit])),
        "width": draw(sizes(1, LOW_WIDTHS[unit])),
    }
    layout = {} if case.layout != "expanded" else {"layout": "contiguous", "layout_of": ""}
    return fitted(draw, replace(case, **FINITE | low | sized | layout, interleave=min(case.interleave, 1)), space)


@st.composite
def high_shared_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """The same, in high precision."""
    fields: dict[str, Any] = {"tokens": draw(sizes(0, 34)), "hidden": draw(_SIZES), "width": draw(_SIZES)}
    fields |= {"values": draw(st.sampled_from(VALUES)), "dtype": draw(mostly("float32", LOGIT_DTYPES[1:]))}
    fields |= draw(mlp_settings(function, space, fields["width"]))
    fields["gate"] = space.accepts(function, "gate_weight") and draw(st.booleans())
    fields["again"] = space.accepts(function, "recompute") and not draw(st.integers(0, 2))
    possible = inputs_of(function, fields)
    fields["grads"] = draw(st.just("") | some_of(possible)) if function not in space.not_differentiable else ""
    fields |= laid_out(draw, function, space, possible, (), ("d_out",) if fields["grads"] else ())
    return draw(maybe_shared_out(finished(draw, SharedCase(function=function, **fields), space), space))


@st.composite
def mlp_settings(draw: st.DrawFn, function: str, space: Space, width: int) -> dict[str, Any]:
    """A kind, gated or not, and settings that fit it, as far as they are accepted."""
    fields: dict[str, Any] = {"kind": draw(mostly("", (*GATED[1:], *PLAIN))) if space.accepts(function, "kind") else ""}
    if not gated(fields["kind"]):
        return fields
    choices: dict[str, tuple[int, ...]] = {
        "offset": (0, 0, 8, -4),
        "clamp": (0, 0, 4, 8, 56),
        "alpha": (0, 0, 1702, 250) if fields["kind"] in ("", "quick_geglu") else (0,),
        "interleave": (0, *(s for s in (1, 2, 3, width) if s and width % s == 0)),
    }
    fields["stored"] = space.accepts(function, "fp8_input_store") and not fields["kind"] and not draw(st.integers(0, 3))
    return fields | {
        name: draw(st.sampled_from(values)) for name, values in choices.items() if space.accepts(function, name)
    }


def far_mlp(function: str, space: Space) -> list[Case]:
    """Every input and cotangent once far in each of its dimensions, in the narrowest dtype that it may have."""
    cls: Any = Case.family[function]
    common: dict[str, Any] = {
        "function": function,
        "tokens": 3,
        "experts": 3,
        "hidden": 3,
        "width": 3,
        "dtype": "bfloat16",
    }
    if cls is SharedCase:
        given: dict[str, Any] = {"gate": True} if space.accepts(function, "gate_weight") else {}
        grads = wanted = inputs_of(function, {"gate": bool(given)})
        dimensions: dict[str, int] = {}
    else:
        given = {
            field: "bfloat16" for field, name in {"probs": "probs", **BIASES}.items() if space.accepts(function, name)
        }
        given |= {"index_dtype": "int32"}
        grads = inputs_of(function, given)
        wanted, dimensions = (*grads, "tokens_per_expert"), DIMENSIONS
    if function not in space.not_differentiable:
        given, wanted = given | {"grads": "+".join(grads)}, (*wanted, "d_out")
    places = [
        (name, layout)
        for name in wanted
        for layout in WIDE_LAYOUTS[: dimensions.get(name, 2)]
        if (name, layout) != ("gate_weight", "wide_rows")
    ]
    return [cls(**common, **given, layout=layout, layout_of=name) for name, layout in places]  # a gate has one row


def mlp_shapes(function: str, space: Space) -> list[dict[str, Any]]:
    """One more than a power of two; more experts than rows; the widths of real models where a GPU makes them cheap."""
    gpu = space.device == "cuda"
    if function == "shared_experts":
        real = [{"tokens": 70, "hidden": 2880, "width": 1440, "dtype": "bfloat16"}] if gpu else []
        return [{"tokens": 129, "hidden": 65, "width": 33, "gate": space.accepts(function, "gate_weight")}, *real]
    biased = {field: "float32" for field, name in BIASES.items() if space.accepts(function, name)}
    ragged = {
        "tokens": 133,
        "experts": 5,
        "counts": (0, 65, 1, 0, 67),
        "hidden": 65,
        "width": 33,
        "values": "rows",
        **biased,
    }
    many = {"tokens": 40 if gpu else 12, "experts": 129 if gpu else 17, "hidden": 9, "width": 5, **biased}
    real = [{"tokens": 70, "experts": 4, "hidden": 2880, "width": 1440, "dtype": "bfloat16", **biased}] if gpu else []
    if function == "sequential_mlp":
        return [ragged]
    # each layer has scales of its own, also where it is computed again
    again: dict[str, Any] = {
        "tokens": 5,
        "experts": 2,
        "hidden": 2,
        "width": 2,
        "dtype": "bfloat16",
        "scaling": "delayed",
        "recompute": "moe_act",
    }
    possible = space.accepts(function, "recompute") and may_be_low(function, MlpCase(function=function, **again), space)
    return [ragged, many, *([again] if possible else []), *real]
