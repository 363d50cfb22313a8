"""Cases of what happens inside experts: activations, with every setting and dtype, and grouped products in high and in low precision."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import FAR as FAR_LAYOUTS
from conformance.core.axes import Changes
from conformance.core.case import Case
from conformance.core.scope import Scope, Shapes
from conformance.core.space import LAYOUTS, LOGIT_DTYPES, POISONS, Space, mostly, sizes, some_of
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts.axes import SETTING, may_be_low
from conformance.families.experts.cases import GROUPED_VALUES, GroupedCase
from conformance.families.experts.cases import PROB_DTYPES as PROB_DTYPES
from conformance.families.experts.precision import LOW_VALUES, fits, may_override, recipe_settings
from conformance.families.quantization.cases import RECIPES, VARIANTS
from moe_ref.config.quantization import OVERRIDES

FAR_GRADS = {
    "grouped_linear": ("rows", "weight", "bias"),
    "latent_projection": ("x", "weight", "bias"),
}
DIMENSIONS = {"probs": 1, "tokens_per_expert": 1, "weight": 3, "accumulate_into": 3}  # of an input that has not two
OF_ONE = {"bias": 1}  # the same, of one expert
INPUTS = {
    "grouped_linear": ("rows", "weight", "tokens_per_expert", "bias", "d_out"),
    "latent_projection": ("x", "weight", "bias", "d_out"),
    "grouped_dgrad": ("d_out", "weight", "tokens_per_expert"),
    "grouped_wgrad": ("d_out", "rows", "tokens_per_expert", "accumulate_into"),
}

FACTORS = {
    "grouped_linear": ("rows", "weight"),
    "grouped_dgrad": ("weight",),
    "grouped_wgrad": ("rows",),
    "latent_projection": ("x", "weight"),
}


def activations(scope: Scope) -> st.SearchStrategy[Changes]:
    """Small sizes, or one size above every block; blocks of columns that divide the width, up to all of it."""
    small, medium = (st.tuples(sizes(0, 9), sizes(0, 18)), st.tuples(sizes(1, 34), sizes(1, 34)))
    sized = st.one_of(small, medium, st.sampled_from(((3, 129), (70, 3))))

    def with_blocks(shape: tuple[int, int]) -> st.SearchStrategy[Changes]:
        tokens, width = shape
        steps = (0, *(step for step in (1, 2, 3, 8, 16, 32, width) if step and width % step == 0))
        return st.sampled_from(steps).map(lambda step: {"tokens": tokens, "width": width, "interleave": step})

    return sized.flatmap(with_blocks)


def near(case: Any, scope: Scope) -> Any:
    """The case without a far layout: for those there are the far cases."""
    return replace(case, layout="contiguous", layout_of="") if case.layout in FAR_LAYOUTS else case


def long_rows(scope: Scope) -> list[Changes]:
    """One more row than a power of two; blocks of rows and of columns; the widths of real models where a GPU makes them cheap."""
    gpu = scope.space.device == "cuda"
    wide: list[Changes] = (
        [{"tokens": 5, "width": 2880}, {"tokens": 3, "width": 7168}] if gpu else [{"tokens": 3, "width": 513}]
    )
    return [{"tokens": 2049 if gpu else 129, "width": 9, "values": "rows"}, {"tokens": 97, "width": 257}, *wide]


ELEMENTWISE = Shapes(drawn=activations, affordable=near, covered={"tokens": 5, "width": 6}, always=long_rows)
SPACE = {"glu": ELEMENTWISE, "activation": ELEMENTWISE}


def laid_out(
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


def finished(draw: st.DrawFn, case: Case, space: Space) -> Case:
    """The case with a seed, a poison and a law that applies to it."""
    case = replace(case, seed=draw(st.integers(0, 999)), poison=draw(st.sampled_from(POISONS)))
    return replace(case, law=draw(st.sampled_from(space.laws(case))))


# at most, in units: rows of an expert, and columns; as few as fill no second block, and more
LOW_SIZES = {"delayed": (30, 40), "current": (30, 40), "block": (140, 150), "mxfp8": (3, 3), "nvfp4": (5, 6)}
LOW_SHARE = {
    "cuda": 3,
    "cpu": 12,
}  # one in so many grouped products is in low precision, for which an interpreter pays most


def grouped_cases(function: str, space: Space) -> st.SearchStrategy[Case]:
    """grouped_linear, grouped_dgrad and grouped_wgrad, and latent_projection."""
    recipes = [(scaling, variant) for scaling in RECIPES for variant in range(VARIANTS)]
    bare = [
        GroupedCase(function=function, scaling=scaling, variant=variant, dtype="bfloat16")
        for scaling, variant in recipes
    ]
    possible = [(case.scaling, case.variant) for case in bare if may_be_low(function, case, space)]
    if not possible:
        return product_cases(function, space, "", 0)
    low = st.sampled_from(possible).flatmap(lambda recipe: product_cases(function, space, *recipe))
    return st.integers(1, LOW_SHARE[space.device]).flatmap(
        lambda i: low if i == 1 else product_cases(function, space, "", 0)
    )


@st.composite
def product_cases(draw: st.DrawFn, function: str, space: Space, scaling: str, variant: int) -> Case:
    """In high precision, or by a recipe."""
    one, differentiable = function == "latent_projection", function not in ("grouped_dgrad", "grouped_wgrad")
    fields: dict[str, Any] = draw(all_tokens(34) if one else segments()) | {
        "hidden": draw(sizes(0, 40)),
        "width": draw(sizes(0, 40)),
    }
    values: tuple[str, ...] = GROUPED_VALUES
    if scaling:
        rows, columns = LOW_SIZES[scaling]
        fields = draw(all_tokens(rows) if one else few_segments(rows)) | {"scaling": scaling, "variant": variant}
        fields |= {"hidden": draw(sizes(1, columns)), "width": draw(sizes(1, columns))}
        values = (*GROUPED_VALUES, *LOW_VALUES)
    fields |= {"values": draw(st.sampled_from(values)), "dtype": draw(mostly("float32", LOGIT_DTYPES[1:]))}
    fields["accumulator"] = (
        draw(st.sampled_from(("",) * 5 + ("float64",))) if space.accepts(function, "accumulator") else ""
    )
    fields["index_dtype"] = draw(st.sampled_from(("int64", "int32"))) if not one else "int64"
    matrices = FACTORS[function]
    vectors: list[str] = []
    possible: tuple[str, ...] = matrices
    if differentiable and space.accepts(function, "bias") and draw(st.booleans()):
        fields["bias"] = draw(st.sampled_from(("float32", "bfloat16", "float64")))
        possible, vectors = (*possible, "bias"), ["bias"]
    if function == "grouped_wgrad" and space.accepts(function, "accumulate_into"):
        fields["into"] = draw(st.sampled_from(("", "float32", "float64")))
        vectors = ["accumulate_into"] if fields["into"] else []
    fields["grads"] = draw(some_of(possible)) if differentiable and function not in space.not_differentiable else ""
    cotangents = ("d_out",) if fields["grads"] or not differentiable else ()
    if may_override(scaling) and (fields["grads"] or not differentiable):
        fields["override"] = draw(st.sampled_from((*OVERRIDES, *("",) * 4)))
    case = GroupedCase(function=function, **fields)
    if not fits(case):
        case = replace(case, dtype="bfloat16", values="dyadic")
    noise = ("noise",) * 3 if "noise" in recipe_settings(case) else ()  # seldom there: oftener chosen then
    layout = laid_out(
        draw, function, space, (*matrices, *noise), (*(() if one else ("tokens_per_expert",)), *vectors), cotangents
    )
    return finished(draw, replace(case, **layout), space)  # type: ignore[arg-type]


def all_tokens(most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Up to so many, of one expert."""
    return sizes(0, most).map(lambda tokens: {"tokens": tokens})


