"""The judge accepts every honest result and no other; its controls detect a judge that does not."""

import functools
import itertools
import math
import operator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.analysis.curves import halves
from conformance.judge import Bounded, Exact, controls, gives_nan, judge
from conformance.judge.bound import sum_bound
from conformance.judge.controls import BlindJudge

FLOATS = torch.tensor([[1.5, -2.0, 0.0], [3.0, math.nan, 4.0]])
TERMS, ROWS = 48, 40


def check_of(expected, observed) -> str:
    finding = judge("rows", expected, observed)
    return finding.check if finding else "right"


def payload_of_nan(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


# ---- exact


def test_the_same_bits_are_right():
    for x in (
        FLOATS,
        FLOATS.bfloat16(),
        FLOATS.to(torch.float8_e5m2),
        FLOATS > 0,
        torch.arange(4),
        torch.tensor(True),
        torch.zeros(0, 3),
    ):
        assert check_of(Exact(x), x.clone()) == "right"


def test_a_control_of_a_scalar_is_told_from_the_right_one():
    for x in (torch.tensor(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(True)):
        assert (Exact(x).moved(torch.zeros_like(x)), Exact(x).moved(x.clone())) == (True, False)
        assert controls.check("steps", Exact(x)) == 1


def test_memory_layout_and_autograd_do_not_matter():
    assert check_of(Exact(FLOATS), FLOATS.mT.contiguous().mT) == "right"
    assert check_of(Exact(FLOATS), FLOATS.clone().requires_grad_()) == "right"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64]
)
def test_one_bit_is_wrong_and_is_found(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    corrupted = x.clone()
    corrupted.view(torch.uint8)[2, x.element_size()] ^= 1
    finding = judge("rows", Exact(x), corrupted)
    assert (finding.check, finding.index) == ("exact", (2, 1))


def test_nan_payloads_differ_as_bits_and_not_as_values():
    quiet, other_payload = payload_of_nan(0x7FC00000), payload_of_nan(0x7FC00001)
    assert check_of(Exact(quiet), other_payload) == "exact"
    assert check_of(Exact(quiet, "values"), other_payload) == "right"


def test_minus_zero_differs_as_bits_and_not_as_values():
    zero = torch.zeros(2)
    assert check_of(Exact(zero), -zero) == "exact"
    assert check_of(Exact(zero, "values"), -zero) == "right"


@pytest.mark.parametrize("observed", [math.nan, math.inf, 1.0])
def test_values_that_differ_are_wrong(observed):
    assert check_of(Exact(torch.zeros(2), "values"), torch.tensor([0.0, observed])) == "exact"


@pytest.mark.parametrize("kind", ["bits", "values"])
def test_another_dtype_is_wrong(kind):
    assert check_of(Exact(torch.ones(2), kind), torch.ones(2).bfloat16()) == "dtype"
    assert check_of(Exact(torch.ones(2).bfloat16(), kind), torch.ones(2).half()) == "dtype"


def test_integers_are_equal_by_value_whatever_their_width():
    counts = torch.tensor([0, 1, 5])
    for dtype in (torch.int16, torch.int32, torch.uint8):
        assert check_of(Exact(counts, "integers"), counts.to(dtype)) == "right"
    assert check_of(Exact(counts == 1, "integers"), torch.tensor([0, 1, 0])) == "right"
    assert check_of(Exact(counts, "integers"), torch.tensor([0, 1, 4])) == "exact"
    assert check_of(Exact(counts, "integers"), counts.float()) == "dtype"


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,), (2, 3, 1), ()])
def test_another_shape_is_wrong(shape):
    assert check_of(Exact(FLOATS), torch.zeros(shape)) == "shape"
    assert (
        check_of(
            sum_bound(torch.ones(2, 3).double(), torch.ones(2, 3).double(), 2, torch.float32, torch.float32),
            torch.zeros(shape),
        )
        == "shape"
    )


