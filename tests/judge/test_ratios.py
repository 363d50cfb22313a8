"""Each rule for ratios, codes and randomness accepts an honest result and rejects its twin."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.analysis.running import Running, contracted
from conformance.judge import Bounded, RowWise, controls, judge
from conformance.judge import bound as bounds
from conformance.judge.ratios import Limits, row_wise
from tests.judge.ratio_helpers import COLUMNS, TERMS, expected_of, operands, product
from tests.judge.tolerance_experiment import ORDERS, contraction, rounded, truncated
from tests.judge.tolerance_fp8 import INSTRUCTION, fourteen_bits


def rule_of(expected: RowWise, observed: Tensor) -> str | None:
    worst = expected.excess(observed)
    return worst and worst.rule


# ---- what is honest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(128, 256, 64), (64, 96, 256), (2048, 64, 4), (16384, 48, 1), (33, 1000, 161)], ids=str
)
def test_every_honest_order_is_accepted(dtype, shape):
    for seed in range(4):
        a, b = operands(seed, *shape, dtype=dtype)
        expected = expected_of(a, b)
        assert isinstance(expected, RowWise)
        for order in (*ORDERS, "one by one"):
            assert judge("rows", expected, product(a, b, order)) is None


def test_a_better_result_than_the_references_is_right(expected):
    assert judge("rows", expected, expected.value.bfloat16()) is None


@pytest.mark.parametrize("columns", [1, 4, 16])
def test_short_rows_are_judged_together(columns):
    for seed in range(20):
        a, b = operands(seed, 16384 // columns, 40, columns, torch.float32)
        expected = expected_of(a, b, loosened=1e4)
        assert int(torch.bincount(expected._pools).min()) * columns >= 64
        assert judge("rows", expected, product(a, b, "blocks of 16")) is None
    y = product(a, b)
    y[7] *= 1 + 2.0**-11  # as TF32 would have it
    assert judge("rows", expected, y).check == "ratio"


# ---- what is not, rule by rule


def test_one_row_in_a_lower_precision_is_rejected_by_its_row(expected):
    a, b = operands(0)
    y = product(a, b)
    y[17] = contraction(a[17:18].float(), b.float(), "blocks of 16", keep=lambda x: rounded(x) * (1 + 2.0**-8))[
        0
    ].bfloat16()
    finding = judge("rows", expected, y)
    assert (finding.check, finding.index[0]) == ("ratio", 17)
    assert finding.message.startswith("row 17; 1 of 128 rows: error ")
    assert "× what the recipe allows" in finding.message


def test_one_element_below_the_bound_is_rejected_by_its_size():
    value = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 512)))
    loose = Bounded(value, torch.full_like(value, 1.0), torch.bfloat16, torch.float32)
    expected = row_wise(loose, value.bfloat16(), value.abs(), 1, limits=Limits(row=1e9, element=2.5, rms=1e9, bias=1e9))
    corrupted = value.bfloat16()
    corrupted[5, 300] += 0.1 * max(1, abs(float(corrupted[5, 300])))
    finding = judge("rows", expected, corrupted)
    assert (finding.check, finding.index) == ("ratio", (5, 300))
    assert finding.message.startswith("element [5, 300]: error ")
    assert judge("rows", expected, value.bfloat16()) is None


def test_a_little_noise_everywhere_is_rejected_by_the_rms_alone(expected):
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal(expected.value.shape))
    corrupted = (expected.value * (1 + 2.0**-9 * noise)).bfloat16()
    assert rule_of(expected, corrupted) == "rms"
    only = {x.rule: x.ratio / getattr(expected.limits, x.rule) for x in expected.measures(corrupted)}
    assert only["row"] < 1
    assert only["bias"] < 1


@pytest.mark.parametrize(("mistake", "direction"), [("truncate", "away from zero"), ("up", "upwards")])
def test_another_rounding_mode_is_rejected_by_its_bias(expected, mistake, direction):
    exact = expected.value.float()
    cut = truncated(exact)
    above = torch.where(exact > cut, cut.bfloat16().view(torch.int16) + 1, cut.bfloat16().view(torch.int16)).view(
        torch.bfloat16
    )
    corrupted = cut.bfloat16() if mistake == "truncate" else torch.where(exact > 0, above, cut.bfloat16())
    finding = judge("rows", expected, corrupted)
    assert finding.check == "ratio"
    biased = next(measure for measure in expected.measures(corrupted) if measure.rule == "bias")
    assert biased.ratio > 3
    assert direction in biased.place


@pytest.mark.parametrize(("distance", "accepted"), [(0.0, True), (0.01, False)])
def test_ties_rounded_one_way_are_no_bias(distance, accepted):
    """A third of the results lie at a midpoint, or so many ulps from one; all are rounded up."""
    source = np.random.default_rng(0)
    multiples = torch.from_numpy(source.integers(128, 256, (64, 256))).double()  # from 2^8 to 2^9 a bfloat16 ulp is 2
    side = torch.from_numpy(source.choice((-distance, distance), (64, 256)))
    steps = multiples + (0.5 + side) * (multiples.long() % 3 == 0)
    loose = Bounded(2 * steps, torch.full_like(steps, 4.0), torch.bfloat16, torch.float32)
    limits = Limits(row=1e9, element=1e9, rms=1e9, bias=1.0)
    expected = row_wise(loose, (2 * steps).bfloat16(), 2 * steps, 1, limits=limits)
    assert (judge("rows", expected, (2 * steps.ceil()).bfloat16()) is None) == accepted


def test_a_bias_of_one_group_does_not_hide_among_the_others():
    a, b = operands(0, rows=512)
    groups = torch.arange(512) // 64
    ungrouped, by_group = expected_of(a, b), expected_of(a, b, groups=groups)
    exact = ungrouped.value.float()
    corrupted = torch.where((groups == 5)[:, None], truncated(exact).bfloat16(), exact.bfloat16())
    biased = {
        name: next(m for m in e.measures(corrupted) if m.rule == "bias")
        for name, e in (("whole", ungrouped), ("group", by_group))
    }
    assert biased["group"].ratio > 2 * biased["whole"].ratio
    assert biased["group"].place.startswith("group 5: a mean error of -")
    assert biased["group"].index[0] == 320


def test_a_matrix_of_weight_gradients_is_judged_by_expert_and_row():
    a, b = operands(0, rows=96, columns=64)
    value, magnitude = (
        (a.double() @ b.double().T).reshape(3, 32, 64),
        (a.double().abs() @ b.double().abs().T).reshape(3, 32, 64),
    )
    bounded = bounds.sum_bound(value, 50 * magnitude, TERMS, torch.bfloat16, torch.float32)  # kept loose
    groups = torch.arange(3)[:, None].expand(3, 32)
    expected = row_wise(bounded, product(a, b).reshape(3, 32, 64), magnitude, TERMS, groups=groups)
    corrupted = product(a, b).reshape(3, 32, 64).clone()
    corrupted[2, 5] = value[2, 5].bfloat16() + 2.0**-6
    finding = judge("d_weight", expected, corrupted)
    assert finding.index[:2] == (2, 5)
    assert judge("d_weight", expected, product(a, b).reshape(3, 32, 64)) is None


# ---- where the bound alone decides


def test_few_elements_are_left_to_the_bound():
    assert type(expected_of(*operands(0, rows=63))) is Bounded
    assert type(expected_of(*operands(0, rows=64))) is RowWise
    assert type(expected_of(*operands(0, columns=0))) is type(expected_of(*operands(0, rows=0))) is Bounded


def test_rows_that_cancel_are_left_to_the_bound():
    a, b = operands(0, rows=256, dtype=torch.float32)
    a[::2, 1::2] = -a[::2, ::2] * (1 + 2.0**-12)
    b[:, 1::2] = b[:, ::2]
    expected = expected_of(a, b)
    assert isinstance(expected, RowWise)
    assert not set(expected.judged.tolist()) & set(range(0, 256, 2))
    assert judge("rows", expected, product(a, b, "backwards")) is None
    corrupted = product(a, b)
    corrupted[2] += 2 * expected.bound[2]
    assert judge("rows", expected, corrupted).check == "bound"
    assert type(expected_of(a[::2], b)) is Bounded


def test_rows_of_zeros_are_exact():
    a, b = operands(0, rows=256)
    a[10] = 0
    expected = expected_of(a, b)
    assert 10 not in expected.judged.tolist()
    corrupted = product(a, b)
    assert judge("rows", expected, corrupted) is None
    corrupted[10, 3] = 2.0**-133
    finding = judge("rows", expected, corrupted)
    assert (finding.check, finding.index) == ("bound", (10, 3))


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_must_be_where_they_belong(strange):
    a, b = operands(0, rows=256)
    a[10, 0] = strange
    expected = expected_of(a, b)
    honest = product(a, b)
    assert 10 not in expected.judged.tolist()
    assert judge("rows", expected, honest) is None
    lost, spread = honest.clone(), honest.clone()
    lost[10, 3] = 1.0
    spread[11, 3] = strange
    assert judge("rows", expected, lost).index == (10, 3)
    assert judge("rows", expected, spread).index == (11, 3)


def test_shape_and_dtype_are_judged_first(expected):
    assert judge("rows", expected, expected.value.float()).check == "dtype"
    assert judge("rows", expected, expected.value[1:].bfloat16()).check == "shape"
    assert judge("rows", expected, None).check == "missing"


def test_the_controls_see_through_a_contraction():
    large = expected_of(*operands(0, rows=2048))
    assert controls.check("rows", expected_of(*operands(0))) == controls.check("rows", large) == 4
    cropped = large.first(8)
    assert len(cropped.reference) == 8
    assert not cropped.applies


# ---- level 2 of contractions


def test_the_bound_of_a_promoted_accumulator_lies_between_those_of_its_parts():
    float32, low = bounds.Accumulator(), bounds.Accumulator(unit=2.0**-13)
    for terms in (1, 100, 128, 129, 7168):
        assert (
            float32.worst(terms) < bounds.HOPPER_FP8.worst(terms) <= low.worst(terms) + 1e-4
        )  # why: what promotion itself rounds
        assert float32.typical(terms) < bounds.HOPPER_FP8.typical(terms)
    assert bounds.HOPPER_FP8.worst(128) < bounds.HOPPER_FP8.worst(7168) < bounds.HOPPER_FP8.worst(128) * 1.01
    assert bounds.FLOAT32.worst(0) == 0


@pytest.mark.parametrize(
    ("declared", "accepted"), [(bounds.HOPPER_FP8, True), (bounds.FLOAT32, False)], ids=["14 bits", "float32"]
)
def test_products_that_one_outweighs_may_be_cut_off_where_that_is_declared(declared, accepted):
    a, b = (x.to(torch.float8_e4m3fn).double() for x in operands(0, terms=64, columns=64))
    a[:, ::INSTRUCTION] *= 64
    magnitude = a.abs() @ b.abs().T
    bounded = bounds.contraction_bound(a @ b.T, magnitude, 64, torch.float32, declared)
    expected = row_wise(bounded, (a @ b.T).float(), magnitude, 64, accumulator=declared)
    got = torch.zeros(bounded.value.shape)
    for k in range(0, 64, INSTRUCTION):
        got = fourteen_bits(got, (a[:, k : k + INSTRUCTION, None] * b[:, k : k + INSTRUCTION].T).float())
    assert expected.applies
    assert (judge("rows", expected, got) is None) == accepted
    if accepted:
        assert (
            max(measure.ratio for measure in expected.measures(got)) > 0.5
        )  # the noise that is forgiven is not far above what is seen


LONG = 2048  # terms
FACTORS_OF_16_BITS = [torch.bfloat16, torch.float16]


def long_product(dtype: torch.dtype, accumulator: bounds.Accumulator) -> tuple[Tensor, Tensor, RowWise]:
    """Positive factors of 16 bits, and their float32 product under an accumulator."""
    a, b = (x.abs() for x in operands(0, 64, LONG, 64, dtype))
    value = a.double() @ b.double().T
    bounded = bounds.contraction_bound(value, value, LONG, torch.float32, accumulator)
    expected = row_wise(bounded, (a.float() @ b.float().T), value, LONG, accumulator=accumulator)
    assert isinstance(expected, RowWise)
    return a, b, expected


def truncated_sum(a: Tensor, b: Tensor, bits: int = 26) -> Tensor:
    """16 products at a time, cut off `bits` bits below the largest, as a matrix unit adds them.

    26 bits give the errors measured on Hopper: 94 roundoffs for bf16, 213 for fp16.
    """
    total = torch.zeros(len(a), len(b))
    for k in range(0, LONG, 16):
        terms = (a[:, k : k + 16, None].double() * b[:, k : k + 16].T.double()).float()
        total = fourteen_bits(total, terms, bits)
    return total


@pytest.mark.parametrize("dtype", FACTORS_OF_16_BITS, ids=str)
@pytest.mark.parametrize(
    ("accumulator", "accepted"), [(bounds.MATRIX_UNIT, True), (bounds.FLOAT32, False)], ids=["unit", "float32"]
)
def test_long_sums_of_one_sign_may_be_truncated_by_a_matrix_unit_alone(dtype, accumulator, accepted):
    a, b, expected = long_product(dtype, accumulator)
    assert (judge("d_weight", expected, truncated_sum(a, b)) is None) == accepted


@pytest.mark.parametrize("dtype", FACTORS_OF_16_BITS, ids=str)
@pytest.mark.parametrize("bits", [21, 11], ids=["21 bits", "tf32"])
def test_sums_of_fewer_bits_than_float32_are_found_under_a_matrix_unit(dtype, bits):
    a, b, expected = long_product(dtype, bounds.MATRIX_UNIT)
    assert judge("d_weight", expected, truncated_sum(a, b, bits)) is not None


def test_a_matrix_unit_adds_products_of_16_bits_and_less_in_float32():
    assert {bounds.accumulating(torch.float32, kind) for kind in (*FACTORS_OF_16_BITS, torch.float8_e4m3fn)} == {
        bounds.MATRIX_UNIT
    }
    assert bounds.accumulating(torch.float32, torch.float32) == bounds.FLOAT32
    assert bounds.accumulating(torch.bfloat16, torch.bfloat16) == bounds.Accumulator(unit=2.0**-8)
    assert bounds.MATRIX_UNIT.worst(LONG) == bounds.FLOAT32.worst(LONG)


def test_the_bound_of_a_contraction_is_that_of_a_sum():
    a, b = operands(0)
    value, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    contraction_limit, sum_limit = (
        bounds.contraction_bound(value, magnitude, TERMS, torch.bfloat16),
        bounds.sum_bound(value, magnitude, TERMS, torch.bfloat16, torch.float32),
    )
    assert torch.equal(contraction_limit.bound, sum_limit.bound)


def test_two_contractions_with_a_rounding_between_stay_within_their_bound():
    for seed in range(5):
        a, b = operands(seed)
        _, c = operands(seed + 50, terms=COLUMNS)
        first = contracted(Running.of(a, torch.float32), Running.of(b, torch.float32)).with_rounding(torch.bfloat16)
        bounded = contracted(first, Running.of(c, torch.float32)).bounded(torch.bfloat16)
        for order in ORDERS:
            y = product(product(a, b, order), c, order)
            assert judge("y", bounded, y) is None
        low = product(
            contraction(
                a.float(), b.float(), "blocks of 16", keep=lambda x: x.to(torch.float8_e5m2).float()
            ).bfloat16(),
            c,
        )
        assert judge("y", bounded, low) is not None


# ---- calibration
