"""Cases of quantisation beyond their axes: kinds of quantisers, ragged groups, steps, and shapes
that every run has.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes, sizes
from conformance.core.model_sizes import FEW_ROWS, MODEL_WIDTHS, SPLITS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.signature import FAR, NEAR
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    TRANSFORMED,
    UNIT,
    VALUES,
    VARIANTS,
    QuantizeCase,
    is_transformed,
)
from conformance.families.quantization.model_rows import MODEL_ROWS
from conformance.judge.statistics import LEAST_REPEATS
from moe_ref.config import Recipe
from moe_ref.quantization.recipes import scheme

# in units: most columns and rows drawn, around the block size
COLUMNS, ROWS = {"block": 300, "mxfp8": 3, "nvfp4": 7}, {"block": 280, "mxfp8": 3, "nvfp4": 6}
# in units: no splits; the first, middle or last group empty
GROUPS: list[Changes] = [
    {"tokens": 3, "experts": 0},
    *({"counts": counts, "experts": len(counts), "tokens": sum(counts)} for counts in ((0, 3), (2, 0, 1), (1, 2, 0))),
]
HIDDEN = {"block": 133, "mxfp8": 2, "nvfp4": 3}  # in units
DOUBLES = ("current", "block", "mxfp8")  # scalings of float64 tensors
KINDS, MORE_KINDS = (
    tuple(
        {"scaling": scaling, "variant": variant, "role": role, "direction": direction}
        for scaling, recipes in RECIPES.items()
        for variant in range(len(recipes))[variants]
        for role in ROLES
        for direction in DIRECTIONS
    )
    for variants in (slice(VARIANTS), slice(VARIANTS, None))
)
AFTER_AN_INFINITY = "quantize+update+quantize+update+quantize"  # steps whose special values are in the first step only
RARE = 8  # one case in RARE has a further recipe


def accepted(scope: Scope, fields: Changes) -> bool:
    """Whether the implementation accepts a case with these fields."""
    return scope.takes(scope.case(fields))


def drawn(scope: Scope) -> st.SearchStrategy[Changes]:
    """All quantiser kinds, equally often; supported values and dtypes; sizes around the blocks."""
    taken, rare_kinds = ([kind for kind in kinds if accepted(scope, kind)] for kinds in (KINDS, MORE_KINDS))
    kinds = st.integers(1, RARE).flatmap(lambda i: st.sampled_from(rare_kinds if rare_kinds and i == RARE else taken))
    return kinds.flatmap(lambda kind: _of_kind(scope, kind))


@st.composite
def _of_kind(draw: st.DrawFn, scope: Scope, kind: Changes) -> Changes:
    fields = dict(kind)
    transformed = is_transformed(scope.case(kind))
    if transformed:
        fields["dtype"] = "bfloat16"
    fields["values"] = draw(st.sampled_from(TRANSFORMED if transformed else VALUES))
    fields["hidden"] = draw(mostly_some(COLUMNS.get(kind["scaling"], 70)))
    fields |= draw(groups(ROWS.get(kind["scaling"], 40), scope.accepts("splits")))
    fields |= {"steps": draw(steps()) if kind["scaling"] == "delayed" else "quantize", "repeats": 0}
    noise = ("float32", "float32", "float64") if scope.case(fields).noisy else ("float32",)
    return fields | {"noise_dtype": draw(st.sampled_from(noise))}


def mostly_some(most: int) -> st.SearchStrategy[int]:
    """A size, rarely 0."""
    return st.integers(0, 15).flatmap(lambda i: sizes(1, most) if i else st.just(0))


@st.composite
def groups(draw: st.DrawFn, most: int, split: bool) -> Changes:
    """Groups: no splits; a few groups; one group with all rows; only empty groups; and rows past
    the last group.
    """
    kind = draw(st.sampled_from((*("whole", "few", "one") * 3, "few", "none"))) if split else "whole"
    if kind == "whole":
        return {"tokens": draw(mostly_some(most)), "experts": 0, "counts": (), "tail": 0}
    if kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, most)), *[0] * draw(st.integers(0, 4))])))
    else:
        count = sizes(0, max(most // 3, 2)) | st.sampled_from((0, 1)) if kind == "few" else st.just(0)
        counts = tuple(draw(st.lists(count, min_size=1, max_size=4)))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 5))),
    }


@st.composite
def steps(draw: st.DrawFn) -> str:
    """Quantise and update steps, with saved states in between."""
    later_steps = draw(
        st.lists(
            st.sampled_from(("quantize", "update+quantize", "update+quantize", "reduced+quantize", "reload", "update")),
            max_size=5,
        )
    )
    return "+".join(["quantize", *later_steps])


def affordable(case: QuantizeCase, scope: Scope) -> QuantizeCase:
    """The case without a far layout beyond the address space."""
    small = case.tokens <= 4 and case.hidden <= 4 and case.dtype != "float32"
    if case.layout in FAR and not small:
        return scope.mended(replace(case, layout="contiguous", layout_of=""))
    return case


def always(scope: Scope) -> list[Any]:
    """Sizes with one row past a block, several scale tiles of cuBLAS, and many groups; on a GPU
    also wide rows.
    """
    square: Changes = {"scaling": "block", "role": "weight"}
    square = square if accepted(scope, square) else {"scaling": "block"}
    both: Changes = {"direction": "both"} if accepted(scope, {"direction": "both"}) else {}
    cases: list[Any] = [
        square | both | {"tokens": 257, "hidden": 129, "values": "rows"},
        square | both | {"tokens": 130, "hidden": 131, "values": "rows", "gemm": True},
        *({"scaling": scaling, "tokens": 3, "hidden": 3, "dtype": "float64", "values": "wide"} for scaling in DOUBLES),
        {"tokens": 40, "hidden": 20, "dtype": "float64", "values": "midpoints"},
        {"scaling": "mxfp8", "tokens": 5, "hidden": 5, "gemm": True, "values": "rows", "dtype": "bfloat16"} | both,
    ]
    if scope.accepts("splits"):
        ragged: Changes = {"tokens": 262, "experts": 5, "counts": (0, 130, 1, 0, 131), "tail": 3, "hidden": 5}
        cases += [
            both | ragged | {"scaling": "block", "values": "bounds"},
            {"scaling": "mxfp8", "tokens": 0, "experts": 2, "counts": (0, 0), "tail": 3, "hidden": 2},
            {"tokens": 66, "experts": 40, "hidden": 33, "tail": 2, "values": "wide"},
            {"tokens": 18, "experts": 16, "hidden": 3, "tail": 2},  # a power of two, and rows past the last
            both
            | {"scaling": "delayed", "tokens": 40, "experts": 20, "hidden": 3, "steps": "quantize+update+quantize"},
        ]
    wide_rows = [both | {"dtype": "bfloat16"} | fields for fields in wide_tensors(scope)]
    return [
        *cases,
        *wide_rows,
        *more_recipes(scope),
        *random_cases(scope),
        *given_noise(scope),
        *saved_states(scope),
        *overwritten_splits(scope, "hidden"),
        *far_current(scope),
        *strange(scope),
        *zero_tensors(scope),
        *scales_without_bound(scope),
        *rare_amaxes(scope),
        *in_groups(scope),
        *tiles_of_lines(scope),
    ]


def wide_tensors(scope: Scope) -> list[Changes]:
    """Few rows, with columns for several programs of several steps each."""
    wide_hidden = 7168 if scope.space.device == "cuda" else 544
    columns = {
        "current": wide_hidden,
        "block": wide_hidden,
        "mxfp8": wide_hidden // UNIT["mxfp8"],
        "nvfp4": wide_hidden // UNIT["nvfp4"],
    }
    return [
        {"scaling": scaling, "tokens": 1 if scaling in UNIT else 8, "hidden": hidden}
        for scaling, hidden in columns.items()
    ]


def more_recipes(scope: Scope) -> list[Any]:
    """Every further recipe, in each role that has its own scheme."""
    recipe_cases = []
    for scaling, recipes in RECIPES.items():
        for variant, recipe in list(enumerate(recipes))[VARIANTS:]:
            kind: Changes = {"scaling": scaling, "variant": variant, "dtype": "bfloat16"}
            kind |= {"values": TRANSFORMED[0] if recipe.hadamard else "rows"}
            kind |= {
                "tokens": 2 if scaling in UNIT else 5,
                "hidden": HIDDEN.get(scaling, 21),
                "direction": "both",
                "seed": variant,
            }
            kind |= {"steps": "quantize+update+" * 3 + "quantize"} if scaling == "delayed" else {}
            recipe_cases += [scope.mended(scope.case(kind | {"role": role})) for role in roles_of(recipe)]
    return [case for case in recipe_cases if case.variant >= VARIANTS]


def roles_of(recipe: Recipe) -> list[str]:
    """One role for each pair of schemes, by rows and by columns, that the recipe has."""
    schemes = {role: tuple(scheme(recipe, role, columnwise=turned) for turned in (False, True)) for role in ROLES}
    return [
        role
        for role, scheme in schemes.items()
        if scheme not in [schemes[earlier_role] for earlier_role in ROLES[: ROLES.index(role)]]
    ]


def strange(scope: Scope) -> list[Any]:
    """Strange values at the ends of rows, next to zeros; and every significand and exponent.

    On a GPU other shapes draw them, except for a strange first value of a whole tensor.
    """
    edges: Changes = {"values": "edges", "tokens": 2, "hidden": 2}
    all_patterns: Changes = {"values": "every", "tokens": 32, "hidden": 256, "dtype": "bfloat16"}
    small: list[Changes] = [
        *({"scaling": "current", "tokens": 4, "hidden": 5, "seed": seed} for seed in (0, 1)),
        *({"scaling": "block", "tokens": 4, "hidden": 130, "seed": seed} for seed in (0, 1)),
        *({"scaling": scaling} for scaling in ("mxfp8", "nvfp4")),
    ]
    large: list[Changes] = [
        {"scaling": "current"},
        {"scaling": "block"},
        {"scaling": "mxfp8", "tokens": 4, "hidden": 3},
        {"scaling": "mxfp8", "tokens": 4, "hidden": 3, "dtype": "float32", "seed": 1},
        {"scaling": "nvfp4", "tokens": 8, "hidden": 4, "variant": 1},
    ]
    cases = [scope.case(common | kind) for common, kinds in ((edges, small), (all_patterns, large)) for kind in kinds]
    # means of neighbours, of nearly all codes of each format
    halves: Changes = {"values": "midpoints", "tokens": 40, "hidden": 20}
    cases += [scope.case(halves | {"role": role}) for role in ("input", "grad_output")]
    if scope.space.device == "cuda":
        cases = cases[:2]
    return [case for case in cases if scope.fits(case)]


def zero_tensors(scope: Scope) -> list[QuantizeCase]:
    """A tensor of zeros only, for which a quotient by its largest value would give a scale of NaN.

    On a GPU only for two scalings, because the others divide in the same kernels.
    """
    common: Changes = {"values": "zeros", "seed": 1, "tokens": 1, "hidden": 1}
    kinds: list[Changes] = [
        {"scaling": "nvfp4", "variant": 1, "role": "weight"},
        {"scaling": "current"},
        {"scaling": "block"},
        {"scaling": "mxfp8"},
    ]
    cases = [scope.case(common | kind) for kind in kinds[: 2 if scope.space.device == "cuda" else None]]
    return [case for case in cases if scope.fits(case)]


def scales_without_bound(scope: Scope) -> list[QuantizeCase]:
    """Blocks of the smallest numbers, whose quotient is infinite.

    Where the scale need not be a power of two, it is the largest number of the tensor's dtype.
    """
    kind: Changes = {"scaling": "block", "variant": 1, "values": "tiny", "dtype": "bfloat16"}
    kind |= {"tokens": 2, "hidden": 3}
    return [scope.case(kind)] if accepted(scope, kind) else []


def rare_amaxes(scope: Scope) -> list[QuantizeCase]:
    """Rows with scales of their own, in several programs, whose largest values are far apart; a
    tensor whose largest value is in any program; a least amax above all values, for each recipe
    that has one; an infinity among the amaxes of earlier steps; smaller amaxes after larger ones,
    in either direction; float16 up to its largest number, whose codes may stand for more; weights
    that change in place; and scales of blocks halfway between two codes.
    """
    columns = 7168 if scope.space.device == "cuda" else 1000
    kinds: list[Changes] = [
        {"scaling": "nvfp4", "variant": 1, "tokens": 1, "hidden": 34, "values": "wide", "dtype": "bfloat16"},
        *({"tokens": 2, "hidden": columns, "values": "wide", "seed": seed} for seed in range(4)),
        *(
            {"scaling": scaling, "variant": variant, "tokens": 3, "hidden": 5, "values": "tiny", "role": "weight"}
            for scaling, recipes in RECIPES.items()
            for variant, recipe in enumerate(recipes)
            if recipe.amax_epsilon
        ),
        {"scaling": "delayed", "tokens": 3, "hidden": 40, "values": "special", "steps": AFTER_AN_INFINITY},
        *(
            {"scaling": "delayed", "tokens": 3, "hidden": 5, "values": "wide", "direction": direction, "seed": seed}
            | {"steps": "quantize+quantize+quantize"}
            for direction in ("rowwise", "columnwise")
            for seed in (0, 1)
        ),
        {"scaling": "block", "tokens": 3, "hidden": 5, "role": "weight", "law": "buffer_reuse"},
        {"scaling": "nvfp4", "variant": 1, "role": "weight", "tokens": 4, "hidden": 4, "values": "levels"},
        *(
            {"scaling": scaling, "tokens": 2, "hidden": 2, "values": "huge", "dtype": "float16", "seed": 1}
            for scaling in ("block", "mxfp8")
        ),
    ]
    cases = [scope.case(kind) for kind in kinds]
    return [case for case in cases if scope.fits(case)]


def in_groups(scope: Scope) -> list[Any]:
    """Groups, and rows past the last group, under a transform.

    On a GPU, where few rows of the covering array run, also row scaling in both directions, and
    multipliers that exceed float16's largest number.
    """
    ragged: Changes = {"tokens": 3, "experts": 3, "counts": (2, 0, 1), "tail": 4, "hidden": 3}
    kinds = [{"scaling": "nvfp4", "variant": variant, "direction": "both", "dtype": "bfloat16"} for variant in (0, 1)]
    tiny: Changes = {"scaling": "mxfp8", "tokens": 2, "hidden": 2, "values": "tiny", "dtype": "float16", "seed": 1}
    grouped = [ragged | kind for kind in kinds if accepted(scope, ragged | kind)]
    if scope.space.device != "cuda":
        return grouped[:1]
    return [*grouped, *(case for case in [scope.case(tiny)] if scope.fits(case))]


def tiles_of_lines(scope: Scope) -> list[Any]:
    """On a GPU only: rows of whole lines, which a copy engine moves; several tiles of 128 × 128,
    some of them partial, in groups and past the last group; and the same for a weight.
    """
    if scope.space.device != "cuda":
        return []
    lines: Changes = {"scaling": "block", "hidden": 272, "dtype": "bfloat16", "direction": "both"}
    rows: Changes = {"tokens": 700, "experts": 4, "counts": (300, 0, 129, 271), "tail": 4}
    kinds = [
        rows,
        rows | {"direction": "columnwise", "dtype": "float16", "variant": 1, "role": "grad_output", "values": "rows"},
        rows | {"direction": "columnwise", "dtype": "float32"},
        {"tokens": 300, "role": "weight"},
    ]
    return [scope.case(lines | kind) for kind in kinds if accepted(scope, lines | kind)]


def random_cases(scope: Scope) -> list[QuantizeCase]:
    """Gradients with noise of the implementation, in each direction."""
    common: Changes = {"scaling": "nvfp4", "role": "grad_output", "repeats": LEAST_REPEATS // 2, "hidden": 2}
    common |= {"steps": "quantize+quantize", "dtype": "bfloat16"}
    kinds = [common | {"direction": direction} for direction in DIRECTIONS[:2]]
    return [scope.case(kind) for kind in kinds if accepted(scope, kind)]


def given_noise(scope: Scope) -> list[QuantizeCase]:
    """Gradients with given noise, which differs between the two directions, and in each direction
    by itself; of NaN, infinities and -0; and noise that only float64 distinguishes from the
    quotient with which it is compared.
    """
    kind: Changes = {"scaling": "nvfp4", "role": "grad_output", "direction": "both", "dtype": "bfloat16"}
    kind |= {"tokens": 2, "hidden": 2}
    variants: list[Changes] = [{}, {"values": "special"}, {"values": "midpoints", "noise_dtype": "float64"}]
    variants += [{"direction": direction} for direction in ("rowwise", "columnwise")]
    return [scope.case(kind | fields) for fields in variants] if accepted(scope, kind) else []


def saved_states(scope: Scope) -> list[QuantizeCase]:
    """A state that is loaded as views of other memory, if tensors may be such views."""
    kind: Changes = {"scaling": "delayed", "tokens": 7, "experts": 3, "hidden": 3, "dtype": "bfloat16"}
    kind |= {"steps": "quantize+update+reload+quantize+update", "layout": "strided", "layout_of": "x"}
    return [case for case in [scope.case(kind)] if scope.fits(case)]


def overwritten_splits(scope: Scope, width: str) -> list[Any]:
    """Scales that are read after the caller's splits hold the counts in another order.

    Args:
        width: the field of the number of columns.
    """
    kind: Changes = {"tokens": 3, "experts": 3, "counts": (0, 1, 2), width: 2, "gemm": True, "law": "buffer_reuse"}
    kinds = [kind | {"scaling": scaling} for scaling in ("block", "mxfp8", "nvfp4")]
    cases = [scope.case(kind) for kind in kinds if accepted(scope, kind)]
    return [case for case in cases if scope.fits(case)]


def far_current(scope: Scope) -> list[QuantizeCase]:
    """Current scaling with a tensor that is far in each dimension; other far cases are NVFP4."""
    narrow: Changes = {"tokens": 3, "hidden": 3, "dtype": "bfloat16"}
    placed = [(name, layout) for name in ("x", "d_dequantized") for layout in FAR[:2]]
    cases = [scope.fullest(narrow | {"layout": layout, "layout_of": name, "grads": "x"}) for name, layout in placed]
    return [case for case in cases if case.layout in FAR]


# all layouts of x, one of splits, one of a cotangent, because all pairs would double the array
LAYOUTS: list[Changes] = [
    {"layout": "contiguous", "layout_of": ""},
    *({"layout": layout, "layout_of": "x"} for layout in NEAR),
    {"layout": "strided", "layout_of": "splits"},
    {"layout": "expanded", "layout_of": "d_dequantized"},
]


def states(scope: Scope) -> Changes:
    """Both directions of the states of Qwen3-30B-A3B, in MXFP8's blocks of 32 columns."""
    return {"scaling": "mxfp8", "direction": "both", "dtype": "bfloat16", "hidden": 2048 // 32}


def of_a_model(scope: Scope) -> Changes:
    """The same, in blocks of 32 rows."""
    return states(scope) | {"tokens": scope.space.real_tokens // 32}


QUANTIZE = Shapes(
    drawn=drawn,
    affordable=affordable,
    covered={"hidden": lambda case: HIDDEN.get(case.scaling, 7 // UNIT.get(case.scaling, 1))},
    models={"hidden": MODEL_WIDTHS, "tokens": FEW_ROWS, "experts": SPLITS},
    of_models={"dtype": "bfloat16"},
    model_rows=MODEL_ROWS,
    together=lambda scope: {"groups": GROUPS, "layout": LAYOUTS, "unused": [{"unused": ""}]},
    always=always,
    far={"scaling": "nvfp4", "role": "grad_output", "tokens": 2, "experts": 2, "hidden": 1, "tail": 0},
    illegal={"tokens": 2, "experts": 2},
    tall={"experts": 2, "hidden": 32, "dtype": "bfloat16"},
    real=of_a_model,
)
