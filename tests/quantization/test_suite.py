"""The suite on quantisers: honest ones pass whatever they do differently, and each classic mistake
is found where it was made.
"""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.core.tensors import DTYPES
from conformance.engine.choose.draw import covering_cases, drawn, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.quantization.cases import VALUES, QuantizeCase, noise_of, recipe_of, x_of
from conformance.interface import Implementation
from moe_ref.config import QuantizerState
from moe_ref.quantization.formats import E4M3, decode
from tests.common.suite import WITH_UNSUPPORTED, assert_accepted, failures, outcome_of, reference, statuses
from tests.honest import quantizers
from tests.quantization.wrong_quantizers import (
    BLOCK,
    CURRENT,
    DELAYED,
    HONEST,
    MXFP8,
    NVFP4,
    amax_not_a_number,
    changed,
    codes_for_other_scales,
    exponent_rounded_down,
    exponent_rounded_up_from_nothing,
    half_goes_up,
    minus_zero_is_zero,
    multiplied,
    nan_beyond_the_largest,
    scale_in_half,
    subnormals_flushed,
    the_next_blocks_scale,
    truncated,
)

EVERY, DRAWS = 7, 8  # one of so many cases of the covering array; drawn cases of a seed

# ---- honest quantisers


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_quantiser_is_accepted(name, seed):
    cases = covering_cases("quantize", Space()).cases[seed % EVERY :: EVERY]
    cases = [*cases, *drawn(strategy("quantize", Space()), seed, DRAWS)]
    assert_accepted(cases, HONEST[name], statuses=WITH_UNSUPPORTED)


@pytest.mark.parametrize("name", HONEST)
def test_golden_cases_and_illegal_calls_are_passed_by_all(name):
    assert_accepted(fixed_cases("quantize", Space()), HONEST[name], statuses=("PASS",))


def undeclared(namespace: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**vars(namespace) | {"declares": lambda function: {}})


@pytest.mark.parametrize("case", [CURRENT, replace(BLOCK, variant=1), DELAYED], ids=lambda case: case.scaling)
def test_reciprocals_that_are_not_declared_are_found(case):
    case_of_all_exponents = replace(case, values="wide")
    assert "FAIL" in statuses(case_of_all_exponents, undeclared(quantizers.Multiplies), 8)
    assert statuses(case_of_all_exponents, quantizers.Multiplies, 8) == {"PASS"}


# ---- quantisers that are wrong in one place

CHANGED = [
    (exponent_rounded_down, MXFP8, "scales"),
    (exponent_rounded_up_from_nothing, replace(MXFP8, values="midpoints"), "scales"),
    (truncated, BLOCK, "codes"),
    (truncated, MXFP8, "codes"),
    (half_goes_up, replace(BLOCK, values="midpoints"), "codes"),
    (nan_beyond_the_largest, replace(DELAYED, values="rows"), "codes"),
    (minus_zero_is_zero, replace(MXFP8, values="zeros"), "codes"),
    (subnormals_flushed, replace(MXFP8, values="midpoints"), "codes"),
    (the_next_blocks_scale, BLOCK, "scales"),
    (scale_in_half, CURRENT, "scales"),
    (amax_not_a_number, replace(CURRENT, values="special"), "amax"),
]


@pytest.mark.parametrize(
    ("change", "case", "output"), CHANGED, ids=lambda x: getattr(x, "__name__", getattr(x, "scaling", x))
)
def test_a_group_that_is_wrong_in_one_way_is_found_there(change, case, output):
    assert output in (name.split(".")[-1] for name, _ in failures(case, changed(change), 6))
    assert statuses(case, changed(lambda group, values, scheme: group), 3) == {"PASS"}


@pytest.mark.parametrize("change", [scale_in_half, codes_for_other_scales])
def test_a_declared_reciprocal_excuses_no_more_than_its_roundings(change):
    assert outcome_of(CURRENT, changed(change, scale_arithmetic="reciprocal")).status == "FAIL"


# values and seeds where a reciprocal moves a block's scale to the adjacent code
FLIPPED = [("rows", 5), ("rows", 17), ("wide", 13), ("wide", 29)]


@pytest.mark.parametrize(("values", "seed"), FLIPPED)
def test_noise_is_judged_by_the_scales_that_reciprocals_gave(values, seed):
    case = replace(NVFP4, values=values, seed=seed, direction="both", tokens=6, counts=(4, 0, 2), dtype="bfloat16")
    assert outcome_of(case, quantizers.Multiplies).status == "PASS"
    assert outcome_of(case, undeclared(quantizers.Multiplies)).status == "FAIL"
    for quantize in (forgets_the_noise, swaps_the_noise):
        declared = {"declares": lambda function: {"scale_arithmetic": "reciprocal"}}
        assert outcome_of(case, reference(quantize=quantize, **declared)).status == "FAIL"


