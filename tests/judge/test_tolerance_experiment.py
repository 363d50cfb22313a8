"""The judge catches planted bugs and accepts honest kernels; common tolerance policies do not."""

from functools import cache

import pytest
import torch

from conformance.analysis.forms import nearly
from conformance.judge import Codes, RowWise, judge
from conformance.judge.codes import DIVISION, RECIPROCAL, code_values
from tests.judge import tolerance_fp8 as fp8
from tests.judge.tolerance_experiment import (
    BUGS,
    ORDERS,
    POLICIES,
    REGIMES,
    Kernel,
    Layer,
    Truth,
    layer,
    truth,
)

SEEDS = range(100, 103)
LONG = 2048  # terms at which 14-bit sums are visibly worse than sums promoted every 128


@cache
def problem(regime: str, seed: int = 0) -> tuple[Layer, Truth]:
    inputs = layer(seed, regime)
    return inputs, truth(inputs)


@cache
def planted(regime: str, bug: str) -> torch.Tensor:
    return BUGS[bug]()(problem(regime)[0])


@cache
def table(regime: str) -> tuple[dict[str, int], set[str]]:
    """Bugs caught per policy, and the policies that reject the honest split-sum kernel."""
    inputs, exact = problem(regime)

    def rejects(y: torch.Tensor) -> set[str]:
        return {
            name for name, accepts in POLICIES.items() if not accepts(y.double(), exact.value, exact.reference.double())
        }

    caught = [rejects(planted(regime, bug)) for bug in BUGS]
    return {name: sum(name in rejecting for rejecting in caught) for name in POLICIES}, rejects(
        Kernel("split 4")(inputs)
    )


# ---- the expert MLP


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bug", BUGS)
def test_the_judge_and_its_ratios_alone_catch_every_bug_at_every_scale(bug, regime):
    expected, y = problem(regime)[1].expected, planted(regime, bug)
    assert len(BUGS) == 14
    assert judge("y", expected, y) is not None and expected.excess(y) is not None


@pytest.mark.parametrize("regime", REGIMES)
def test_the_bound_alone_passes_what_loses_precision_and_the_ratios_name_it(regime):
    expected = problem(regime)[1].expected
    for bug, rule in (("low accumulator", "rms"), ("truncating", "bias")):
        y = planted(regime, bug)
        assert judge("y", expected.bounded, y) is None
        assert expected.excess(y).rule == rule


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_honest_order_of_summation_is_rejected(regime, seed):
    inputs, exact = problem(regime, seed)
    assert isinstance(exact.expected, RowWise)
    for order in ORDERS:
        assert judge("y", exact.expected, Kernel(order)(inputs)) is None


def test_the_reference_passes_and_so_does_the_truth_rounded_once():
    exact = problem("A")[1]
    assert judge("y", exact.expected, exact.reference) is None
    assert judge("y", exact.expected, exact.value.bfloat16()) is None


# ---- the same bugs by common policies


FEW = {  # the policies that find fewer bugs than a number, by regime
    "A": {"95 % within 1e-2": 7, "calc_diff 1e-3": 10},
    "B": {"calc_diff 1e-3": 10} | dict.fromkeys(("allclose 1e-2", "95 % within 1e-2", "atol 1.4e-2 rtol 2e-2"), 1),
    "C": dict.fromkeys(("calc_diff 1e-3", "calc_diff 1e-5", "2 × largest error"), 10),
}
FIXED = {"allclose 1e-2", "95 % within 1e-2", "rtol 1.6e-2 atol 1e-5", "atol 1.4e-2 rtol 2e-2", "2e-2 of rms"}


@pytest.mark.parametrize("regime", REGIMES)
def test_fixed_tolerances_and_one_number_for_the_whole_output_miss_bugs(regime):
    caught, _ = table(regime)
    assert {policy: caught[policy] for policy, most in FEW[regime].items() if caught[policy] >= most} == {}


def test_where_rows_differ_in_scale_one_number_misses_more_and_fixed_tolerances_reject_an_honest_kernel():
    assert all(table("C")[0][policy] < table("A")[0][policy] for policy in FEW["C"])
    assert table("C")[1] == FIXED


def test_no_policy_of_others_catches_all_without_rejecting_the_honest():
    for policy in POLICIES:
        assert any(table(regime)[0][policy] < len(BUGS) or policy in table(regime)[1] for regime in REGIMES)


# ---- block-scaled FP8