def test_an_output_gives_nan_only_where_a_reference_of_the_same_shape_has_a_number():
    ones, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert gives_nan(Exact(ones), nan) and not gives_nan(Exact(nan), nan)
    assert not any(gives_nan(Exact(ones), observed) for observed in (None, ones, nan[1:], nan.repeat(2)))
    assert not gives_nan(Exact(ones.long(), "integers"), nan)


@pytest.mark.parametrize("observed", [None, 3.0, [1.0], "rows"])
def test_what_is_no_tensor_is_missing(observed):
    assert check_of(Exact(FLOATS), observed) == "missing"


def test_only_an_overflow_flag_without_overflow_may_be_missing():
    up, down = torch.tensor([False, True]), torch.tensor([False, False])
    assert check_of(Exact(down, "integers", flag=True), None) == "right"
    assert check_of(Exact(up, "integers", flag=True), None) == "missing"
    assert check_of(Exact(down, "integers"), None) == "missing"
    assert check_of(Exact(down, "integers", flag=True), up) == "exact"


def test_the_message_names_the_first_wrong_element_and_counts_them():
    corrupted = FLOATS.clone()
    corrupted[1, 0], corrupted[1, 2] = 7.0, 8.0
    message = judge("rows", Exact(FLOATS), corrupted).message
    assert "[1, 0] is 7.0; the reference has 3.0 (2 of 6 wrong)" in message


# ---- bound


def terms_of(seed: int) -> Tensor:
    """[n, rows, 4] terms of many magnitudes; half of them nearly cancel the other half."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(TERMS, ROWS, 4, generator=source) * torch.exp2(
        torch.randint(-9, 9, (TERMS, ROWS, 4), generator=source).float()
    )
    x[1::2] = -x[::2] * (1 + 0.001 * torch.randn(x[1::2].shape, generator=source))
    return x


def bound_of(terms: Tensor, dtype: torch.dtype, accumulator: torch.dtype = torch.float32) -> Bounded:
    return sum_bound(terms.double().sum(0), terms.double().abs().sum(0), len(terms), dtype, accumulator)


def added_up(terms: Tensor, order, accumulator: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The sequential sum, every partial sum rounded to the accumulator."""
    total = torch.zeros(terms.shape[1:], dtype=accumulator)
    for i in order:
        total = total + terms[i].to(accumulator)
    return total.to(dtype)


