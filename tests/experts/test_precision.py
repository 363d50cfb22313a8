"""Grouped products in low precision: honest ones pass, every wrong stage is found by a value."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.analysis.factors import Factor, ProductPrecision, dequantised
from conformance.analysis.products import Product
from conformance.analysis.quantizer import Quantizer
from conformance.catalogue import CONTRACTS
from conformance.core.case import CaseError
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.run.corpus import checked
from conformance.families.experts.cases import GroupedCase
from conformance.families.experts.linear import precision_of
from conformance.families.experts.precision import (
    fits,
    state_tensors,
)
from conformance.families.quantization.cases import RECIPES
from conformance.interface import Implementation, load
from conformance.judge import Bounded
from conformance.judge.bound import HOPPER_FP8, MATRIX_UNIT, Accumulator
from conformance.judge.ranges import Interval
from conformance.judge.ratios import RowWise
from moe_ref.config import Recipe
from moe_ref.config.quantization import OVERRIDES
from moe_ref.quantization.recipes import scheme
from tests.common.suite import WITH_UNSUPPORTED, assert_accepted, failures, outcome_of, statuses
from tests.honest.low_precision import (
    Part,
    Source,
    Way,
    by_codes,
    by_reciprocals,
    make,
    never_promoted,
    of_fourteen_bits,
)
from tests.honest.wrong_products import (
    across_experts,
    by_override,
    in_bfloat16,
    in_e4m3,
    in_high_precision,
    last_block_by_the_one_before,
    low_bias,
    neighbours,
    noise_of_the_other_direction,
    not_rounded,
    not_saturated,
    one_state_for_all,
    other_direction,
    parts_with,
    to_nearest,
    transposed_scales,
    untransformed,
    updated_too_early,
    upwards,
    with_the_tail,
)

GPU = Space(device="cuda")  # where most is tested; the cases themselves run anywhere
REAL = 300  # tokens: real shapes are for a GPU
FUNCTIONS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
HONEST = ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")
EVERY, DRAWS = 8, 32  # covering stride; draws, 1/3 low precision


@functools.cache
def low_cases(function: str) -> list[Any]:
    many = drawn(strategy(function, GPU), 0, DRAWS)
    cases = [
        *(case for case in scope_of(function, GPU).more([])[::EVERY] if case.tokens < REAL),
        *(case for case in many if case.scaling),
    ]
    return [
        replace(case, law=case.law if case.law in scope_of(case.function, Space()).laws(case) else "") for case in cases
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", [*HONEST, "reference"])
def test_honest_products_are_accepted(name, function):
    """The reference judges all cases, and the honest variants share them."""
    cases = low_cases(function)
    if name == "reference":
        assert_accepted(cases, load("moe_ref"))
    else:
        shared = cases[HONEST.index(name) :: len(HONEST)]
        assert_accepted(shared, load(f"tests.honest.low_precision:{name}"), statuses=WITH_UNSUPPORTED, share=0)


# one block's scale is near a midpoint of E4M3, and its codes are rounded by given noise
FLIPPED = GroupedCase(
    function="grouped_wgrad", scaling="nvfp4", dtype="bfloat16", tokens=2, experts=2, hidden=3, counts=(0, 2), seed=667
)


def test_a_scale_that_reciprocals_moved_is_accepted_with_noise():
    assert_accepted([FLIPPED], load("tests.honest.low_precision:Reciprocal"), statuses=("PASS",))
    assert outcome_of(FLIPPED, make(Way(parts=by_reciprocals))).status == "FAIL"  # not declared
    implementation = make(Way(parts=half_up, declared=(("scale_arithmetic", "reciprocal"),)))
    assert outcome_of(FLIPPED, implementation).status == "FAIL"


def half_up(source: Source) -> list[Part]:
    half = None if source.noise is None else torch.full_like(source.noise, 0.5)
    return by_reciprocals(source._replace(noise=half))


# ---- what is wrong in one place


FORWARD = GroupedCase(
    function="grouped_linear", scaling="current", tokens=60, experts=3, hidden=40, width=30, values="patches"
)
LINEAR = replace(FORWARD, grads="rows+weight")
DGRAD, WGRAD = replace(FORWARD, function="grouped_dgrad"), replace(FORWARD, function="grouped_wgrad")
HALF: dict[str, Any] = {"dtype": "bfloat16"}
BLOCKS = HALF | {"scaling": "block", "counts": (130, 131, 141), "tokens": 402, "hidden": 133, "width": 130}
SMALL = HALF | {"scaling": "mxfp8", "counts": (2, 3, 1), "tokens": 6, "hidden": 3, "width": 2}
FOUR = HALF | {"scaling": "nvfp4", "counts": (4, 3, 2), "tokens": 9, "hidden": 4, "width": 5, "values": "dyadic"}
DELAYED = {"scaling": "delayed", "values": "dyadic"}
OVERRIDDEN, DEQUANTIZED = {"override": "high_precision"}, {"override": "dequantized"}
ROWS, COLUMNS, SQUARES = {"values": "rows"}, {"values": "columns"}, {"variant": 2}
FREE = {"variant": 1}  # scales that are no powers of two


def parts(change: Any, role: str, gemm: str = "") -> SimpleNamespace:
    return parts_with(change, role=role, **({"gemm": gemm} if gemm else {}))


def every(change: Any) -> SimpleNamespace:
    return make(Way(parts=change))


WRONG = [
    (replace(FORWARD, **SMALL | ROWS), parts(other_direction, "input", "fprop"), "out"),
    (replace(FORWARD, **SMALL | ROWS), parts(other_direction, "weight"), "out"),
    (replace(DGRAD, **SMALL | COLUMNS), parts(other_direction, "weight"), "d_rows"),
    (replace(DGRAD, **SMALL | ROWS), parts(other_direction, "grad_output"), "d_rows"),
    (replace(WGRAD, **SMALL | COLUMNS), parts(other_direction, "grad_output"), "d_weight"),
    (replace(WGRAD, **BLOCKS | FREE), parts(other_direction, "input"), "d_weight"),
    (replace(LINEAR, **SMALL | COLUMNS), parts(other_direction, "input", "wgrad"), "d_weight"),
    (replace(FORWARD, **BLOCKS), parts(transposed_scales, "weight"), "out"),
    (replace(DGRAD, **SMALL | SQUARES), parts(transposed_scales, "weight"), "d_rows"),
    (replace(DGRAD, dtype="bfloat16"), parts(in_e4m3, "grad_output"), "d_rows"),
    (replace(WGRAD, **SMALL | FREE), parts(in_e4m3, "grad_output"), "d_weight"),
    (replace(LINEAR, dtype="bfloat16"), parts(neighbours, "weight"), "out"),
    (replace(WGRAD, dtype="bfloat16"), parts(neighbours, "input"), "d_weight"),
    (replace(FORWARD, **BLOCKS), parts(last_block_by_the_one_before, "input"), "out"),
    (replace(WGRAD, **BLOCKS), make(Way(product=of_fourteen_bits)), "d_weight"),
    (replace(WGRAD, **BLOCKS), make(Way(product=never_promoted)), "d_weight"),
    (LINEAR, every(in_high_precision), "out"),
    (replace(DGRAD, **SMALL), parts(in_high_precision, "weight"), "d_rows"),
    (replace(WGRAD, **FOUR), every(in_high_precision), "d_weight"),
    (FORWARD, every(in_bfloat16), "out"),
    (replace(FORWARD, tokens=300, hidden=130, dtype="bfloat16"), every(in_bfloat16), "out"),
    (replace(FORWARD, values="dyadic", bias="float32"), make(Way(bias=low_bias)), "out"),
    (replace(WGRAD, **BLOCKS | FREE), parts(across_experts, "input"), "d_weight"),
    (replace(WGRAD, **BLOCKS | FREE, values="dyadic", tail=9), parts(with_the_tail, "grad_output"), "d_weight"),
    (replace(LINEAR, **DELAYED), parts(updated_too_early, "input"), "out"),
    (replace(LINEAR, **DELAYED), parts(updated_too_early, "grad_output"), "d_rows"),
    (replace(LINEAR, **DELAYED), parts(one_state_for_all, "weight"), "out"),
    (replace(FORWARD, **DELAYED), parts(not_saturated, "input"), "out"),
    (replace(DGRAD, **FOUR), parts(to_nearest, "grad_output"), "d_rows"),
    (replace(LINEAR, **FOUR), parts(to_nearest, "grad_output", "wgrad"), "d_weight"),
    (replace(WGRAD, **FOUR), parts(noise_of_the_other_direction, "grad_output"), "d_weight"),
    (replace(WGRAD, **FOUR), parts(untransformed, "input"), "d_weight"),
    (replace(LINEAR, **FOUR), parts(untransformed, "grad_output", "wgrad"), "d_weight"),
    (replace(LINEAR, **OVERRIDDEN), every(by_override(None)), "d_rows"),
    (replace(WGRAD, **SMALL | ROWS | OVERRIDDEN), every(by_override(None)), "d_weight"),
    (replace(DGRAD, **FOUR | DEQUANTIZED), every(by_override(None)), "d_rows"),
    (replace(DGRAD, **OVERRIDDEN), parts(by_override(None), "grad_output"), "d_rows"),
    (replace(LINEAR, **DEQUANTIZED), parts(by_override(None), "grad_output", "wgrad"), "d_weight"),
    (replace(WGRAD, **OVERRIDDEN), parts(by_override("dequantized"), "input"), "d_weight"),
    (replace(LINEAR, **DEQUANTIZED), parts(in_high_precision, "input", "wgrad"), "d_weight"),
    (replace(DGRAD, **FOUR | DEQUANTIZED), parts(in_high_precision, "weight"), "d_rows"),
    (replace(WGRAD, **BLOCKS | FREE | DEQUANTIZED), parts(other_direction, "input"), "d_weight"),
    (replace(DGRAD, **SMALL | COLUMNS | DEQUANTIZED), parts(other_direction, "weight"), "d_rows"),
    (replace(WGRAD, **DEQUANTIZED, dtype="bfloat16"), parts(not_rounded, "input"), "d_weight"),
    (replace(DGRAD, **DEQUANTIZED), every(in_bfloat16), "d_rows"),
    (replace(LINEAR, **OVERRIDDEN), every(in_high_precision), "out"),
    (replace(WGRAD, **BLOCKS | OVERRIDDEN), make(Way(overridden=of_fourteen_bits)), "d_weight"),
    (replace(FORWARD, values="midpoints"), parts(upwards, "input"), "out"),
]


@pytest.mark.parametrize(("case", "implementation", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_every_mistake_is_found_where_it_is_by_its_value(case, implementation, output):
    assert fits(case)
    assert any(finding in {(output, "bound"), (output, "ratio")} for finding in failures(case, implementation, 4))


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_honest_products_pass_the_cases_that_find_mistakes(case):
    for name in ("ScaledFirst", "ScaledLast"):
        assert statuses(case, load(f"tests.honest.low_precision:{name}"), 1) == {"PASS"}


# ---- what is declared


def declaring(construction: Way, **declared: Any) -> Implementation:
    return Implementation(make(replace(construction, declared=tuple(declared.items()))), "here")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sums_of_14_bits_are_right_where_they_are_declared_and_wrong_where_not(function):
    case = replace(LINEAR, **BLOCKS, function=function, grads="")
    construction = Way(product=of_fourteen_bits)
    assert outcome_of(case, declaring(construction, accumulator="hopper_fp8")).status == "PASS"
    assert outcome_of(case, declaring(construction, accumulator="float32")).finding["check"] in ("bound", "ratio")
    # better than declared
    assert outcome_of(case, declaring(Way(), accumulator="hopper_fp8")).status == "PASS"


@pytest.mark.parametrize("scaling", ["current", "block"])
def test_sums_of_14_bits_that_are_never_promoted_are_wrong_whatever_is_declared(scaling):
    case = replace(DGRAD, scaling=scaling, tokens=96, width=4096, hidden=64, values="dyadic")
    assert outcome_of(case, declaring(Way(product=of_fourteen_bits), accumulator="hopper_fp8")).status == "PASS"
    assert outcome_of(case, declaring(Way(product=never_promoted), accumulator="hopper_fp8")).finding["check"] in (
        "bound",
        "ratio",
    )


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_gradient_is_added_in_float32_whatever_is_declared_of_fp8(override):
    case = replace(WGRAD, **BLOCKS, override=override)
    for construction, status in ((Way(), "PASS"), (Way(overridden=of_fourteen_bits), "FAIL")):
        assert outcome_of(case, declaring(construction, accumulator="hopper_fp8")).status == status
    declared_precision = precision_of_case(case, {"accumulator": "hopper_fp8"})
    assert (
        declared_precision.of("fprop"),
        declared_precision.of("wgrad").accumulator,
        declared_precision.of("wgrad").roundings,
    ) == (declared_precision, MATRIX_UNIT, 0)


def test_sums_of_14_bits_of_mxfp8_are_wrong_whatever_is_declared_of_fp8():
    case = replace(DGRAD, scaling="mxfp8", tokens=3, width=128, hidden=2, values="dyadic")
    low = Way(product=lambda first, second, recipe: of_fourteen_bits(first, second, RECIPES["current"][0]))
    assert outcome_of(case, declaring(Way(), accumulator="hopper_fp8")).status == "PASS"
    assert outcome_of(case, declaring(low, accumulator="hopper_fp8")).finding["check"] in ("bound", "ratio")


def test_mxfp8_nvfp4_and_high_precision_are_added_in_float32_whatever_is_declared_of_fp8():
    declared = {"accumulator": "hopper_fp8"}
    high = replace(WGRAD, scaling="", values="dyadic", dtype="bfloat16")
    for case in (replace(WGRAD, **SMALL), replace(WGRAD, **FOUR), high):
        assert precision_of_case(case, declared).accumulator == MATRIX_UNIT
    assert precision_of_case(replace(high, dtype="float32"), declared).accumulator == Accumulator()
    assert precision_of_case(WGRAD, declared).accumulator == HOPPER_FP8
    assert precision_of_case(WGRAD, declared).sums == MATRIX_UNIT  # of a bias, and of accumulation


def precision_of_case(case: GroupedCase, declared: dict[str, Any]) -> ProductPrecision:
    problem = CONTRACTS[case.function].problem(case)
    return precision_of(problem, declared, problem.required["rows"])


def test_a_tie_is_anybodys_where_reciprocals_are_declared():
    case = replace(LINEAR, values="midpoints", grads="")
    construction = Way(parts=lambda source: upwards(source) if source.role == "input" else by_codes(source))
    assert outcome_of(case, declaring(construction, scale_arithmetic="reciprocal")).status == "PASS"
    assert outcome_of(case, declaring(construction, scale_arithmetic="division")).finding["check"] == "bound"
    assert (
        outcome_of(replace(case, variant=1), declaring(construction, scale_arithmetic="reciprocal")).finding["check"]
        == "bound"
    )  # powers of two
    assert outcome_of(case, declaring(Way(), scale_arithmetic="reciprocal")).status == "PASS"


def interval_of(x: Tensor, recipe: Recipe, role: str = "weight") -> Interval:
    """What x may come to where reciprocals decide."""
    quantizer = Quantizer(scheme(recipe, role), torch.float32, given=torch.ones(1), reciprocal=True)
    return quantizer.values(Interval.exact(x.double())).values


def test_a_code_in_the_middle_of_two_may_be_either_and_others_are_what_they_are():
    """By a scale of 1; 448 is E4M3's largest number, and 2⁻¹⁰ half of its smallest."""
    middle = 1.0625
    numbers = [middle, -middle, middle * (1 + 2.0**-22), middle * (1 + 2.0**-20), 1.0, 0.0, 2.0**-10, 432.0, 448.0, 1e9]
    interval = interval_of(torch.tensor([numbers], dtype=torch.float64), RECIPES["delayed"][0])
    width = [0.125, 0.125, 0.125, 0, 0, 0, 2.0**-9, 32, 0, 0]
    assert (interval.high - interval.low)[0].tolist() == width
    assert interval.low[0, :4].tolist() == [1.0, -1.125, 1.0, 1.125]


