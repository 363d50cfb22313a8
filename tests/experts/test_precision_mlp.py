"""Expert MLPs in low precision: honest ones are accepted whatever they leave open, and every stage that is wrong is found by a value."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.analysis.factors import dequantised, may_be_others
from conformance.analysis.quantizer import Quantizer
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import drawn, strategy
from conformance.families.experts import golden_recipes, illegal_recipes
from conformance.families.experts.mlp import MlpCase
from conformance.families.experts.precision_mlp import fits_low
from conformance.families.experts.shared import SharedCase
from conformance.families.experts.space_recipes import recipe_cases
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.interface import Implementation, load
from conformance.judge.ranges import Interval
from moe_ref.config import check_grouped_mlp, check_pairs
from moe_ref.config.quantization import OVERRIDES
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.mlp import _wide, pad_segments, trim_segments
from moe_ref.quantization.quantize import dequantize, quantize, turned
from moe_ref.quantization.recipes import scheme, values
from tests.honest import low_precision, wrong_products
from tests.honest.wrong_products import parts_with

poison.install()

GPU = Space(device="cuda")  # where most is tested; the cases themselves run anywhere
FUNCTIONS = ("grouped_mlp", "sequential_mlp", "shared_experts")
REFERENCE = load("moe_ref")
FINE = ("PASS", "UNINFORMATIVE")
HONEST = ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products are quicker without others to wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- honest ones


@functools.cache
def low_cases(function: str) -> list[Any]:
    many = [case for seed in range(4) for case in drawn(strategy(function, GPU), seed, 30) if case.scaling]
    cases = [*recipe_cases(function, GPU), *(case for case in many if function != "shared_experts" or not case.counts)]
    return [replace(case, law=case.law if case.law in Space().laws(case) else "") for case in cases]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_is_accepted(function):
    outcomes = {case.text: evaluate(case, REFERENCE) for case in low_cases(function)}
    assert {text: x.finding or x.reason for text, x in outcomes.items() if x.status not in FINE} == {}
    assert sum(x.status == "PASS" for x in outcomes.values()) > len(outcomes) / 2


def made_of(
    first: Any, second: Any, *, weighted_last: bool = False, wide: bool = False, **declared: Any
) -> Implementation:
    """grouped_mlp by the linear layers of two namespaces, and what it declares."""

    def grouped_mlp(
        rows,
        counts,
        fc1,
        fc2,
        *,
        probs=None,
        fc1_bias=None,
        fc2_bias=None,
        align=None,
        recompute=None,
        probs_on_input=False,
        **how,
    ):
        recipe, state, noise = (how.pop(name, None) for name in ("recipe", "state", "noise"))
        act = chosen_activation(how.pop("kind", "swiglu"), **how)
        shown = (how.get("interleave"), act.keywords["kind"], probs_on_input, align, recompute)
        check_grouped_mlp(rows, counts, fc1, fc2, probs, fc1_bias, fc2_bias, *shown)
        check_pairs(state, noise)
        storage, every, total, own = rows.dtype, len(rows), int(counts.sum()), counts
        accumulator = _wide(rows, probs, fc2_bias)
        if wide:
            rows, fc1, fc2 = rows.float(), fc1.float(), fc2.float()
        rows, p = rows[:total], None if probs is None else probs[:total].to(accumulator)
        if align is not None:
            rows, p = pad_segments(rows, counts, align), None if p is None else pad_segments(p, counts, align)
            own = -(-counts // align) * align
        if p is not None and probs_on_input:
            rows, p = (rows.to(accumulator) * p[:, None]).to(rows.dtype), None
        layers = [
            {"recipe": recipe, "state": s, "noise": n}
            for s, n in zip(state or (None, None), noise or (None, None), strict=True)
        ]
        layers = [how | {"noise": None if how["noise"] is None else how["noise"][:, : len(rows)]} for how in layers]
        h = first.grouped_linear(rows, fc1, own, bias=fc1_bias, **layers[0])
        y = second.grouped_linear(act(h, probs=None if weighted_last else p), fc2, own, **layers[1])
        if weighted_last and p is not None:
            y = (y * p[:, None]).to(y.dtype)
        if fc2_bias is not None:
            bias = fc2_bias.to(accumulator).repeat_interleave(own, 0)
            y = (y.to(accumulator) + (bias if p is None else bias * p[:, None])).to(y.dtype)
        y = y if align is None else trim_segments(y, counts, align)
        return torch.cat([y, y.new_zeros((every - total, y.shape[1]))]).to(storage)

    return Implementation(SimpleNamespace(grouped_mlp=grouped_mlp, declares=lambda function: declared), "here")


def every_recipe() -> list[MlpCase]:
    """One case of each, in each dtype that it can be in, with as many gradients as it takes."""
    sizes: dict[str, dict[str, Any]] = {"mxfp8": {"hidden": 1, "width": 1}, "nvfp4": {"hidden": 1, "width": 2}}
    found = []
    for scaling in RECIPES:
        for variant in range(VARIANTS):
            own: dict[str, Any] = (
                {"tokens": 3, **sizes[scaling]} if scaling in sizes else {"tokens": 9, "hidden": 6, "width": 8}
            )
            case = MlpCase(
                function="grouped_mlp",
                scaling=scaling,
                variant=variant,
                experts=2,
                probs="float32",
                bias1="float32",
                bias2="float32",
                **own,
            )
            for grads in ("rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias", "rows+probs"):
                found += [replace(case, grads=grads, dtype=dtype, seed=variant) for dtype in ("float32", "bfloat16")]
                found += [replace(found[-1], override=override) for override in OVERRIDES if scaling != "delayed"]
    return [case for case in found if fits_low(case)]


@pytest.mark.parametrize("name", HONEST)
def test_honest_layers_are_accepted(name):
    layer = getattr(low_precision, name)
    implementation = made_of(layer, layer, **layer.declares("grouped_mlp"))
    outcomes = {case.text: evaluate(case, implementation) for case in every_recipe()}
    assert {text: x.finding or x.reason for text, x in outcomes.items() if x.status not in FINE} == {}


def test_layers_between_which_nothing_is_rounded_are_accepted():
    implementation = made_of(low_precision.ScaledFirst, low_precision.ScaledFirst, wide=True)
    kept = [
        case for case in every_recipe() if case.override != "dequantized"
    ]  # codes come back in the rows' dtype, whatever the stages are kept in
    cases = [case for case in kept if case.dtype == "bfloat16" and not RECIPES[case.scaling][case.variant].hadamard]
    outcomes = {case.text: evaluate(case, implementation) for case in cases}
    assert {text: x.finding or x.reason for text, x in outcomes.items() if x.status not in FINE} == {}


# ---- what is wrong in one place

CASE = MlpCase(
    function="grouped_mlp", scaling="current", tokens=24, experts=3, counts=(9, 5, 10), hidden=16, width=24, probs="float32", bias1="float32",
    grads="rows+probs+fc1_weight+fc2_weight",
)  # fmt: skip
EVEN = replace(CASE, counts=(8, 8, 8))
HYBRID = replace(CASE, scaling="block", variant=1, values="rows")
DELAYED = replace(CASE, scaling="delayed")
SMALL = replace(CASE, scaling="mxfp8", variant=1, tokens=3, counts=(1, 1, 1), hidden=1, width=1)
FOUR = replace(CASE, scaling="nvfp4", tokens=6, counts=(1, 3, 2), hidden=1, width=2, dtype="bfloat16", bias1="")
STORED, BACK = replace(CASE, override="high_precision"), replace(CASE, override="dequantized")
RIGHT = low_precision.ScaledFirst


def first(change: Callable[..., Any], **where: str) -> Implementation:
    return made_of(parts_with(change, **where), RIGHT)


def second(change: Callable[..., Any], **where: str) -> Implementation:
    return made_of(RIGHT, parts_with(change, **where))


def of_one_layer() -> Implementation:
    """Both layers by the state of the first."""
    honest = made_of(RIGHT, RIGHT).namespace.grouped_mlp
    return Implementation(
        SimpleNamespace(
            grouped_mlp=lambda *tensors, state=None, **how: honest(*tensors, state=state and (state[0],) * 2, **how)
        ),
        "here",
    )


def unquantised(x: Any) -> Any:
    return wrong_products.in_high_precision(x)


WRONG: dict[str, tuple[MlpCase, Implementation, str]] = {
    "rows not quantised": (CASE, first(unquantised, role="input", gemm="fprop"), "out"),
    "activations not quantised": (CASE, second(unquantised, role="input", gemm="fprop"), "out"),
    "activations not quantised, in MXFP8": (SMALL, second(unquantised, role="input", gemm="fprop"), "out"),
    "activations not quantised, in NVFP4": (FOUR, second(unquantised, role="input", gemm="fprop"), "out"),
    "activations not quantised, with 4over6": (
        replace(FOUR, variant=2, dtype="float32"),
        second(unquantised, role="input", gemm="fprop"),
        "out",
    ),
    "activations not quantised for the gradient of their weight": (
        CASE,
        second(unquantised, role="input", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "activations quantised along inputs for the gradient": (
        HYBRID,
        second(wrong_products.other_direction, role="input", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "rows quantised along inputs for the gradient": (
        HYBRID,
        first(wrong_products.other_direction, role="input", gemm="wgrad"),
        "d_fc1_weight",
    ),
    "activations quantised along tokens": (
        HYBRID,
        second(wrong_products.other_direction, role="input", gemm="fprop"),
        "out",
    ),
    "activations by the scales of another expert": (
        EVEN,
        second(wrong_products.neighbours, role="input", gemm="fprop"),
        "out",
    ),
    "weights by the scales of another expert": (
        CASE,
        second(wrong_products.neighbours, role="weight", gemm="dgrad"),
        "d_rows",
    ),
    "inner gradients by the scales of another expert": (
        EVEN,
        first(wrong_products.neighbours, role="grad_output", gemm="dgrad"),
        "d_rows",
    ),
    "inner gradients not quantised for rows": (CASE, first(unquantised, role="grad_output", gemm="dgrad"), "d_rows"),
    "inner gradients not quantised for weights": (
        SMALL,
        first(unquantised, role="grad_output", gemm="wgrad"),
        "d_fc1_weight",
    ),
    "outer gradients not quantised": (CASE, second(unquantised, role="grad_output", gemm="dgrad"), "d_rows"),
    "inner gradients in E4M3": (SMALL, first(wrong_products.in_e4m3, role="grad_output", gemm="dgrad"), "d_rows"),
    "inner gradients to nearest": (
        FOUR,
        first(wrong_products.to_nearest, role="grad_output", gemm="wgrad"),
        "d_fc1_weight",
    ),
    "noise of the other direction": (
        FOUR,
        first(wrong_products.noise_of_the_other_direction, role="grad_output", gemm="dgrad"),
        "d_rows",
    ),
    "activations not transformed": (
        FOUR,
        second(wrong_products.untransformed, role="input", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "one state for both layers": (DELAYED, of_one_layer(), "out"),
    "one scale for all experts' activations": (
        DELAYED,
        second(wrong_products.one_state_for_all, role="input", gemm="fprop"),
        "out",
    ),
    "scales of this step for activations": (
        DELAYED,
        second(wrong_products.updated_too_early, role="input", gemm="fprop"),
        "out",
    ),
    "the second layer in high precision": (CASE, second(unquantised), "out"),
    "a quantised bias": (
        CASE,
        made_of(low_precision.make(low_precision.Way(bias=wrong_products.low_bias)), RIGHT),
        "out",
    ),
    "an override that the first layer ignores": (STORED, first(wrong_products.by_override(None)), "d_rows"),
    "an override that the second layer ignores": (BACK, second(wrong_products.by_override(None)), "d_rows"),
    "inner gradients quantised all the same": (
        STORED,
        first(wrong_products.by_override(None), role="grad_output", gemm="dgrad"),
        "d_rows",
    ),
    "outer gradients quantised all the same": (
        BACK,
        second(wrong_products.by_override(None), role="grad_output", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "activations kept where they come back": (BACK, second(unquantised, role="input", gemm="wgrad"), "d_fc2_weight"),
    "activations that come back where they are kept": (
        STORED,
        second(wrong_products.by_override("dequantized"), role="input", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "activations that come back by columns": (
        replace(HYBRID, override="dequantized"),
        second(wrong_products.other_direction, role="input", gemm="wgrad"),
        "d_fc2_weight",
    ),
    "weights kept where they come back, in NVFP4": (
        replace(FOUR, override="dequantized", dtype="float32"),
        first(unquantised, role="weight", gemm="dgrad"),
        "d_rows",
    ),
    "weighted after the second layer": (CASE, made_of(RIGHT, RIGHT, weighted_last=True), "out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_place_is_found_there_by_its_value(name):
    case, wrong, output = WRONG[name]
    assert fits_low(case)
    outcomes = [evaluate(replace(case, seed=seed), wrong) for seed in range(4)]
    found = {(x.finding["output"], x.finding["check"]) for x in outcomes if x.status == "FAIL"}
    assert (output, "bound") in found, [x.finding or x.reason for x in outcomes]


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG.values()), ids=lambda case: case.id)
def test_the_cases_that_find_it_are_passed_by_the_honest(case):
    for implementation in (REFERENCE, made_of(RIGHT, RIGHT)):
        assert {evaluate(replace(case, seed=seed), implementation).status for seed in range(4)} == {"PASS"}


def test_shared_experts_in_high_precision_are_found():
    def shared_experts(*tensors, recipe=None, **settings):
        return REFERENCE.call("shared_experts", *tensors, **settings)

    case = SharedCase(function="shared_experts", scaling="current", tokens=9, hidden=16, width=24, gate=True)
    assert evaluate(case, REFERENCE).status == "PASS"
    assert (
        evaluate(case, Implementation(SimpleNamespace(shared_experts=shared_experts), "here")).finding["check"]
        == "bound"
    )


# ---- the analysis itself


def inexact(
    x: Tensor, recipe, off: float, columnwise: bool = False, reciprocal: bool = False, rounded: bool = False
) -> Interval:
    """What x ± off may come to, quantised as an input."""
    how_made = scheme(recipe, "input", columnwise=columnwise)
    known = Interval.around(x.double(), torch.full_like(x, off).double()).each(lambda part: turned(part, columnwise))
    quantizer = Quantizer(how_made, x.dtype, reciprocal=reciprocal and may_be_others(how_made))
    values = quantizer.values(known).values.each(lambda part: turned(part, columnwise))
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
        made = quantize(near, recipe, rowwise=not columnwise, columnwise=columnwise).quantized.form(columnwise)
        value = turned(values(made.groups[0], made.scheme), columnwise).double()
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
    made = quantize(x, recipe).quantized.form(False)
    assert not factor.margin.any()
    assert torch.allclose(factor.center, values(made.groups[0], made.scheme).double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("scaling", "variant"),
    [(scaling, variant) for scaling in RECIPES for variant in range(VARIANTS) if scaling != "delayed"],
)
def test_what_comes_back_of_anywhere_in_the_range_is_within_the_factors_margin(scaling, variant, dtype):
    recipe = RECIPES[scaling][variant]
    generator = torch.Generator().manual_seed(variant)
    x, off = torch.randn(32, 64, generator=generator).to(dtype), 0.01
    known, loose, exact = (
        inexact(x, recipe, own, rounded=True, reciprocal=how) for own, how in ((off, False), (off, True), (0.0, False))
    )
    assert torch.equal(exact.center, dequantize(quantize(x, recipe).quantized).double()) and not exact.margin.any()
    assert (loose.margin >= known.margin).all()
    for _ in range(20):
        near = (x + 0.9 * off * (2 * torch.rand(x.shape, generator=generator) - 1)).to(dtype)
        near = torch.where((near.double() - x.double()).abs() <= off, near, x)
        value = dequantize(quantize(near, recipe).quantized).double()
        assert ((value - known.center).abs() <= known.margin).all()  # to the bit: the rounding is in it


def test_a_margin_without_the_rounding_is_too_narrow_for_what_comes_back():
    recipe, x = RECIPES["current"][0], torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    value, factor = dequantize(quantize(x, recipe).quantized).double(), inexact(x, recipe, 0.0)
    assert ((value - factor.center).abs() > factor.margin).any()


def test_a_number_that_may_have_two_codes_has_both_values():
    """448 / 7 = 64, and 17 lies between 16 and 18 sixty-fourths; 7 is known to a part in a million, and so is the scale."""
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


@pytest.mark.parametrize("function", illegal_recipes.RULES)
@pytest.mark.parametrize("name", ["moe_ref", "moe_fast"])
def test_an_illegal_recipe_is_refused_by_the_name_of_its_argument(name, function):
    implementation = load(name)
    unchecked = implementation.declares(function).get("unchecked", ())
    for rule in illegal_recipes.RULES[function]:
        case: Any = Case.family[function](function=function, illegal=rule, tokens=2, experts=2)
        problem = CONTRACTS[function].problem(case)
        outcome = evaluate(case, implementation)
        assert outcome.status == ("DECLARED_UNSUPPORTED" if problem.blame in unchecked else "PASS"), outcome.finding
        if problem.blame not in unchecked:
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
        plain = SimpleNamespace(
            **{function: lambda *tensors, **how: REFERENCE.call(function, *tensors, **without_recipe(how))}
        )
        assert evaluate(case, REFERENCE).status == "PASS", golden
        assert evaluate(case, Implementation(plain, "here")).status == "FAIL", golden


def without_recipe(how: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in how.items() if name not in ("recipe", "state", "noise")}
