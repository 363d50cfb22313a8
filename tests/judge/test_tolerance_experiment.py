"""The judge catches planted bugs and accepts honest kernels; common tolerance policies do not."""

from functools import cache

import pytest
import torch

from conformance.analysis.forms import nearly
from conformance.judge import Codes, RowWise, judge
from conformance.judge.codes import DIVISION, RECIPROCAL, code_values
from tests.judge.tolerance_experiment import (
    BUGS,
    ORDERS,
    POLICIES,
    REGIMES,
    Kernel,
    Layer,
    LowAccumulator,
    Truncating,
    Truth,
    layer,
    truth,
)
from tests.judge.tolerance_fp8 import (
    BLOCK,
    BLOCK_BUGS,
    BlockKernel,
    Blocks,
    Hopper,
    NeverPromoted,
    ScaledFirst,
    StaleAmax,
    activations,
    block_truth,
    blocks,
    largest,
    quantised,
    spread_out,
)
from tests.judge.tolerance_recipes import BUGS as RECIPE_BUGS
from tests.judge.tolerance_recipes import DECLARING, HONEST, PRODUCTS, SCALINGS, Product, declaring, product

SEEDS = range(100, 103)
LONG = 2048  # terms at which 14-bit sums are visibly worse than sums promoted every 128


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One torch thread: the GEMMs are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def problem(regime: str, seed: int = 0) -> tuple[Layer, Truth]:
    inputs = layer(seed, regime)
    return inputs, truth(inputs)


@cache
def planted(regime: str, bug: type[Kernel]) -> torch.Tensor:
    return bug()(problem(regime)[0])


@cache
def table(regime: str) -> tuple[dict[str, int], set[str]]:
    """Bugs caught per policy, and the policies that reject the honest split-sum kernel."""
    inputs, right = problem(regime)

    def rejects(y: torch.Tensor) -> set[str]:
        return {
            name for name, accepts in POLICIES.items() if not accepts(y.double(), right.value, right.reference.double())
        }

    caught = [rejects(planted(regime, bug)) for bug in BUGS]
    return {name: sum(name in rejecting for rejecting in caught) for name in POLICIES}, rejects(
        Kernel("split 4")(inputs)
    )


# ---- the expert MLP


def test_there_are_fourteen_bugs():
    assert len(set(BUGS)) == 14


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_every_bug_is_caught_at_every_scale(bug, regime):
    assert judge("y", problem(regime)[1].expected, planted(regime, bug)) is not None


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_ratios_alone_catch_every_bug(bug, regime):
    assert problem(regime)[1].expected.excess(planted(regime, bug)) is not None


@pytest.mark.parametrize("regime", REGIMES)
def test_the_bound_alone_passes_what_loses_precision_and_the_ratios_name_it(regime):
    expected = problem(regime)[1].expected
    for bug, rule in ((LowAccumulator, "rms"), (Truncating, "bias")):
        y = planted(regime, bug)
        assert judge("y", expected.bounded, y) is None
        assert expected.excess(y).rule == rule


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_honest_order_of_summation_is_rejected(regime, seed):
    inputs, right = problem(regime, seed)
    assert isinstance(right.expected, RowWise)
    for order in ORDERS:
        assert judge("y", right.expected, Kernel(order)(inputs)) is None


def test_the_reference_passes_and_so_does_the_truth_rounded_once():
    right = problem("A")[1]
    assert judge("y", right.expected, right.reference) is None
    assert judge("y", right.expected, right.value.bfloat16()) is None


# ---- the same bugs by common policies


@pytest.mark.parametrize("policy", ["allclose 1e-2", "95 % within 1e-2", "atol 1.4e-2 rtol 2e-2"])
def test_absolute_tolerances_catch_nothing_where_outputs_are_small(policy):
    assert table("B")[0][policy] == 0


@pytest.mark.parametrize("regime", REGIMES)
def test_one_number_for_the_whole_output_misses_wrong_rows(regime):
    assert table(regime)[0]["calc_diff 1e-3"] < 10