def added_pairwise(terms: Tensor, dtype: torch.dtype) -> Tensor:
    while len(terms) > 1:
        terms = torch.cat([terms[: len(terms) // 2 * 2].unflatten(0, (-1, 2)).sum(1), terms[len(terms) // 2 * 2 :]])
    return terms[0].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_order_of_an_honest_sum_is_accepted(dtype):
    for seed in range(30):
        terms = terms_of(seed)
        if dtype == torch.float16:
            terms = terms / 16  # no sum overflows
        shuffled = torch.randperm(TERMS, generator=torch.Generator().manual_seed(seed)).tolist()
        for order in (range(TERMS), reversed(range(TERMS)), shuffled):
            assert check_of(bound_of(terms, dtype), added_up(terms, order, torch.float32, dtype)) == "right"
        assert check_of(bound_of(terms, dtype), added_pairwise(terms, dtype)) == "right"


@pytest.mark.parametrize("terms", [3, 255, 256, 257, 600])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_a_declared_low_accumulator_is_accepted_for_any_number_of_terms(storage, terms):
    for seed in range(5):
        x = torch.randn(terms, 8, generator=torch.Generator().manual_seed(seed)).to(storage)
        expected = bound_of(x, storage, accumulator=storage)
        assert (expected.bound > 0).all()
        assert check_of(expected, added_up(x, range(terms), storage, storage)) == "right"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_low_accumulator_that_was_not_declared_is_rejected(low):
    for seed in range(5):
        terms = torch.randn(TERMS, ROWS, 4, generator=torch.Generator().manual_seed(seed)).to(low)
        observed = added_up(terms, range(TERMS), low, low)
        assert check_of(bound_of(terms, low), observed) == "bound"
        assert check_of(bound_of(terms, low, accumulator=low), observed) == "right"


@pytest.fixture
def expected() -> Bounded:
    return bound_of(terms_of(0), torch.bfloat16)


def honest(expected: Bounded) -> Tensor:
    return expected.value.to(expected.dtype)


@pytest.mark.parametrize("row", [0, 17, ROWS - 1])
def test_one_wrong_element_among_many_is_rejected(expected, row):
    corrupted = honest(expected)
    corrupted[row, 2] += 2 * expected.bound[row, 2] + corrupted[row, 2].abs()
    finding = judge("tokens", expected, corrupted)
    assert (finding.check, finding.index) == ("bound", (row, 2))
    assert "1 of 40 rows" in finding.message


def test_one_row_of_zeros_is_rejected(expected):
    corrupted = honest(expected)
    corrupted[11] = 0
    assert judge("tokens", expected, corrupted).index[0] == 11


def test_one_row_of_tiny_values_does_not_hide_behind_large_ones():
    terms = torch.cat([torch.full((3, 1, 4), 1e-6), torch.full((3, 999, 4), 1e6)], 1)
    corrupted = honest(bound_of(terms, torch.float32))
    corrupted[0] = 0
    assert check_of(bound_of(terms, torch.float32), corrupted) == "bound"


def test_another_dtype_of_a_sum_is_wrong(expected):
    assert check_of(expected, expected.value.float()) == "dtype"


@pytest.mark.parametrize(("expected", "got"), list(itertools.product([1.0, math.nan, math.inf, -math.inf], repeat=2)))
def test_nan_and_infinities_must_be_where_the_reference_has_them(expected, got):
    terms = torch.tensor([[[expected, 2.0]]])
    observed = torch.tensor([[got, 2.0]])
    same = expected == got or (math.isnan(expected) and math.isnan(got))
    assert check_of(bound_of(terms, torch.float32), observed) == ("right" if same else "bound")


def test_where_nothing_is_added_the_result_must_be_zero():
    nothing = sum_bound(torch.zeros(2).double(), torch.zeros(2).double(), 8, torch.float32, torch.float32)
    assert check_of(nothing, torch.tensor([0.0, -0.0])) == "right"
    smallest = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert check_of(nothing, torch.tensor([0.0, smallest])) == "bound"
    assert "where it must be exact" in judge("tokens", nothing, torch.tensor([0.0, smallest])).message


def test_float64_sums_in_two_orders_are_right_and_a_float32_sum_is_not():
    """The value is a float64 sum itself: both it and a candidate have rounded."""
    terms = torch.tensor([1.0, *[2.0**-53] * 7], dtype=torch.float64)
    # not by `sum`, which compensates its errors since Python 3.12
    forwards, backwards = (functools.reduce(operator.add, x.tolist()) for x in (terms, terms.flip(0)))
    bounded = sum_bound(torch.tensor([forwards]).double(), terms.sum()[None], 8, torch.float64, torch.float64)
    assert forwards == 1 < backwards
    assert judge("x", bounded, torch.tensor([backwards], dtype=torch.float64)) is None
    assert judge("x", bounded, torch.tensor([1 + 2.0**-30], dtype=torch.float64))


def test_a_clamp_is_not_rounded_to_the_dtype_of_h():
    h = torch.tensor([[100.0, -100.0]], dtype=torch.bfloat16)
    u, v = halves(h, {"clamp": 32.125}, torch.float32)
    assert (u.value.item(), v.value.item()) == (32.125, -32.125) and not u.error.any()


def test_more_terms_and_lower_accumulators_widen_the_bound():
    unit = torch.ones(1).double()
    accumulators, counts = (torch.float64, torch.float32, torch.float16, torch.bfloat16), (1, 2, 8, 255, 256, 300, 5000)
    bounds = torch.tensor(
        [
            [sum_bound(unit, unit, n, torch.float32, accumulator).bound.item() for n in counts]
            for accumulator in accumulators
        ]
    )
    assert (bounds.diff(dim=0) > 0).all()
    assert (bounds.diff(dim=1) >= 0).all()


# ---- controls

INDEX = torch.arange(1.0, 21.0).reshape(5, 4)
EXPECTATIONS = [
    Exact(INDEX),
    Exact(INDEX.to(torch.int64), "integers"),
    Exact(INDEX.to(torch.float8_e4m3fn)),
    bound_of(terms_of(1), torch.bfloat16),
]


@pytest.mark.parametrize("expected", EXPECTATIONS, ids=lambda x: f"{type(x).__name__}-{x.value.dtype}")
def test_the_judge_rejects_every_corruption(expected):
    assert controls.check("rows", expected) > 0


def blind_to_everything(output, expected, observed):
    return None


def blind_to_zeros(output, expected, observed):
    return judge(output, expected, observed) if observed.float().any() else None


def blind_to_single_rows(output, expected, observed):
    return judge(output, expected, observed) if (observed != expected.value).any(1).sum() > 1 else None


def blind_to_places(output, expected, observed):
    return (
        None
        if torch.equal(observed.flatten().sort().values, expected.value.flatten().sort().values)
        else judge(output, expected, observed)
    )


def blind_within_a_tenth(output, expected, observed):
    return (
        None if torch.allclose(observed, expected.value, rtol=0.1) else judge(output, expected, observed)
    )  # why: its fault is to be so generous


@pytest.mark.parametrize(
    ("blind", "accepts"),
    [
        (blind_to_everything, "all zeros"),
        (blind_to_zeros, "all zeros"),
        (blind_to_single_rows, "one row zero"),
        (blind_to_places, "swapped"),
        (blind_within_a_tenth, "5 % larger"),
    ],
)
def test_a_blind_judge_is_noticed(monkeypatch, blind, accepts):
    monkeypatch.setattr(controls, "rejection", lambda expected, corrupt: blind("rows", expected, corrupt))
    with pytest.raises(BlindJudge, match=f"rows accepts.*{accepts}"):
        controls.check("rows", Exact(INDEX))


def test_each_corruption_that_shows_is_counted():
    assert controls.check("rows", Exact(INDEX)) == 4
    assert controls.check("rows", Exact(INDEX[:1])) == 3  # no two rows to swap
    assert controls.check("rows", Exact(INDEX.to(torch.uint8))) == 3  # integers have no 5 %
    assert controls.check("rows", Exact(torch.ones(5, 4))) == 3  # all rows alike
    assert controls.check("rows", Exact(torch.tensor(True), "integers")) == 1


@pytest.mark.parametrize(
    "x",
    [torch.zeros(0, 4), torch.zeros(5, 0), torch.zeros(5, 4), torch.zeros(5, 4).bool(), torch.tensor(False)],
    ids=lambda x: str(list(x.shape)),
)
def test_outputs_of_zeros_or_no_elements_have_no_control_that_shows(x):
    assert controls.check("rows", Exact(x)) == 0


def test_no_corruption_within_the_bound_is_shown():
    hopeless = Bounded(INDEX.double(), 100 * INDEX.double(), torch.float32, torch.float32)
    assert controls.check("rows", hopeless) == 0


def test_where_a_stage_before_may_overflow_only_what_is_not_finite_is_right_as_well():
    bounded = Bounded(torch.ones(3).double(), torch.full((3,), 0.1).double(), torch.float32, torch.float32)
    spoilt = replace(bounded, spoilt=torch.tensor([True, True, False]))
    assert judge("y", spoilt, torch.tensor([torch.nan, -torch.inf, 1.0])) is None
    assert judge("y", bounded, torch.tensor([torch.nan, -torch.inf, 1.0])) is not None
    for corrupted in ([2.0, 1.0, 1.0], [1.0, 1.0, torch.inf]):
        assert judge("y", spoilt, torch.tensor(corrupted)) is not None
    assert not spoilt.moved(torch.tensor([torch.inf, 1.0, 1.0]))
    assert spoilt.moved(torch.tensor([1.0, 1.0, torch.inf]))
