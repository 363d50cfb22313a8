"""Judging by ratios: calibration, codes, random rounding."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import calibrate
from conformance.judge import Codes, bound, controls, judge, ratios
from conformance.judge.bound import HOPPER_FP8, MATRIX_UNIT, Accumulator
from conformance.judge.codes import RECIPROCAL, code_values
from conformance.judge.ratios import CALIBRATION, Limits, calibrated
from conformance.judge.statistics import Stochastic, binomial_quantile, bonferroni, chi_square_range, improbable
from tests.judge.ratio_helpers import operands
from tests.judge.tolerance_experiment import ORDERS
from tests.judge.tolerance_fp8 import INSTRUCTION, fourteen_bits


@pytest.fixture
def record() -> dict:
    return json.loads(CALIBRATION.read_text())


def sound(record: dict) -> bool:
    """Whether the limits follow from what was measured, by the rules and with the numbers that the
    judge has today, and nothing was edited.
    """
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
        ("MATRIX_UNIT", dataclasses.replace(MATRIX_UNIT, drift=0.25)),
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


def test_long_products_into_float32_are_calibrated_with_both_signs():
    names = {name for name in calibrate.kinds("cpu") if "into fp32" in name}
    assert len(names) == 2 * 2 * len(calibrate.LONG_SHAPES)
    for one_sign in (False, True):
        drawn = list(calibrate.long_products("cpu", torch.float16, (64, 256, 64), one_sign, 2))
        assert {variant for variant, _ in drawn} == {"blocks of 32", "split 4", "one by one", "native"}
        assert all(ratio <= calibrate.LEAST[rule] for _, ratios in drawn for rule, ratio in ratios.items())


def test_products_of_eight_bits_are_calibrated_by_the_accumulator_that_may_be_declared():
    drawn = list(calibrate.scaled_products("cpu", (128, 64, 64), False, 2))
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
            partial = torch.zeros_like(total)
            for k in range(start, start + block, INSTRUCTION):
                partial = fourteen_bits(
                    partial, a[:, k : k + INSTRUCTION, None].float() * b[:, k : k + INSTRUCTION].float().T
                )
            total = total + partial
        worst[block] = max(ratio / calibrate.LEAST[rule] for rule, ratio in calibrate.ratios(expected, total).items())
    assert worst[128] < 1 < worst[7168]


def test_each_calibration_says_where_it_comes_from(record):
    for calibration in record["calibrations"]:
        assert {"hardware", "versions", "command", "date", "judged_with"} <= calibration.keys()
        for rules in calibration["maxima"].values():
            assert rules.keys() == record["limits"].keys()
            for maxima in rules.values():
                assert maxima["runs"] > 1
                assert maxima["largest"] >= maxima["mean"]


def test_the_fit_finds_the_distribution_that_maxima_are_drawn_from():
    drawn = np.random.default_rng(0).gumbel(1.2, 0.05, 20000)
    mu, beta = calibrate.gumbel(calibrate.summary("any", drawn.tolist()))
    # why: the standard errors of both are below 0.0005
    assert abs(mu - 1.2) < 0.003
    assert abs(beta - 0.05) < 0.002


def test_wider_maxima_more_cases_and_a_smaller_chance_ask_for_more():
    maxima = {"mean": 1.0, "deviation": 0.1, "largest": 1.2, "runs": 50}
    limit = calibrate.limit_of(maxima, 1e-6, 1000)
    assert calibrate.limit_of(maxima | {"deviation": 0.2}, 1e-6, 1000) > limit
    assert calibrate.limit_of(maxima, 1e-9, 1000) > limit
    assert calibrate.limit_of(maxima, 1e-6, 100000) > limit
    assert calibrate.limit_of(maxima | {"largest": 9.0}, 1e-6, 1000) == 9.0


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
    carried = torch.from_numpy(midpoints * (1 + 2.0**-22))  # each off by the window, to one side
    honest = carried.float().to(torch.float8_e4m3fn)
    assert (honest.view(torch.uint8) != expected.value.view(torch.uint8)).sum() > 150
    assert judge("codes", expected, honest) is None
    flipped = (
        torch.where(expected.value.float() == 1.0, 0x39, 0x38).to(torch.uint8).view(torch.float8_e4m3fn)
    )  # each one the other way
    assert "more than rounding explains" in judge("codes", expected, flipped).message


def test_equal_values_are_decided_alike_and_count_once():
    expected = codes_of(torch.full((1, 500), 1.0625 * (1 + 2.0**-23)).double())
    flipped = torch.full((1, 500), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert judge("codes", expected, flipped) is None


def test_values_that_are_alike_do_not_make_more_flips_right():
    alike = np.full(1000, 1.0625 * (1 + 2.0**-23))
    apart = 1.0625 * (1 + 2.0**-22 * np.linspace(0.5, 1.8, 40))
    expected = codes_of(torch.from_numpy(np.concatenate([alike, apart]))[None])
    corrupted = expected.value.clone()
    corrupted.view(torch.uint8)[0, 1000:] -= 1
    assert judge("codes", expected, corrupted) is not None


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
        corrupted = expected.value.clone()
        corrupted.view(torch.uint8)[0, column] = code
        assert judge("codes", expected, corrupted).index == (0, column)


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
    index = torch.searchsorted(GRID, value, right=True) - 1
    exact = GRID[index] == value
    return Stochastic(value, GRID[index], torch.where(exact, value, GRID[index + 1]))


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
    # why: every table has 70.065 and 135.807 for 100 degrees; Wilson and Hilferty's formula is good
    # to a part in a thousand there
    assert max(abs(least - 70.065), abs(most - 135.807)) < 0.1
