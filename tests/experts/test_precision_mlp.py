"""Expert MLPs in low precision: honest ones pass, every wrong stage is found by a value."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.analysis.factors import dequantised, may_be_others
from conformance.analysis.quantizer import Quantizer
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.family import by_function
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.families.experts import golden_recipes, illegal_recipes
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.interface import load
from conformance.judge.ranges import Interval
from moe_ref.config.quantization import OVERRIDES
from moe_ref.quantization.quantize import dequantize, quantize, turned
from moe_ref.quantization.recipes import scheme, values
from tests.common.suite import assert_accepted, failures, outcome_of, reference, statuses
from tests.experts.staged_mlp import staged
from tests.honest import low_precision
from tests.honest.low_precision import Way, make
from tests.honest.wrong_products import (
    by_override,
    in_e4m3,
    in_high_precision,
    low_bias,
    neighbours,
    noise_of_the_other_direction,
    one_state_for_all,
    other_direction,
    parts_with,
    to_nearest,
    untransformed,
    updated_too_early,
)  # fmt: skip

GPU = Space(device="cuda")  # where most is tested; the cases themselves run anywhere
FUNCTIONS = ("grouped_mlp", "sequential_mlp", "shared_experts")
RIGHT = low_precision.ScaledFirst
HONEST = ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")


# ---- honest ones


@functools.cache
def low_cases(function: str) -> list[Any]:
    many = [case for case in drawn(strategy(function, GPU), 0, 30) if case.scaling]
    cases = [
        *scope_of(function, GPU).more([]),
        *(case for case in many if function != "shared_experts" or not case.counts),
    ]
    return [
        replace(case, law=case.law if case.law in scope_of(case.function, Space()).laws(case) else "") for case in cases
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_is_accepted(function):
    assert_accepted(low_cases(function), moe_ref)


ALL = "rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias"
SIZES = {"mxfp8": {"tokens": 3, "hidden": 1, "width": 1}, "nvfp4": {"tokens": 3, "hidden": 1, "width": 2}}
BIASED = MlpCase(function="grouped_mlp", experts=2, probs="float32", bias1="float32", bias2="float32")


def every_recipe() -> list[MlpCase]:
    """One case per recipe, in each legal dtype, with and without gradients of weights."""
    cases = []
    for scaling in RECIPES:
        sizes = SIZES.get(scaling, {"tokens": 9, "hidden": 6, "width": 8})
        gradients_and_dtypes = [(ALL, "float32"), (ALL, "bfloat16"), ("rows+probs", "bfloat16")]
        for variant, (grads, dtype) in itertools.product(range(VARIANTS), gradients_and_dtypes):
            options = sizes | {"scaling": scaling, "variant": variant, "seed": variant, "grads": grads, "dtype": dtype}
            overrides = OVERRIDES if dtype == "bfloat16" and scaling != "delayed" else ()
            cases += [replace(BIASED, **options, override=override) for override in ("", *overrides)]
    return [case for case in cases if case.clash() is None]


@pytest.mark.parametrize("name", HONEST)
def test_honest_layers_are_accepted(name):
    layer = getattr(low_precision, name)
    cases = every_recipe()[HONEST.index(name) :: len(HONEST)]
    assert_accepted(cases, staged(layer, layer, **layer.declares("grouped_mlp")), share=0)


def test_layers_between_which_nothing_is_rounded_are_accepted():
    """Except dequantized codes: their dtype is the rows', whatever the dtype between stages."""
    half = [case for case in every_recipe() if case.dtype == "bfloat16" and case.override != "dequantized"]
    cases = [case for case in half if not RECIPES[case.scaling][case.variant].hadamard]
    assert_accepted(cases, staged(RIGHT, RIGHT, unrounded=True), share=0)


# ---- what is wrong in one place