def test_a_block_scale_in_the_middle_of_two_leaves_each_of_its_codes_two_values():
    """A = 6 · 448, so S = 1; the block's amax is 6 · 1.0625, and its scale 1 or 1.125."""
    x = torch.zeros(16, 32)
    x[0, 0], x[0, 16], x[0, 17] = 6 * 448, 6 * 1.0625, 1.0
    interval = interval_of(x, RECIPES["nvfp4"][1])
    width = interval.high - interval.low
    assert width[0, 16:18].tolist() == pytest.approx([0.75, 0.125])
    assert (width > 1e-6).count_nonzero() == 2


def test_what_comes_back_is_rounded_once_and_may_be_its_neighbour_only_where_scales_are_reciprocals():
    value = torch.tensor([1 + 2.0**-8, 1 + 2.0**-9, 1.0, torch.inf]).double()  # bf16: 1, 1 + 2⁻⁷
    exact, loose = (dequantised(Interval.exact(value), torch.bfloat16, reciprocal) for reciprocal in (False, True))
    assert exact.low.tolist() == exact.high.tolist() == loose.low.tolist() == [1, 1, 1, torch.inf]
    assert loose.high.tolist() == [1 + 2.0**-7, 1, 1, torch.inf]
    off = torch.tensor([0, 2.0**-8, 0, 0]).double()  # another code, as far away
    neighbour = dequantised(Interval(value - off, value + off, value.isnan(), value.isnan()), torch.bfloat16, False)
    assert (neighbour.high - neighbour.low)[:3].tolist() == [0, 2.0**-7, 0]