@cache
def block_problem(
    declared: type[fp8.BlockKernel] = fp8.BlockKernel, seed: int = 0, width: int = 480
) -> tuple[fp8.Blocks, RowWise]:
    inputs = fp8.blocks(seed, width=width)
    expected = fp8.block_truth(inputs, declared)
    assert isinstance(expected, RowWise)
    return inputs, expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [fp8.BlockKernel, fp8.ScaledFirst], ids=lambda kernel: kernel.__name__)
def test_no_honest_order_of_a_block_scaled_contraction_is_rejected(kernel, seed):
    inputs, expected = block_problem(seed=seed)
    for order in ORDERS:
        assert judge("rows", expected, kernel(order)(inputs)) is None


@pytest.mark.parametrize("bug", fp8.BLOCK_BUGS)
def test_every_bug_of_a_block_scaled_contraction_is_caught(bug):
    inputs, expected = block_problem()
    assert judge("rows", expected, fp8.BLOCK_BUGS[bug]()(inputs)) is not None


@pytest.mark.parametrize("bug", fp8.BLOCK_BUGS)
def test_wrong_scales_are_caught_also_where_a_low_accumulator_is_declared(bug):
    inputs, expected = block_problem(fp8.Hopper)
    # a sum that is never promoted loses too little at 480 terms
    assert (judge("rows", expected, fp8.BLOCK_BUGS[bug]()(inputs)) is None) == (bug == "never promoted")


def test_sums_of_14_bits_are_right_where_they_are_declared_and_wrong_where_not():
    for width in (480, LONG):
        inputs, expected = block_problem(fp8.Hopper, width=width)
        assert judge("rows", expected, fp8.Hopper()(inputs)) is None
        assert judge("rows", expected, fp8.BlockKernel()(inputs)) is None  # better than declared
    inputs, expected = block_problem()
    assert judge("rows", expected, fp8.Hopper()(inputs)) is not None


def test_sums_of_14_bits_that_are_never_promoted_are_caught_in_long_contractions():
    for declared in (fp8.BlockKernel, fp8.Hopper):
        inputs, expected = block_problem(declared, width=LONG)
        assert judge("rows", expected, fp8.BLOCK_BUGS["never promoted"]()(inputs)) is not None


@pytest.mark.parametrize("saturate", [True, False])
def test_the_amax_of_the_step_before_is_caught_in_the_product(saturate):
    inputs, expected = block_problem()
    finding = judge("rows", expected, fp8.StaleAmax(fp8.activations(0), saturate)(inputs))
    assert finding is not None
    assert saturate or "is nan" in finding.message


# ---- the codes and scales themselves


def codes_of(x: torch.Tensor, window: float = DIVISION) -> Codes:
    """The nearest codes of x / stored scale, in float64."""
    exact = x.double() / fp8.spread_out(fp8.quantised(x, 1)[1].double(), 1, x.shape)
    nearest = exact.clamp(-448, 448).to(torch.float8_e4m3fn)
    return Codes(nearest, scaled=exact, table=code_values(torch.float8_e4m3fn), window=window)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_made_by_division_or_by_a_reciprocal_are_accepted(seed):
    x = fp8.activations(seed, rows=1024)
    assert judge("codes", codes_of(x), fp8.quantised(x, 1)[0]) is None
    assert judge("codes", codes_of(x, RECIPROCAL), fp8.quantised(x, 1, reciprocal=True)[0]) is None


def test_codes_and_scales_of_a_stale_amax_are_rejected():
    x = fp8.activations(0)
    codes, scale = fp8.quantised(x, 1, fp8.largest(x, 1) / 1.5)
    assert judge("codes", codes_of(x, RECIPROCAL), codes).check == "code"
    assert judge("scales", nearly(fp8.quantised(x, 1)[1], 5), scale).check == "bound"


def test_a_cast_that_overflows_to_nan_is_rejected():
    x = fp8.activations(0)
    nearest = codes_of(x)
    overflowed = fp8.quantised(x, 1, fp8.largest(x, 1) / 1.5, saturate=False)[0]
    only_nan = torch.where(
        overflowed.float().isnan(), overflowed.view(torch.uint8), nearest.value.view(torch.uint8)
    ).view(torch.float8_e4m3fn)
    finding = judge("codes", nearest, only_nan)
    assert finding.check == "code"
    assert "0x7f (nan)" in finding.message


def test_the_amax_of_the_neighbouring_block_is_rejected():
    x = fp8.activations(0)
    codes, scale = fp8.quantised(x, 1, fp8.largest(x, 1).roll(1, 1))
    assert x.shape[1] > fp8.BLOCK
    assert judge("codes", codes_of(x, RECIPROCAL), codes) is not None
    assert judge("scales", nearly(fp8.quantised(x, 1)[1], 5), scale) is not None
