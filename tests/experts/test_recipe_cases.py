"""Which grouped products in low precision the gate has: recipes, values and segments."""

import pytest

from conformance.core.space import LOGIT_DTYPES, Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.families.experts.cases import GROUPED_VALUES, counts_of
from conformance.families.experts.precision import LOW_VALUES, fits
from conformance.families.experts.space_recipes import FACTORS, SCOPED
from conformance.families.quantization.cases import RECIPES, VARIANTS
from moe_ref.config.quantization import OVERRIDES

GPU = Space(device="cuda")  # where most is tested; the cases themselves run anywhere
FUNCTIONS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_implementations_without_recipes_are_asked_for_none(function):
    for lacking in ("recipe", "state", "noise"):
        space = Space(without={function: frozenset({lacking})})
        cases = [
            *scope_of(function, space).more([]),
            *drawn(strategy(function, space), 0, 60),
            *scope_of(function, space).always(),
            *scope_of(function, space).far(),
        ]
        low = {case.scaling for case in cases} - {""}
        assert low == {"recipe": set(), "state": set(RECIPES) - {"delayed"}, "noise": set(RECIPES)}[lacking]
        assert ("nvfp4", 0, "") not in {
            (case.scaling, case.variant, case.override) for case in cases
        } or lacking != "noise"


RECIPE_NAMES = {(scaling, variant) for scaling in RECIPES for variant in range(VARIANTS)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gate_has_every_recipe_with_every_kind_of_values_and_of_segments(function):
    cases = scope_of(function, GPU).more([])
    pairs = {(case.scaling, case.values) for case in cases}
    assert pairs == {(scaling, values) for scaling in RECIPES for values in (*GROUPED_VALUES, *LOW_VALUES)}
    assert {(case.scaling, counts_of(case)[0] == 0) for case in cases} == {
        (scaling, first) for scaling in RECIPES for first in (True, False)
    }
    far = [case for case in cases if case.layout.startswith("wide")]
    biases = [case for case in far if case.layout_of == "bias"]
    assert len(far) - len(biases) == 2 * len(FACTORS[function])
    assert {case.layout for case in biases} == (
        {"wide_rows", "wide_columns"} if function == "grouped_linear" else set()
    )
    assert all(case.hidden % 16 == case.width % 16 == 0 for case in biases)  # the sizes of a matrix unit


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gate_of_an_interpreter_has_every_recipe_and_every_value_once(function):
    cases = scope_of(function, Space()).more([])
    assert {(case.scaling, case.variant) for case in cases if not case.override} == {
        *RECIPE_NAMES,
        (SCOPED["scaling"], SCOPED["variant"]),
    }
    assert {case.values for case in cases} == {*GROUPED_VALUES, *LOW_VALUES}
    assert {case.dtype for case in cases} == set(LOGIT_DTYPES)
    assert {case.poison for case in cases} == {"nan", "max", "zero"}
    assert {case.tail > 0 for case in cases} == {True, False}
    assert {case.index_dtype for case in cases} == {"int64", "int32"}
    factors = scope_of(function, Space()).signature.gradients[:2]
    assert {case.grads for case in cases} >= {"", *factors, "+".join(factors)}
    assert {case.bias for case in cases} == {"", "float32", "bfloat16"} or function != "grouped_linear"
    assert {case.into for case in cases} == {"", "float32", "float64"} or function != "grouped_wgrad"
    section = next(s for s in sections() if (s.kind, s.function) == ("covering", function))
    assert set(cases) <= set(cases_of(section, PROFILES["gate"], Space(), 0))
    # few, as a kernel is interpreted in seconds; a bias has two dtypes more
    assert len(cases) == (24 if function == "grouped_linear" else 22)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_drawn_is_legal_and_reaches_every_recipe(function):
    cases = [case for seed in range(10) for case in drawn(strategy(function, GPU), seed, 60)]
    low = [case for case in cases if case.scaling]
    assert len(cases) / 5 < len(low) < len(cases) / 2
    assert all(fits(case) for case in low)
    assert {(case.scaling, case.variant) for case in low} == RECIPE_NAMES
    assert {case.values for case in low} == {*GROUPED_VALUES, *LOW_VALUES}
    assert any(case.tokens == 0 for case in low)
    overridden = {(case.scaling, case.override) for case in low if case.override}
    assert overridden == {(scaling, override) for scaling in RECIPES if scaling != "delayed" for override in OVERRIDES}
    assert all(case.grads or function != "grouped_linear" for case in low if case.override)
    assert any(case.layout_of == "noise" for case in low) or function == "grouped_linear"