def reads_padding(x, recipe, *, splits, **settings):
    all_rows = torch.cat([splits[:-1], (len(x) - splits[:-1].sum())[None]])
    return moe_ref.quantize(x, recipe, splits=all_rows, **settings)


def forgets_the_noise(x, recipe, *, noise, **settings):
    return moe_ref.quantize(x, recipe, noise=torch.full_like(noise, 0.5), **settings)


def swaps_the_noise(x, recipe, *, noise, **settings):
    return moe_ref.quantize(x, recipe, noise=noise.flip(0), **settings)


def forgets_earlier_amax(x, recipe, *, state, **settings):
    return moe_ref.quantize(
        x,
        recipe,
        state=QuantizerState(torch.zeros_like(state.amax_history[:, :1]).expand_as(state.amax_history), state.scale),
        **settings,
    )


def turns_the_codes(x, recipe, **settings):
    """The columnwise form made from the rowwise one."""
    first = moe_ref.dequantize(moe_ref.quantize(x, recipe, **settings | {"columnwise": False}).quantized)
    second = moe_ref.quantize(first, recipe, **settings).quantized
    out = moe_ref.quantize(x, recipe, **settings)
    return out._replace(quantized=replace(out.quantized, columnwise=second.columnwise))


def stops_gradients(x, recipe, **settings):
    most = x.detach().abs().amax()
    return moe_ref.quantize(torch.where(x.abs() < most, x, x.detach()), recipe, **settings)


def clamps_its_input(x, recipe, **settings):
    out = moe_ref.quantize(x, recipe, **settings)
    x.detach().clamp_(-1, 1)
    return out


def unswizzled(q, *, columnwise=False, layout="compact"):
    if layout == "compact":
        return moe_ref.scales(q, columnwise=columnwise)
    return tuple(scale.flatten().roll(1) for scale in moe_ref.scales(q, columnwise=columnwise, layout="gemm"))


WHOLE = [
    ({"quantize": reads_padding}, replace(CURRENT, tail=2, seed=0), "amax"),
    ({"quantize": forgets_the_noise}, NVFP4, "codes"),
    ({"quantize": swaps_the_noise}, NVFP4, "codes"),
    ({"quantize": forgets_earlier_amax}, replace(DELAYED, steps="quantize+quantize+quantize"), "state.amax_history"),
    (
        {"quantize": turns_the_codes},
        replace(BLOCK, direction="both", values="wide", tokens=140, experts=0, counts=()),
        "amax.columnwise",
    ),
    ({"quantize": stops_gradients}, replace(CURRENT, grads="x"), "d_x"),
    ({"quantize": clamps_its_input}, CURRENT, "x"),
    ({"scales": unswizzled}, replace(MXFP8, gemm=True), "scales.gemm"),
    ({"update_scales": lambda state, recipe, **settings: state}, DELAYED, "1.scales"),
    ({"dequantize": lambda q, **form: moe_ref.dequantize(q, **form) * 2}, CURRENT, "values"),
]


@pytest.mark.parametrize(("functions", "case", "output"), WHOLE, ids=lambda x: x if isinstance(x, str) else "")
def test_a_function_that_is_wrong_in_one_way_is_found_there(functions, case, output):
    assert outcome_of(case, moe_ref).status == "PASS"
    assert (outcome_of(case, reference(**functions)).finding or {}).get("output") == output


def test_what_pads_the_scales_of_a_matrix_product_may_be_anything():
    def padded_with(number: int):
        def scales(q, *, columnwise=False, layout="compact"):
            out = moe_ref.scales(q, columnwise=columnwise, layout=layout)
            return out if layout == "compact" else tuple(torch.where(scale == 0, number, scale) for scale in out)

        return scales

    case = replace(BLOCK, gemm=True)
    assert outcome_of(case, reference(scales=padded_with(77))).status == "PASS"
    without = reference(scales=lambda q, *, columnwise=False: moe_ref.scales(q, columnwise=columnwise))
    assert outcome_of(case, without).status == "PASS"  # the layout is listed as not offered
    wrapper = functools.wraps(moe_ref.scales)(lambda q, *, columnwise=False: moe_ref.scales(q, columnwise=columnwise))
    assert outcome_of(case, reference(scales=wrapper)).status == "PASS"  # what it wraps has the layout, it has not
    any_keyword = functools.wraps(moe_ref.scales)(lambda *x, **form: moe_ref.scales(*x, **form))
    assert outcome_of(case, reference(scales=any_keyword)).status == "PASS"
    none = reference(scales=lambda q, **form: moe_ref.scales(q, **form) if "layout" not in form else ())
    assert outcome_of(case, none).status == "FAIL"
    assert (
        outcome_of(case, SimpleNamespace(**vars(without), declares=lambda function: {"omits": ("scales.gemm",)})).status
        == "PASS"
    )


# ---- what is asked