CASE = MlpCase(
    function="grouped_mlp", scaling="current", tokens=24, experts=3, counts=(9, 5, 10), hidden=16, width=24,
    probs="float32", bias1="float32", grads="rows+probs+fc1_weight+fc2_weight",
)  # fmt: skip
EVEN = replace(CASE, counts=(8, 8, 8))
HYBRID = replace(CASE, scaling="block", variant=1, values="rows")
DELAYED = replace(CASE, scaling="delayed")
SMALL = replace(CASE, scaling="mxfp8", variant=1, tokens=3, counts=(1, 1, 1), hidden=1, width=1)
FOUR = replace(CASE, scaling="nvfp4", tokens=6, counts=(1, 3, 2), hidden=1, width=2, dtype="bfloat16", bias1="")
STORED, BACK = replace(CASE, override="high_precision"), replace(CASE, override="dequantized")


def first(change: Any, role: str = "", gemm: str = "") -> SimpleNamespace:
    return staged(parts_with(change, **where(role, gemm)), RIGHT)


def second(change: Any, role: str = "", gemm: str = "") -> SimpleNamespace:
    return staged(RIGHT, parts_with(change, **where(role, gemm)))


def where(role: str, gemm: str) -> dict[str, str]:
    return {name: value for name, value in (("role", role), ("gemm", gemm)) if value}


def of_one_layer() -> SimpleNamespace:
    """Both layers by the state of the first."""
    honest = staged(RIGHT, RIGHT).grouped_mlp
    return SimpleNamespace(
        grouped_mlp=lambda *tensors, state=None, **settings: honest(
            *tensors, state=state and (state[0],) * 2, **settings
        )
    )


WRONG = [
    (CASE, first(in_high_precision, "input", "fprop"), "out"),
    (CASE, second(in_high_precision, "input", "fprop"), "out"),
    (SMALL, second(in_high_precision, "input", "fprop"), "out"),
    (FOUR, second(in_high_precision, "input", "fprop"), "out"),
    (replace(FOUR, variant=2, dtype="float32"), second(in_high_precision, "input", "fprop"), "out"),
    (CASE, second(in_high_precision, "input", "wgrad"), "d_fc2_weight"),
    (HYBRID, second(other_direction, "input", "wgrad"), "d_fc2_weight"),
    (HYBRID, first(other_direction, "input", "wgrad"), "d_fc1_weight"),
    (HYBRID, second(other_direction, "input", "fprop"), "out"),
    (EVEN, second(neighbours, "input", "fprop"), "out"),
    (CASE, second(neighbours, "weight", "dgrad"), "d_rows"),
    (EVEN, first(neighbours, "grad_output", "dgrad"), "d_rows"),
    (CASE, first(in_high_precision, "grad_output", "dgrad"), "d_rows"),
    (SMALL, first(in_high_precision, "grad_output", "wgrad"), "d_fc1_weight"),
    (CASE, second(in_high_precision, "grad_output", "dgrad"), "d_rows"),
    (SMALL, first(in_e4m3, "grad_output", "dgrad"), "d_rows"),
    (FOUR, first(to_nearest, "grad_output", "wgrad"), "d_fc1_weight"),
    (FOUR, first(noise_of_the_other_direction, "grad_output", "dgrad"), "d_rows"),
    (FOUR, second(untransformed, "input", "wgrad"), "d_fc2_weight"),
    (DELAYED, of_one_layer(), "out"),
    (DELAYED, second(one_state_for_all, "input", "fprop"), "out"),
    (DELAYED, second(updated_too_early, "input", "fprop"), "out"),
    (CASE, second(in_high_precision), "out"),
    (CASE, staged(make(Way(bias=low_bias)), RIGHT), "out"),
    (STORED, first(by_override(None)), "d_rows"),
    (BACK, second(by_override(None)), "d_rows"),
    (STORED, first(by_override(None), "grad_output", "dgrad"), "d_rows"),
    (BACK, second(by_override(None), "grad_output", "wgrad"), "d_fc2_weight"),
    (BACK, second(in_high_precision, "input", "wgrad"), "d_fc2_weight"),
    (STORED, second(by_override("dequantized"), "input", "wgrad"), "d_fc2_weight"),
    (replace(HYBRID, override="dequantized"), second(other_direction, "input", "wgrad"), "d_fc2_weight"),
    (replace(FOUR, override="dequantized", dtype="float32"), first(in_high_precision, "weight", "dgrad"), "d_rows"),
    (CASE, staged(RIGHT, RIGHT, mistake="weighted_last"), "out"),
]