def test_one_number_for_the_whole_output_misses_more_where_rows_differ_in_scale():
    for policy in ("calc_diff 1e-3", "calc_diff 1e-5", "2 × largest error"):
        assert table("C")[0][policy] < 10
        assert table("C")[0][policy] < table("A")[0][policy]


def test_the_share_of_wrong_elements_lets_half_of_the_bugs_pass():
    assert table("A")[0]["95 % within 1e-2"] < 7


def test_fixed_tolerances_reject_an_honest_kernel_where_rows_differ_in_scale():
    assert table("C")[1] == {
        "allclose 1e-2",
        "95 % within 1e-2",
        "rtol 1.6e-2 atol 1e-5",
        "atol 1.4e-2 rtol 2e-2",
        "2e-2 of rms",
    }


def test_no_policy_of_others_catches_all_without_rejecting_the_honest():
    for policy in POLICIES:
        assert any(table(regime)[0][policy] < len(BUGS) or policy in table(regime)[1] for regime in REGIMES)


# ---- block-scaled FP8


@cache
def block_problem(declared: type[BlockKernel] = BlockKernel, seed: int = 0, width: int = 480) -> tuple[Blocks, RowWise]:
    inputs = blocks(seed, width=width)
    expected = block_truth(inputs, declared)
    assert isinstance(expected, RowWise)
    return inputs, expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [BlockKernel, ScaledFirst], ids=lambda kernel: kernel.__name__)
def test_no_honest_order_of_a_block_scaled_contraction_is_rejected(kernel, seed):
    inputs, expected = block_problem(seed=seed)
    for order in ORDERS:
        assert judge("rows", expected, kernel(order)(inputs)) is None


@pytest.mark.parametrize("bug", BLOCK_BUGS, ids=lambda bug: bug.__name__)
def test_every_bug_of_a_block_scaled_contraction_is_caught(bug):
    inputs, expected = block_problem()
    assert judge("rows", expected, bug()(inputs)) is not None


@pytest.mark.parametrize("bug", BLOCK_BUGS, ids=lambda bug: bug.__name__)
def test_wrong_scales_are_caught_also_where_a_low_accumulator_is_declared(bug):
    inputs, expected = block_problem(Hopper)
    # NeverPromoted loses too little at 480 terms
    assert (judge("rows", expected, bug()(inputs)) is None) == (bug is NeverPromoted)


def test_sums_of_14_bits_are_right_where_they_are_declared_and_wrong_where_not():
    for width in (480, LONG):
        inputs, expected = block_problem(Hopper, width=width)
        assert judge("rows", expected, Hopper()(inputs)) is None
        assert judge("rows", expected, BlockKernel()(inputs)) is None  # better than declared
    inputs, expected = block_problem()
    assert judge("rows", expected, Hopper()(inputs)) is not None


def test_sums_of_14_bits_that_are_never_promoted_are_caught_in_long_contractions():
    for declared in (BlockKernel, Hopper):
        inputs, expected = block_problem(declared, width=LONG)
        assert judge("rows", expected, NeverPromoted()(inputs)) is not None


@pytest.mark.parametrize("saturate", [True, False])
def test_the_amax_of_the_step_before_is_caught_in_the_product(saturate):
    inputs, expected = block_problem()
    finding = judge("rows", expected, StaleAmax(activations(0), saturate)(inputs))
    assert finding is not None
    assert saturate or "is nan" in finding.message


# ---- products by recipes


@cache
def recipe_problem(scaling: str, gemm: str, regime: str) -> Product:
    return product(scaling, gemm, regime)