def test_support_is_asked_with_the_first_tensor_and_its_settings():
    arguments_of_supports: list[dict[str, Any]] = []
    outcome = outcome_of(
        DELAYED, reference(supports=lambda function, **arguments: arguments_of_supports.append(arguments) or "no")
    )
    assert outcome.status == "DECLARED_UNSUPPORTED"
    assert set(arguments_of_supports[0]) == {"x", "recipe", "splits"}
    assert arguments_of_supports[0]["x"].is_meta


class Recorded(Implementation):
    """The reference, and the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__(moe_ref)
        self.called: set[str] = set()

    def call(self, function: str, *arguments: Any, **settings: Any) -> Any:
        self.called.add(function)
        return super().call(function, *arguments, **settings)


@pytest.mark.parametrize("case", [replace(BLOCK, direction="both", gemm=True), DELAYED], ids=["block", "delayed"])
def test_what_may_wait_for_the_device_is_read_when_the_calls_are_over(case):
    problem, during, reading = CONTRACTS["quantize"].legal(case), Recorded(), Recorded()
    outputs = problem.script(during, problem.required | problem.settings)
    problem.read(reading, outputs)
    assert during.called <= {"new_quantizer_state", "quantize", "dequantize", "update_scales"}
    assert reading.called == {"amax", "scales", "codes"}


@pytest.mark.parametrize("name", CONTRACTS["quantize"].companions)
def test_without_the_functions_that_read_it_nothing_is_judged(name):
    functions = vars(reference())
    del functions[name]
    assert outcome_of(CURRENT, SimpleNamespace(**functions)).status == "NOT_OFFERED"


# ---- values


@pytest.mark.parametrize("scaling", ["block", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", VALUES)
def test_values_are_what_their_name_says(values, dtype, scaling):
    unit, top = (16, 6.0) if scaling == "nvfp4" else (1, 448.0)
    size = {"tokens": 64 // unit, "hidden": 160 // unit}
    x = x_of(QuantizeCase(function="quantize", scaling=scaling, variant=1, **size, dtype=dtype, values=values, seed=3))
    kind, case_of_all_exponents = torch.finfo(DTYPES[dtype]), x.double().abs()
    mantissa = torch.frexp(case_of_all_exponents)[0]
    says = {
        "dyadic": case_of_all_exponents.max() <= 2,
        "rows": case_of_all_exponents.amax(1).max() > 2**11 and case_of_all_exponents.amax(1).min() < 2**-10,
        "wide": case_of_all_exponents.max() > 2**11
        and 0 < case_of_all_exponents[case_of_all_exponents > 0].min() < 2**-11,
        "bounds": all(
            bool((mantissa == top / 2.0 ** math.frexp(top)[1] + step * kind.eps / 2).any()) for step in (-1, 0, 1)
        ),
        "midpoints": bool((case_of_all_exponents == case_of_all_exponents.max()).any())
        and torch.frexp(case_of_all_exponents.max() / top)[0] == 0.5,
        "tiny": bool((case_of_all_exponents[case_of_all_exponents > 0] < kind.smallest_normal * 4).all())
        and bool(((case_of_all_exponents > 0) & (case_of_all_exponents < kind.smallest_normal)).any()),
        "huge": x.isfinite().all() and case_of_all_exponents.max() > kind.max * 0.9,
        "zeros": bool((case_of_all_exponents == 0).any())
        and bool(((x == 0) & x.signbit()).any())
        and bool((case_of_all_exponents > 0).any()),
        "special": bool(x.isnan().any())
        and bool((x == torch.inf).any())
        and bool((x == -torch.inf).any())
        and 0 < int(x.isfinite().all(1).sum()) < len(x),
    }
    assert says[values]


def test_midpoints_are_halfway_between_two_codes_of_the_scale_that_is_taken():
    for scaling in ("current", "block", "mxfp8"):
        case = QuantizeCase(
            function="quantize",
            scaling=scaling,
            tokens=2,
            hidden=2 if scaling == "mxfp8" else 32,
            values="midpoints",
            seed=2,
        )
        x = x_of(case)
        q = moe_ref.quantize(x, recipe_of(case)).quantized
        v = multiplied(q.rowwise.groups[0], x, q.rowwise.scheme).double().abs()
        table = decode(torch.arange(127, dtype=torch.uint8), E4M3, dtype=torch.float64)
        middle = (table[1:] + table[:-1]) / 2
        assert bool((torch.isin(v, middle) | (v == 448)).all()) and len(v.unique()) > 5


def test_rows_behind_the_last_group_hold_infinities_and_nan():
    x = x_of(replace(CURRENT, tail=3))
    assert x[9:].isinf().all(1).sum() == 2 and x[9:].isnan().all(1).sum() == 1
    assert x[:9].isfinite().all()


def test_noise_lies_inside_the_unit_interval_on_odd_multiples():
    noise = noise_of(NVFP4).double()
    assert 0 < noise.min() < 0.01 and 0.99 < noise.max() < 1
    assert bool((noise * 2**24 % 2 == 1).all())
