"""Cases of activations that are quantised at once: every recipe and activation, ragged groups, and widths around blocks."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import DTYPES, Space, some_of
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts.axes import GATES, PLAIN
from conformance.families.experts.cases import VALUES, WEIGHTS
from conformance.families.experts.space import PROB_DTYPES, finished, laid_out
from conformance.families.fused.cases import (
    BACKWARD,
    FUNCTIONS,
    OF_GATES,
    RECIPES_HERE,
    QuantizedActivationCase,
    fits,
    is_random,
    is_transformed,
)
from conformance.families.quantization.cases import DIRECTIONS, VARIANTS, unit_of
from conformance.families.quantization.quantize import SUFFIXES
from conformance.families.quantization.space import groups, mostly_some

INPUTS = dict.fromkeys(FUNCTIONS, ("h", "probs", "splits", "d_dequantized")) | dict.fromkeys(
    BACKWARD, ("d_out", "h", "probs", "splits")
)
WIDTHS, ROWS = (
    {"block": 140, "mxfp8": 3, "nvfp4": 5},
    {"block": 200, "mxfp8": 2, "nvfp4": 4},
)  # in units; a block, and a little more
SELDOM = ("doubled_probs", "padding_values", "neighbour_groups")  # laws that few cases have


def may_be(space: Space, function: str, **fields: Any) -> bool:
    """Whether the implementation has the settings that a case with these fields needs, and the call is legal."""
    case = QuantizedActivationCase(function=function, **fields)
    needed = {
        "splits": case.experts > 0,
        "rowwise": case.direction == "columnwise",
        "columnwise": case.direction != "rowwise",
        "state": case.scaling == "delayed",
        "noise": is_random(case),
        "round_before_quantize": case.rounded,
        **{name: bool(getattr(case, name)) for name in ("kind", "offset", "clamp", "alpha", "interleave", "probs")},
    }
    return fits(case) and all(space.accepts(function, name) for name, wanted in needed.items() if wanted)


@st.composite
def quantized_activation_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """The four functions."""
    kinds = [
        {"scaling": scaling, "variant": variant, "direction": way}
        for scaling in RECIPES_HERE
        for variant in range(VARIANTS)
        for way in DIRECTIONS
    ]
    plain = {"dtype": "bfloat16", "rounded": True}
    fields: dict[str, Any] = draw(
        st.sampled_from(
            [kind for kind in kinds if may_be(space, function, **kind, **plain) or may_be(space, function, **kind)]
        )
    )
    fields = {"function": function} | fields
    transformed = is_transformed(QuantizedActivationCase(**fields))
    rounds = space.accepts(function, "round_before_quantize")
    fields |= (
        plain if transformed else {"dtype": draw(st.sampled_from(DTYPES)), "rounded": rounds and draw(st.booleans())}
    )
    fields |= draw(groups(ROWS.get(fields["scaling"], 24), space.accepts(function, "splits")))
    fields |= {"width": draw(mostly_some(WIDTHS.get(fields["scaling"], 24))), "values": draw(st.sampled_from(VALUES))}
    fields |= draw(gate_settings(function, space, fields["width"] * unit_of(QuantizedActivationCase(**fields))))
    possible: tuple[str, ...] = ("h",)
    if space.accepts(function, "probs") and draw(st.integers(0, 3)):
        fields |= {"probs": draw(st.sampled_from(PROB_DTYPES)), "weights": draw(st.sampled_from(WEIGHTS))}
        possible = ("h", "probs")
    with_grads = (
        function not in BACKWARD
        and function not in space.not_differentiable
        and not (transformed and fields["direction"] == "columnwise")
    )
    fields |= {
        "grads": draw(some_of(possible)) if with_grads else "",
        "index_dtype": draw(st.sampled_from(("int64", "int32"))),
    }
    case = QuantizedActivationCase(**fields)
    vectors = tuple(name for name, there in (("probs", case.probs), ("splits", case.experts)) if there)
    cotangents = (f"d_dequantized{SUFFIXES[case.direction][0]}",) if case.grads else ()
    layout = laid_out(
        draw, function, space, INPUTS[function][:2] if function in BACKWARD else ("h",), vectors, cotangents
    )
    made = finished(draw, replace(case, **layout), space)  # type: ignore[arg-type]
    seldom = [law for law in space.laws(made) if law in SELDOM]
    return replace(made, law=draw(st.sampled_from([made.law, *seldom])))


@st.composite
def gate_settings(draw: st.DrawFn, function: str, space: Space, width: int) -> dict[str, Any]:
    """A kind and settings that fit it, as far as they are accepted."""
    fields: dict[str, Any] = {
        "kind": draw(st.sampled_from(GATES if function in OF_GATES else PLAIN))
        if space.accepts(function, "kind")
        else ""
    }
    if function not in OF_GATES:
        return fields
    choices: dict[str, tuple[int, ...]] = {
        "offset": (0, 0, 8, -4),
        "clamp": (0, 0, 4, 56),
        "alpha": (0, 1702, 250) if fields["kind"] in ("", "quick_geglu") else (0,),
        "interleave": (0, *(s for s in (1, 2, 3, 8, 32, width) if s and width % s == 0)),
    }
    return fields | {
        name: draw(st.sampled_from(values)) for name, values in choices.items() if space.accepts(function, name)
    }


def far_quantized_activations(function: str, space: Space) -> list[Case]:
    """Every input and cotangent once far in each of its dimensions."""
    backward = function in BACKWARD
    split, weighed = space.accepts(function, "splits"), space.accepts(function, "probs")
    grads = "" if backward or function in space.not_differentiable else "h+probs" if weighed else "h"
    common: dict[str, Any] = {
        "function": function,
        "tokens": 3,
        "width": 3,
        "dtype": "bfloat16",
        "grads": grads,
        "index_dtype": "int32",
    }
    common |= {"experts": 2} if split else {}
    common |= {"probs": "bfloat16"} if weighed else {}
    there = {"splits": split, "probs": weighed, "d_dequantized": bool(grads)}
    wanted = [name for name in INPUTS[function] if there.get(name, True)]
    dimensions = {"probs": 1, "splits": 1}
    return [
        QuantizedActivationCase(**common, layout=layout, layout_of=name)
        for name in wanted
        for layout in WIDE_LAYOUTS[: dimensions.get(name, 2)]
    ]


def quantized_activation_shapes(function: str, space: Space) -> list[dict[str, Any]]:
    """One more than a block, many groups, and blocks of d_h that hold gates and values; wide rows where a GPU makes them cheap."""
    both: dict[str, Any] = {"direction": "both"} if space.accepts(function, "columnwise") else {}
    found: list[dict[str, Any]] = [
        both | {"scaling": "block", "tokens": 130, "width": 130, "values": "rows", "dtype": "bfloat16"}
    ]
    found += [both | {"scaling": "mxfp8", "tokens": 2, "width": 8, "values": "rows"}]
    if space.accepts(function, "splits"):
        found += [
            both
            | {
                "scaling": "block",
                "tokens": 133,
                "experts": 5,
                "counts": (0, 130, 1, 0, 2),
                "tail": 3,
                "width": 6,
                "dtype": "bfloat16",
            }
        ]
        found += [{"scaling": "current", "tokens": 40, "experts": 33, "tail": 2, "width": 9, "dtype": "bfloat16"}]
    wide: list[dict[str, Any]] = [
        both | {"scaling": scaling, "tokens": 8, "width": 2880 // unit}
        for scaling, unit in (("block", 1), ("mxfp8", 32))
    ]
    wide += [
        both | {"scaling": "block", "tokens": 2049, "width": 256, "dtype": "bfloat16"},
        {"scaling": "current", "tokens": 300, "width": 2048},
    ]
    return [*found, *(wide if space.device == "cuda" else [])]