@pytest.mark.parametrize(("case", "implementation", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_every_mistake_is_found_where_it_is_by_its_value(case, implementation, output):
    assert case.clash() is None
    assert (output, "bound") in failures(case, implementation, 4)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_honest_experts_pass_the_cases_that_find_mistakes(case):
    for implementation in (moe_ref, staged(RIGHT, RIGHT)):
        assert statuses(case, implementation, 1) == {"PASS"}


def test_shared_experts_in_high_precision_are_found():
    def shared_experts(*tensors, recipe=None, **settings):
        return moe_ref.shared_experts(*tensors, **settings)

    case = SharedCase(function="shared_experts", scaling="current", tokens=9, hidden=16, width=24, gate=True)
    assert outcome_of(case, moe_ref).status == "PASS"
    assert outcome_of(case, reference(shared_experts=shared_experts)).finding["check"] == "bound"


# ---- the analysis itself


def inexact(
    x: Tensor, recipe, off: float, columnwise: bool = False, reciprocal: bool = False, rounded: bool = False
) -> Interval:
    """What x ± off may come to, quantised as an input."""
    how_made = scheme(recipe, "input", columnwise=columnwise)
    interval = Interval.around(x.double(), torch.full_like(x, off).double()).each(
        lambda bounds: turned(bounds, columnwise)
    )
    quantizer = Quantizer(how_made, x.dtype, reciprocal=reciprocal and may_be_others(how_made))
    values = quantizer.values(interval).values.each(lambda bounds: turned(bounds, columnwise))
    return dequantised(values, x.dtype, reciprocal) if rounded else values


FORMS = [
    (scaling, variant, columnwise)
    for scaling in RECIPES
    for variant in range(VARIANTS)
    for columnwise in (False, True)
    if scaling != "delayed"
]
NOT_TRANSFORMED = [
    form for form in FORMS if not (form[2] and RECIPES[form[0]][form[1]].hadamard)
]  # a transform rounds to bfloat16 on its way


@pytest.mark.parametrize(("scaling", "variant", "columnwise"), NOT_TRANSFORMED)
def test_what_is_quantised_anywhere_in_the_range_comes_to_within_the_factors_margin(scaling, variant, columnwise):
    recipe = RECIPES[scaling][variant]
    generator = torch.Generator().manual_seed(variant)
    x, off = torch.randn(32, 64, generator=generator), 0.01
    factor = inexact(x, recipe, off, columnwise)
    for _ in range(20):
        near = x + off * (2 * torch.rand(x.shape, generator=generator) - 1)
        form = quantize(near, recipe, rowwise=not columnwise, columnwise=columnwise).quantized.form(columnwise)
        value = turned(values(form.groups[0], form.scheme), columnwise).double()
        assert (
            (value - factor.center).abs() <= factor.margin + 2e-6 * value.abs()
        ).all()  # why: what `values` rounds in float32


@pytest.mark.parametrize(
    ("scaling", "variant"),
    [(scaling, variant) for scaling in RECIPES for variant in range(VARIANTS) if scaling != "delayed"],
)
def test_what_is_known_has_one_value(scaling, variant):
    recipe = RECIPES[scaling][variant]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    factor = inexact(x, recipe, 0.0)
    form = quantize(x, recipe).quantized.form(False)
    assert not factor.margin.any()
    roundings = 2 * torch.finfo(torch.float32).eps  # why: the values are two products in float32
    assert torch.allclose(factor.center, values(form.groups[0], form.scheme).double(), rtol=roundings, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("scaling", "variant"),
    [(scaling, variant) for scaling in RECIPES for variant in range(VARIANTS) if scaling != "delayed"],
)
def test_what_comes_back_of_anywhere_in_the_range_is_within_the_factors_margin(scaling, variant, dtype):
    recipe = RECIPES[scaling][variant]
    generator = torch.Generator().manual_seed(variant)
    x, off = torch.randn(32, 64, generator=generator).to(dtype), 0.01
    by_division, loose, exact = (
        inexact(x, recipe, margin, rounded=True, reciprocal=reciprocal)
        for margin, reciprocal in ((off, False), (off, True), (0.0, False))
    )
    assert torch.equal(exact.center, dequantize(quantize(x, recipe).quantized).double()) and not exact.margin.any()
    assert (loose.margin >= by_division.margin).all()
    for _ in range(20):
        near = (x + 0.9 * off * (2 * torch.rand(x.shape, generator=generator) - 1)).to(dtype)
        near = torch.where((near.double() - x.double()).abs() <= off, near, x)
        value = dequantize(quantize(near, recipe).quantized).double()
        assert ((value - by_division.center).abs() <= by_division.margin).all()  # bitwise: rounding included


def test_a_margin_without_the_rounding_is_too_narrow_for_what_comes_back():
    recipe, x = RECIPES["current"][0], torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    value, factor = dequantize(quantize(x, recipe).quantized).double(), inexact(x, recipe, 0.0)
    assert ((value - factor.center).abs() > factor.margin).any()


def test_a_number_that_may_have_two_codes_has_both_values():
    """448 / 7 = 64, and 17 lies between 16 and 18 sixty-fourths; 7 is known to a part in a million,
    and so is the scale.
    """
    factor = inexact(torch.tensor([[7.0, 17 / 64, 3.0]]), RECIPES["current"][0], 1e-6)
    assert factor.center[0, 1].item() == pytest.approx(17 / 64, rel=1e-5)
    assert factor.margin[0, 1].item() == pytest.approx(1 / 64, rel=1e-4)
    assert factor.margin[0, 2].item() < 1e-5


def test_a_power_of_two_that_may_be_the_next_is_both():
    """At 448 the exponent changes."""
    factor = inexact(torch.tensor([[448.0, 17.0, *[0.0] * 30]]).repeat(32, 1), RECIPES["mxfp8"][0], 0.5)
    assert factor.center[0, 1].item() - factor.margin[0, 1].item() <= 16
    assert factor.center[0, 1].item() + factor.margin[0, 1].item() >= 18


# ---- hand-made cases and illegal calls


@pytest.mark.parametrize("function", [name for name in by_function(illegal_recipes) if name in CONTRACTS])
@pytest.mark.parametrize("name", ["moe_ref", "moe_fast"])
def test_an_illegal_recipe_is_refused_by_the_name_of_its_argument(name, function):
    implementation = load(name)
    unchecked = implementation.declares(function).get("unchecked", ())
    for rule in by_function(illegal_recipes)[function]:
        case: Any = Case.family[function](function=function, illegal=rule, tokens=2, experts=2)
        problem = CONTRACTS[function].problem(case)
        outcome = outcome_of(case, implementation)
        assert outcome.status == ("DECLARED_UNSUPPORTED" if problem.blame in unchecked else "PASS"), outcome.finding
        if problem.blame not in unchecked and not (problem.on_device and name == "moe_fast"):  # its result is NaN
            with pytest.raises(
                ValueError, match=rf"^({problem.blame}|x|splits|gemm|columnwise) is "
            ):  # the quantiser's own names for rows and weights
                implementation.call(function, *problem.required.values(), **problem.settings)


@pytest.mark.parametrize(
    "function", [name.lower() for name in vars(golden_recipes) if name.isupper() and name.lower() in CONTRACTS]
)
def test_hand_made_cases_are_passed_and_would_not_be_in_high_precision(function):
    for golden in getattr(golden_recipes, function.upper()):
        case: Any = Case.family[function](function=function, golden=golden)
        call = getattr(moe_ref, function)
        unquantised = reference(
            **{function: lambda *tensors, call=call, **settings: call(*tensors, **without_recipe(settings))}
        )
        assert outcome_of(case, moe_ref).status == "PASS", golden
        assert outcome_of(case, unquantised).status == "FAIL", golden


def without_recipe(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in settings.items() if name not in ("recipe", "state", "noise")}