@cache
def recipe_table(regime: str) -> dict[str, set[int]]:
    """The bugs caught per policy, including ours, by number."""
    caught: dict[str, set[int]] = {name: set() for name in ("ours", *POLICIES)}
    for number, (scaling, gemm, _, kernel) in enumerate(RECIPE_BUGS):
        target = recipe_problem(scaling, gemm, regime)
        y = target.by(kernel)
        rejecting = {
            name
            for name, accepts in POLICIES.items()
            if not accepts(y.double(), target.expected.value, target.expected.reference.double())
        }
        for name in rejecting | ({"ours"} if judge("y", target.expected, y) else set()):
            caught[name].add(number)
    return caught


@pytest.mark.parametrize("regime", REGIMES)
def test_every_bug_of_a_product_by_a_recipe_is_caught_at_every_scale(regime):
    missed = set(range(len(RECIPE_BUGS))) - recipe_table(regime)["ours"]
    assert [RECIPE_BUGS[number][:3] for number in missed] == []


def test_no_policy_of_others_catches_all_bugs_of_products_by_recipes_without_rejecting_the_honest():
    for name, accepts in POLICIES.items():
        honest = all(
            accepts(target.by(kernel).double(), target.expected.value, target.expected.reference.double())
            for regime in REGIMES
            for target in (recipe_problem(scaling, gemm, regime) for scaling in SCALINGS for gemm in PRODUCTS)
            for kernel in HONEST.values()
        )
        assert not honest or any(len(recipe_table(regime)[name]) < len(RECIPE_BUGS) for regime in REGIMES), name


@pytest.mark.parametrize("gemm", PRODUCTS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("regime", REGIMES)
def test_no_honest_product_by_a_recipe_is_rejected(regime, scaling, gemm):
    target = recipe_problem(scaling, gemm, regime)
    assert {name: judge("y", target.expected, target.by(kernel)) for name, kernel in HONEST.items()} == dict.fromkeys(
        HONEST
    )
    for name in declaring(scaling, gemm):
        kernel, declared = DECLARING[name]
        expected = product(scaling, gemm, regime, declared=declared).expected
        assert judge("y", expected, target.by(kernel)) is None, name


# ---- the codes and scales themselves


def codes_of(x: torch.Tensor, window: float = DIVISION) -> Codes:
    """The nearest codes of x / stored scale, in float64."""
    exact = x.double() / spread_out(quantised(x, 1)[1].double(), 1, x.shape)
    nearest = exact.clamp(-448, 448).to(torch.float8_e4m3fn)
    return Codes(nearest, scaled=exact, table=code_values(torch.float8_e4m3fn), window=window)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_made_by_division_or_by_a_reciprocal_are_accepted(seed):
    x = activations(seed, rows=1024)
    assert judge("codes", codes_of(x), quantised(x, 1)[0]) is None
    assert judge("codes", codes_of(x, RECIPROCAL), quantised(x, 1, reciprocal=True)[0]) is None


def test_codes_and_scales_of_a_stale_amax_are_rejected():
    x = activations(0)
    codes, scale = quantised(x, 1, largest(x, 1) / 1.5)
    assert judge("codes", codes_of(x, RECIPROCAL), codes).check == "code"
    assert judge("scales", nearly(quantised(x, 1)[1], 5), scale).check == "bound"


def test_a_cast_that_overflows_to_nan_is_rejected():
    x = activations(0)
    right = codes_of(x)
    overflowed = quantised(x, 1, largest(x, 1) / 1.5, saturate=False)[0]
    only_nan = torch.where(
        overflowed.float().isnan(), overflowed.view(torch.uint8), right.value.view(torch.uint8)
    ).view(torch.float8_e4m3fn)
    finding = judge("codes", right, only_nan)
    assert finding.check == "code"
    assert "0x7f (nan)" in finding.message


def test_the_amax_of_the_neighbouring_block_is_rejected():
    x = activations(0)
    codes, scale = quantised(x, 1, largest(x, 1).roll(1, 1))
    assert x.shape[1] > BLOCK
    assert judge("codes", codes_of(x, RECIPROCAL), codes) is not None
    assert judge("scales", nearly(quantised(x, 1)[1], 5), scale) is not None