@st.composite
def few_segments(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Counts: a few of any size up to this, one expert with all rows, and none with any; and rows behind them."""
    kind = draw(st.sampled_from(("few", "few", "few", "one", "none")))
    part = st.just(0) if kind == "none" else sizes(0, most) | st.sampled_from((0, 1))
    counts = tuple(draw(st.lists(part, min_size=1, max_size=4)))
    if kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, most)), *[0] * draw(st.integers(0, 3))])))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 5))),
    }


@st.composite
def segments(draw: st.DrawFn) -> dict[str, Any]:
    """Counts: a few of any size, many small ones, one expert with all rows, none with any; and rows behind them."""
    kind = draw(st.sampled_from(("few", "few", "few", "many", "one", "none")))
    if kind == "many":
        counts = tuple(draw(st.lists(st.sampled_from((0, 0, 1, 2)), min_size=9, max_size=40)))
    elif kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, 64)), *[0] * draw(st.integers(0, 4))])))
    else:
        size = st.integers(0, 9) | sizes(0, 34) if kind == "few" else st.just(0)
        counts = tuple(draw(st.lists(size, min_size=1, max_size=5)))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 7))),
    }


def far_experts(function: str, space: Space) -> list[Case]:
    """Every input and cotangent once far in each of its dimensions, in the narrowest dtype that it may have."""
    differentiable = function not in space.not_differentiable
    cls: Any = Case.family[function]
    given = {"bias": "bfloat16", "into": "float32"}
    known = {
        field: dtype
        for field, dtype in given.items()
        if field in cls.__dataclass_fields__ and SETTING.get(field, field) in INPUTS[function]
    }
    known = {field: dtype for field, dtype in known.items() if space.accepts(function, SETTING.get(field, field))}
    left_out = {SETTING.get(field, field) for field in given} - {SETTING.get(field, field) for field in known}
    grads = "+".join(name for name in FAR_GRADS.get(function, ()) if name not in left_out) if differentiable else ""
    wanted = [
        name
        for name in INPUTS[function]
        if name not in left_out and (grads or name != "d_out" or function not in FAR_GRADS)
    ]
    common: dict[str, Any] = {
        "function": function,
        "tokens": 3,
        "experts": 3,
        "width": 3,
        "dtype": "bfloat16",
        "grads": grads,
    } | known
    common |= {"hidden": 3, "index_dtype": "int32"}
    dimensions = OF_ONE if function == "latent_projection" else DIMENSIONS
    return [
        cls(**common, layout=layout, layout_of=name)
        for name in wanted
        for layout in WIDE_LAYOUTS[: dimensions.get(name, 2)]
    ]


def expert_shapes(function: str, space: Space) -> list[dict[str, Any]]:
    """One more than a power of two, so that a last block is nearly empty; the widths of real models where a GPU makes them cheap."""
    gpu = space.device == "cuda"
    if function == "latent_projection":
        return [
            {"tokens": 129, "hidden": 65, "width": 33},
            *([{"tokens": 70, "hidden": 7168, "width": 1024}] if gpu else []),
        ]
    real = (
        [
            {"tokens": 70, "experts": 4, "hidden": 7168, "width": 520},
            {"tokens": 70, "experts": 4, "hidden": 520, "width": 2880},
        ]
        if gpu
        else []
    )
    ragged = {"tokens": 133, "experts": 5, "counts": (0, 65, 1, 0, 67), "hidden": 65, "width": 33, "values": "rows"}
    return [
        ragged,
        {"tokens": 40, "experts": 129, "hidden": 9, "width": 5},
        {"tokens": 3, "experts": 2, "hidden": 257, "width": 9, "tail": 2},
        *real,
    ]
