"""Each rule of the ratios, of the codes and of what is random takes what is honest, and rejects its twin."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import calibrate
from conformance.analysis.running import Running, contracted
from conformance.judge import Bounded, Codes, RowWise, bound, controls, judge, ratios
from conformance.judge.bound import FLOAT32, HOPPER_FP8, Accumulator, contraction_bound, sum_bound
from conformance.judge.codes import RECIPROCAL, code_values
from conformance.judge.ratios import CALIBRATION, Limits, calibrated, row_wise
from conformance.judge.statistics import Stochastic, binomial_quantile, bonferroni, chi_square_range, improbable
from tests.judge.tolerance_experiment import INSTRUCTION, ORDERS, contraction, fourteen_bits, rounded, truncated

ROWS, TERMS, COLUMNS = 128, 256, 64


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The products are small, and threads that wait for one another are slow where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operands(
    seed: int, rows: int = ROWS, terms: int = TERMS, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    source = np.random.default_rng(seed)
    a, b = source.standard_normal((rows, terms)), source.standard_normal((columns, terms)) / terms**0.5
    return torch.from_numpy(a).to(dtype), torch.from_numpy(b).to(dtype)


def expected_of(a: Tensor, b: Tensor, loosened: float = 1.0, **settings) -> RowWise | Bounded:
    """A product; with a bound as loose as several stages of rounding make it, so that the ratios are alone."""
    value, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    exact = sum_bound(value, magnitude, a.shape[1], a.dtype, torch.float32)
    bounded = dataclasses.replace(exact, bound=loosened * exact.bound)
    return row_wise(bounded, product(a, b), magnitude, a.shape[1], **settings)


def product(a: Tensor, b: Tensor, order: str = "one product") -> Tensor:
    return contraction(a.float(), b.float(), order).to(a.dtype)


@pytest.fixture
def expected() -> RowWise:
    return expected_of(*operands(0), loosened=100)


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
    wrong = product(a, b)
    wrong[7] *= 1 + 2.0**-11  # as TF32 would have it
    assert judge("rows", expected, wrong).check == "ratio"


# ---- what is not, rule by rule


def test_one_row_in_a_lower_precision_is_rejected_by_its_row(expected):
    a, b = operands(0)
    wrong = product(a, b)
    wrong[17] = contraction(a[17:18].float(), b.float(), "blocks of 16", keep=lambda x: rounded(x) * (1 + 2.0**-8))[
        0
    ].bfloat16()
    finding = judge("rows", expected, wrong)
    assert (finding.check, finding.index[0]) == ("ratio", 17)
    assert finding.message.startswith("row 17; 1 of 128 rows: error ")
    assert "× what the recipe allows" in finding.message


def test_one_element_below_the_bound_is_rejected_by_its_size():
    value = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 512)))
    loose = Bounded(value, torch.full_like(value, 1.0), torch.bfloat16, torch.float32)
    expected = row_wise(loose, value.bfloat16(), value.abs(), 1, limits=Limits(row=1e9, element=2.5, rms=1e9, bias=1e9))
    wrong = value.bfloat16()
    wrong[5, 300] += 0.1 * max(1, abs(float(wrong[5, 300])))
    finding = judge("rows", expected, wrong)
    assert (finding.check, finding.index) == ("ratio", (5, 300))
    assert finding.message.startswith("element [5, 300]: error ")
    assert judge("rows", expected, value.bfloat16()) is None


def test_a_little_noise_everywhere_is_rejected_by_the_rms_alone(expected):
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal(expected.value.shape))
    wrong = (expected.value * (1 + 2.0**-9 * noise)).bfloat16()
    assert rule_of(expected, wrong) == "rms"
    only = {
        measure.rule: measure.ratio / getattr(expected.limits, measure.rule) for measure in expected.measures(wrong)
    }
    assert only["row"] < 1
    assert only["bias"] < 1


@pytest.mark.parametrize(("mistake", "direction"), [("truncate", "away from zero"), ("up", "upwards")])
def test_another_rounding_mode_is_rejected_by_its_bias(expected, mistake, direction):
    exact = expected.value.float()
    cut = truncated(exact)
    above = torch.where(exact > cut, cut.bfloat16().view(torch.int16) + 1, cut.bfloat16().view(torch.int16)).view(
        torch.bfloat16
    )
    wrong = cut.bfloat16() if mistake == "truncate" else torch.where(exact > 0, above, cut.bfloat16())
    finding = judge("rows", expected, wrong)
    assert finding.check == "ratio"
    biased = next(measure for measure in expected.measures(wrong) if measure.rule == "bias")
    assert biased.ratio > 3
    assert direction in biased.place


def test_a_bias_of_one_group_does_not_hide_among_the_others():
    a, b = operands(0, rows=512)
    groups = torch.arange(512) // 64
    whole, by_group = expected_of(a, b), expected_of(a, b, groups=groups)
    exact = whole.value.float()
    wrong = torch.where((groups == 5)[:, None], truncated(exact).bfloat16(), exact.bfloat16())
    biased = {
        name: next(m for m in e.measures(wrong) if m.rule == "bias")
        for name, e in (("whole", whole), ("group", by_group))
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
    bounded = sum_bound(value, 50 * magnitude, TERMS, torch.bfloat16, torch.float32)  # loose on purpose
    groups = torch.arange(3)[:, None].expand(3, 32)
    expected = row_wise(bounded, product(a, b).reshape(3, 32, 64), magnitude, TERMS, groups=groups)
    wrong = product(a, b).reshape(3, 32, 64).clone()
    wrong[2, 5] = value[2, 5].bfloat16() + 2.0**-6
    finding = judge("d_weight", expected, wrong)
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
    wrong = product(a, b)
    wrong[2] += 2 * expected.bound[2]
    assert judge("rows", expected, wrong).check == "bound"
    assert type(expected_of(a[::2], b)) is Bounded


def test_rows_of_zeros_are_exact():
    a, b = operands(0, rows=256)
    a[10] = 0
    expected = expected_of(a, b)
    assert 10 not in expected.judged.tolist()
    wrong = product(a, b)
    assert judge("rows", expected, wrong) is None
    wrong[10, 3] = 2.0**-133
    finding = judge("rows", expected, wrong)
    assert (finding.check, finding.index) == ("bound", (10, 3))


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_must_be_where_they_belong(strange):
    a, b = operands(0, rows=256)
    a[10, 0] = strange
    expected = expected_of(a, b)
    right = product(a, b)
    assert 10 not in expected.judged.tolist()
    assert judge("rows", expected, right) is None
    lost, spread = right.clone(), right.clone()
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
    wide, low = Accumulator(), Accumulator(unit=2.0**-13)
    for terms in (1, 100, 128, 129, 7168):
        assert (
            wide.worst(terms) < HOPPER_FP8.worst(terms) <= low.worst(terms) + 1e-4
        )  # why: what promotion itself rounds
        assert wide.typical(terms) < HOPPER_FP8.typical(terms)
    assert HOPPER_FP8.worst(128) < HOPPER_FP8.worst(7168) < HOPPER_FP8.worst(128) * 1.01
    assert FLOAT32.worst(0) == 0


@pytest.mark.parametrize(("declared", "accepted"), [(HOPPER_FP8, True), (FLOAT32, False)], ids=["14 bits", "float32"])
def test_products_that_one_outweighs_may_be_cut_off_where_that_is_declared(declared, accepted):
    a, b = (x.to(torch.float8_e4m3fn).double() for x in operands(0, terms=64, columns=64))
    a[:, ::INSTRUCTION] *= 64
    magnitude = a.abs() @ b.abs().T
    bounded = contraction_bound(a @ b.T, magnitude, 64, torch.float32, declared)
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


def test_the_bound_of_a_contraction_is_that_of_a_sum():
    a, b = operands(0)
    value, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    one, other = (
        contraction_bound(value, magnitude, TERMS, torch.bfloat16),
        sum_bound(value, magnitude, TERMS, torch.bfloat16, torch.float32),
    )
    assert torch.equal(one.bound, other.bound)


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


@pytest.fixture
def record() -> dict:
    return json.loads(CALIBRATION.read_text())


def sound(record: dict) -> bool:
    """Whether the limits follow from what was measured, by the rules and with the numbers that the judge has today, and nothing was edited."""
    by_rule = {"alpha": calibrate.ALPHA, "cases": calibrate.CASES, "least": calibrate.LEAST}
    same_rules = all(record[name] == value for name, value in by_rule.items())
    same_judge = all(calibration["judged_with"] == calibrate.judged_with() for calibration in record["calibrations"])
    return (
        same_rules
        and same_judge
        and record["limits"] == calibrate.limits_of(record)
        and record["digest"] == calibrate.digest(record)
    )


def test_the_limits_follow_from_the_calibration(record):
    assert sound(record)
    assert calibrated() == Limits(**record["limits"])
    assert record["calibrations"]


@pytest.mark.parametrize("rule", ["row", "element", "rms", "bias"])
def test_an_edited_limit_is_noticed(record, rule):
    record["limits"][rule] *= 1.5
    assert not sound(record)
    record["digest"] = calibrate.digest(record)
    assert not sound(record)


def test_an_edited_measurement_is_noticed(record):
    kind = next(iter(record["calibrations"][0]["maxima"].values()))
    kind["row"]["mean"] *= 1.01
    assert not sound(record)


@pytest.mark.parametrize(
    ("name", "value"),
    [("least", {"row": 2.0, "element": 2.5, "rms": 1.5, "bias": 1.0}), ("alpha", 1e-9), ("cases", 10**9)],
)
def test_a_rule_that_was_changed_in_the_record_alone_is_noticed(record, name, value):
    record[name] = value
    record["limits"] = calibrate.limits_of(record)
    record["digest"] = calibrate.digest(record)
    assert not sound(record)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEAST_ELEMENTS", 8192),
        ("POOLED", 128),
        ("CANCELS", 0.25),
        ("PEAK", 5),
        ("NORMAL", 16),
        ("SLACK", 0.03),
        ("DEVIATIONS", 6.0),
        ("BIAS_ROWS", 32),
        ("BIAS_ELEMENTS", 2048),
        ("HOPPER_FP8", dataclasses.replace(HOPPER_FP8, unit=2.0**-12)),
        ("HOPPER_FP8", dataclasses.replace(HOPPER_FP8, block=None)),
        ("HOPPER_FP8", dataclasses.replace(HOPPER_FP8, spread=1.0)),
        ("FLOAT32", Accumulator(unit=2.0**-23)),
    ],
)
def test_a_number_of_the_judge_that_was_changed_without_a_calibration_is_noticed(record, monkeypatch, name, value):
    monkeypatch.setattr(bound if isinstance(value, Accumulator) else ratios, name, value)
    assert not sound(record)


def test_every_number_of_the_ratios_is_in_the_record(record, monkeypatch):
    monkeypatch.setattr(ratios, "ANOTHER", 0.5, raising=False)
    assert not sound(record)


def test_a_number_that_was_changed_in_the_record_too_is_noticed(record):
    record["calibrations"][0]["judged_with"]["PEAK"] = 5
    assert not sound(record)


def test_products_of_eight_bits_are_calibrated_by_the_accumulator_that_may_be_declared():
    drawn = list(calibrate.scaled_products("cpu", (128, 64, 64), 2))
    assert {variant for variant, _ in drawn} == {"native, fp32", "native, bf16", *ORDERS}
    assert all(ratio <= calibrate.LEAST[rule] for _, ratios in drawn for rule, ratio in ratios.items())


def test_products_of_eight_bits_that_are_never_promoted_are_beyond_it():
    """The twin: 14 bits through the whole contraction, and the same promoted each 128."""
    a, b = (x.to(torch.float8_e4m3fn) for x in operands(0, rows=64, terms=7168, dtype=torch.float32))
    expected = calibrate.expected_scaled_product(a, b, torch.tensor(1.0), torch.float32)
    worst = {}
    for block in (128, 7168):
        total = torch.zeros(expected.value.shape)
        for start in range(0, 7168, block):
            inside = torch.zeros_like(total)
            for k in range(start, start + block, INSTRUCTION):
                inside = fourteen_bits(
                    inside, a[:, k : k + INSTRUCTION, None].float() * b[:, k : k + INSTRUCTION].float().T
                )
            total = total + inside
        worst[block] = max(ratio / calibrate.LEAST[rule] for rule, ratio in calibrate.ratios(expected, total).items())
    assert worst[128] < 1 < worst[7168]


def test_each_calibration_says_where_it_comes_from(record):
    for calibration in record["calibrations"]:
        assert {"hardware", "versions", "command", "date", "judged_with"} <= calibration.keys()
        for rules in calibration["maxima"].values():
            assert rules.keys() == record["limits"].keys()
            for seen in rules.values():
                assert seen["runs"] > 1
                assert seen["largest"] >= seen["mean"]


def test_the_fit_finds_the_distribution_that_maxima_are_drawn_from():
    drawn = np.random.default_rng(0).gumbel(1.2, 0.05, 20000)
    mu, beta = calibrate.gumbel(calibrate.summary("any", drawn.tolist()))
    # why: the standard errors of both are below 0.0005
    assert abs(mu - 1.2) < 0.003
    assert abs(beta - 0.05) < 0.002


def test_wider_maxima_more_cases_and_a_smaller_chance_ask_for_more():
    seen = {"mean": 1.0, "deviation": 0.1, "largest": 1.2, "runs": 50}
    limit = calibrate.limit_of(seen, 1e-6, 1000)
    assert calibrate.limit_of(seen | {"deviation": 0.2}, 1e-6, 1000) > limit
    assert calibrate.limit_of(seen, 1e-9, 1000) > limit
    assert calibrate.limit_of(seen, 1e-6, 100000) > limit
    assert calibrate.limit_of(seen | {"largest": 9.0}, 1e-6, 1000) == 9.0


# ---- codes

E4M3 = code_values(torch.float8_e4m3fn)
SCALED = torch.tensor(
    [[1.0, 1.0624, 1.06250001, -3.3, 0.0, 447.0]]
).double()  # 1.0625 lies between the codes of 1 and 1.125


def codes_of(scaled: Tensor, window: float = RECIPROCAL) -> Codes:
    return Codes(scaled.float().clamp(-448, 448).to(torch.float8_e4m3fn), scaled=scaled, table=E4M3, window=window)


def changed(codes: Tensor, column: int, step: int) -> Tensor:
    out = codes.clone()
    out.view(torch.uint8)[0, column] += step
    return out


def test_the_nearest_codes_are_right():
    assert judge("codes", codes_of(SCALED), codes_of(SCALED).value) is None


@pytest.mark.parametrize(("column", "step"), [(0, 1), (1, 1), (3, 1), (5, 1), (2, 2)])
def test_another_code_away_from_a_midpoint_is_wrong(column, step):
    expected = codes_of(SCALED)
    finding = judge("codes", expected, changed(expected.value, column, step))
    assert (finding.check, finding.index) == ("code", (0, column))


def test_a_neighbour_across_a_near_midpoint_is_right_only_within_the_window():
    near = 1.0625 * (1 + 2.0**-22 * torch.tensor([[0.1, -0.1, 0.3, -0.3, 1.0, -1.0, 0.2, -0.2]]).double())
    nearest = codes_of(near)
    flipped = changed(nearest.value, 0, -1) if nearest.value.float()[0, 0] > 1.1 else changed(nearest.value, 0, 1)
    assert judge("codes", nearest, flipped) is None
    assert judge("codes", codes_of(near, window=0.0), flipped).check == "code"
    assert judge("codes", codes_of(near, window=2.0**-30), flipped).check == "code"


def test_more_flips_than_rounding_explains_are_wrong():
    source = np.random.default_rng(0)
    midpoints = 1.0625 * (1 + 2.0**-22 * source.uniform(-1, 1, (1, 400)))
    expected = codes_of(torch.from_numpy(midpoints))
    carried = torch.from_numpy(midpoints * (1 + 2.0**-22))  # every value off by as much as the window, to one side
    honest = carried.float().to(torch.float8_e4m3fn)
    assert (honest.view(torch.uint8) != expected.value.view(torch.uint8)).sum() > 150
    assert judge("codes", expected, honest) is None
    other = (
        torch.where(expected.value.float() == 1.0, 0x39, 0x38).to(torch.uint8).view(torch.float8_e4m3fn)
    )  # each one the other way
    assert "more than rounding explains" in judge("codes", expected, other).message


def test_equal_values_are_decided_alike_and_count_once():
    expected = codes_of(torch.full((1, 500), 1.0625 * (1 + 2.0**-23)).double())
    other = torch.full((1, 500), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert judge("codes", expected, other) is None


def test_values_that_are_alike_do_not_make_more_flips_right():
    alike = np.full(1000, 1.0625 * (1 + 2.0**-23))
    apart = 1.0625 * (1 + 2.0**-22 * np.linspace(0.5, 1.8, 40))
    expected = codes_of(torch.from_numpy(np.concatenate([alike, apart]))[None])
    wrong = expected.value.clone()
    wrong.view(torch.uint8)[0, 1000:] -= 1
    assert judge("codes", expected, wrong) is not None


def test_a_tie_without_rounding_before_it_goes_to_the_even_code():
    expected = codes_of(torch.tensor([[1.0625, 1.1875]]).double(), window=0.0)
    assert expected.value.float().tolist() == [[1.0, 1.25]]
    assert judge("codes", expected, changed(expected.value, 0, 1)).check == "code"
    assert (
        judge("codes", codes_of(expected.scaled), changed(expected.value, 0, 1)) is None
    )  # where it may be a reciprocal's doing


def test_saturation_nan_and_the_sign_of_zero_have_one_right_code():
    expected = Codes(
        torch.tensor([[0x7E, 0x7F, 0x00, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bits",
        False,
        torch.zeros(1, 4).double(),
        E4M3,
        1.0,
    )
    for column, code in ((0, 0x7F), (1, 0x7E), (2, 0x80), (3, 0x00)):
        wrong = expected.value.clone()
        wrong.view(torch.uint8)[0, column] = code
        assert judge("codes", expected, wrong).index == (0, column)


def test_codes_of_another_width_are_judged_by_their_own_table():
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    scaled = torch.tensor([2.5 * (1 + 2.0**-24), 2.4, -5.0]).double()
    expected = Codes(torch.tensor([5, 4, 14], dtype=torch.uint8), scaled=scaled, table=e2m1, window=RECIPROCAL)
    assert judge("codes", expected, torch.tensor([4, 4, 14], dtype=torch.uint8)) is None
    assert judge("codes", expected, torch.tensor([5, 5, 14], dtype=torch.uint8)).index == (1,)


def test_the_controls_see_through_codes():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((9000, 4))) * 100
    assert controls.check("codes", codes_of(x)) == 3


# ---- what is random

GRID = E4M3[:0x7F]
REPEATS = 400


def to_be_rounded(seed: int, count: int = 600) -> Stochastic:
    value = torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 400, count))
    value[::50] = GRID[0x40]  # exact: nothing to decide
    place = torch.searchsorted(GRID, value, right=True) - 1
    exact = GRID[place] == value
    return Stochastic(value, GRID[place], torch.where(exact, value, GRID[place + 1]))


def rounded_at_random(expected: Stochastic, seed: int, noise=None) -> Tensor:
    drawn = np.random.default_rng(seed).uniform(size=(REPEATS, len(expected.value_N)))
    noise = torch.from_numpy(drawn if noise is None else noise(drawn))
    return torch.where(noise < expected.p_N, expected.high_N, expected.low_N)


def test_honest_stochastic_rounding_is_accepted():
    for seed in range(20):
        expected = to_be_rounded(seed)
        assert improbable(expected, rounded_at_random(expected, seed)) is None


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (lambda drawn: np.full_like(drawn, 0.5), "the variance over repeats is "),  # to nearest
        (lambda drawn: np.zeros_like(drawn), "standard errors too high"),  # always up
        (lambda drawn: drawn * 0.97, "standard errors too high"),  # numbers that never reach 1
        (lambda drawn: np.floor(drawn * 4) / 4, "standard errors too high"),  # of two bits
        (
            lambda drawn: np.repeat(drawn[:, :1], drawn.shape[1], 1),
            "the variance over repeats is ",
        ),  # one number for all elements
        (
            lambda drawn: np.repeat(drawn[:1], len(drawn), 0),
            "the variance over repeats is ",
        ),  # the same numbers every time
    ],
    ids=["nearest", "up", "short", "coarse", "shared", "repeated"],
)
def test_what_is_not_independent_and_unbiased_is_rejected(noise, says):
    expected = to_be_rounded(0)
    message = improbable(expected, rounded_at_random(expected, 1, noise))
    assert message is not None
    assert says in message


def test_one_biased_element_among_many_is_found():
    expected = to_be_rounded(0)
    draws = rounded_at_random(expected, 1)
    draws[:, 7] = expected.high_N[7]
    assert "one element goes up in 1 of 400 repeats" in improbable(expected, draws)


def test_only_neighbours_may_be_drawn():
    expected = to_be_rounded(0)
    draws = rounded_at_random(expected, 1)
    draws[3, 7] = expected.high_N[7] * 2
    assert improbable(expected, draws).startswith("repeat 3 of element 7 is")


def test_too_few_repeats_are_refused():
    expected = to_be_rounded(0)
    with pytest.raises(ValueError, match="255 repeats; at least 256"):
        improbable(expected, rounded_at_random(expected, 1)[:255])


def test_more_checks_widen_each():
    expected = to_be_rounded(0)
    draws = rounded_at_random(expected, 1, lambda drawn: drawn * 0.98)
    assert improbable(expected, draws) is not None
    assert improbable(dataclasses.replace(expected, checks=10**60), draws) is None
    assert bonferroni(1e-6, 100) == 1e-6 / 100


def test_quantiles_are_those_of_the_distributions():
    for trials, p, level in ((10, 0.5, 0.9999), (400, 0.5, 0.9999), (1000, 0.01, 0.99)):
        k = binomial_quantile(trials, p, level)
        chance = [math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(k + 1)]
        assert sum(chance) >= level > sum(chance[:-1])
    assert (binomial_quantile(0, 0.5, 0.9), binomial_quantile(7, 1.0, 0.9), binomial_quantile(7, 0.0, 0.9)) == (0, 7, 0)
    least, most = chi_square_range(100, 0.02)
    # why: every table has 70.065 and 135.807 for 100 degrees; Wilson and Hilferty's formula is good to a part in a thousand there
    assert max(abs(least - 70.065), abs(most - 135.807)) < 0.1