def test_a_case_of_an_overridden_backward_shrinks_and_one_of_delayed_scaling_is_none():
    case = replace(LINEAR, **DEQUANTIZED)
    simpler = {(neighbour.scaling, neighbour.override) for neighbour in scope_of(case.function, Space()).smaller(case)}
    assert simpler == {("", ""), ("current", ""), ("current", "dequantized")}
    assert scope_of(case.function, Space()).neighbour(case).override == "high_precision"
    for scaling in ("", "delayed"):
        with pytest.raises(CaseError, match=r"^override is 'dequantized'"):
            checked(replace(case, scaling=scaling, values="dyadic"))


def test_the_product_of_margins_is_how_far_it_can_be():
    first, second = (
        Factor(Interval.around(torch.tensor([[2.0, -4.0]]).double(), torch.tensor([[0.5, 0.0]]).double())),
        Factor(Interval.exact(torch.tensor([[3.0, 1.0]]).double())),
    )
    product = Product.of(first, second)
    assert (product.value.item(), product.magnitude.item()) == (2, 10)
    assert product.margin.item() == pytest.approx(1.5)
    assert Product.of(Factor(Interval.exact(first.values.center)), second).margin.item() == 0


def test_rows_with_a_code_that_may_be_another_are_not_compared_with_the_reference():
    case = replace(LINEAR, tokens=300, width=60, values="midpoints", grads="")
    contract = CONTRACTS[case.function]
    problem = contract.problem(case)
    exact, loose = (
        contract.expected(case, problem, {"scale_arithmetic": arithmetic})["out"]
        for arithmetic in ("division", "reciprocal")
    )
    assert isinstance(exact, RowWise)
    assert type(loose) is Bounded
    assert (loose.bound >= exact.bound).all()


# ---- what is made of a case


def test_scales_of_states_differ_by_tensor_and_expert_and_are_no_powers_of_two():
    state = state_tensors(replace(LINEAR, **DELAYED))
    scales = torch.stack([x for name, x in state.items() if name.endswith("scale")])
    assert len(state) == 6
    assert scales.shape == (3, 3)
    assert len(scales.unique()) == 9
    assert (torch.frexp(scales)[0] != 0.5).all()
