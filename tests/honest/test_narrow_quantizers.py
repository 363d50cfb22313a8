"""A quantiser whose readers or state functions lack a parameter is judged in what it offers."""

import functools

import pytest

import moe_ref
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases
from conformance.interface import Implementation
from tests.common.suite import gate_cases, outcome_of, reference, wrapped

ALLOWED = {"PASS", "UNINFORMATIVE", "NOT_OFFERED"}
cases_of = functools.cache(functools.partial(gate_cases, every=4))


def without_layout(quantized, *, columnwise=False):
    return moe_ref.scales(quantized, columnwise=columnwise)


def rows_of(reader):
    return lambda quantized: reader(quantized)


def state_on_the_cpu(recipe, *, num_groups=1):
    return moe_ref.new_quantizer_state(recipe, num_groups=num_groups)


def update_of_inputs(state, recipe):
    return moe_ref.update_scales(state, recipe)


READERS = ("amax", "scales", "codes", "dequantize")
NARROW = {  # the implementation, and what a call that it lacks is called
    "layout": (reference(scales=without_layout), "scales.layout"),
    "columnwise": (reference(**{name: rows_of(getattr(moe_ref, name)) for name in READERS}), "amax.columnwise"),
    "device": (reference(new_quantizer_state=state_on_the_cpu), "new_quantizer_state.device"),
    "role": (reference(update_scales=update_of_inputs), "update_scales.role"),
}


@pytest.mark.parametrize(
    ("lacking", "function"),
    [*((name, "quantize") for name in NARROW), *((name, "permute_and_quantize") for name in ("layout", "columnwise"))],
)
def test_what_a_quantiser_lacks_is_not_offered_and_the_rest_is_judged(lacking, function):
    implementation, missing = NARROW[lacking]
    outcomes = [outcome_of(case, implementation) for case in cases_of(function)]
    assert {x.status for x in outcomes} <= ALLOWED, [x.finding for x in outcomes if x.status == "FAIL"]
    assert sum(x.status == "PASS" for x in outcomes) > len(outcomes) / 4
    assert lacking == "layout" or any(missing in x.reason for x in outcomes if x.status == "NOT_OFFERED")


def test_the_rest_of_a_quantiser_without_the_gemm_layout_is_judged():
    def next_code(codes, quantized, **settings):
        return codes(quantized, **settings) ^ 1

    mistaken = wrapped("codes", next_code)
    mistaken.scales = without_layout
    passing = [
        case for case in cases_of("quantize") if case.gemm and outcome_of(case, NARROW["layout"][0]).status == "PASS"
    ]
    assert passing and {outcome_of(case, mistaken).status for case in passing} == {"FAIL"}


def test_no_case_in_the_gemm_layout_is_drawn_for_a_quantiser_without_it():
    narrow = Implementation(NARROW["layout"][0], "here")
    assert narrow.lacks("quantize", {"role": "", "scales.layout": "", "no_function.x": ""}) == [
        "scales.layout",
        "no_function.x",
    ]
    space = Space(without={"quantize": frozenset({"scales.layout"})})
    assert not any(case.gemm for case in covering_cases("quantize", space).cases)
    assert any(case.gemm for case in covering_cases("quantize", Space()).cases)
