"""grouped_linear and its gradients: worked out by hand, derivatives, empty groups, tails, rounding.

`evidence.formulations.experts` has the same functions row by row, for the cases of tests/evidence.
"""

import math

import pytest
import torch
from torch import Tensor

from moe_ref.config import LinearState, Recipe
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad, linear

COUNTS = {
    "even": [2, 2, 2],
    "uneven": [1, 4, 2],
    "first empty": [0, 3, 2],
    "middle empty": [3, 0, 2],
    "last empty": [2, 3, 0],
    "two empty": [0, 0, 5],
    "one for all": [7],
    "all empty": [0, 0, 0],
    "a tail": [2, 0, 3],
}
ROWS = 7  # behind [2, 0, 3] two rows are left
each_layout = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def quarters(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Multiples of 1/4 from -2 to 2: every sum of products here is exact in float32, and rounded
    once gives one answer.
    """
    return (torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


def problem(counts: list[int], *, dtype: torch.dtype = torch.float64, rows: int = ROWS):
    """x, W, b, counts and the gradient of the output, N = 4 and M = 3."""
    x, weight = quarters(rows, 4, seed=1, dtype=dtype), quarters(len(counts), 3, 4, seed=2, dtype=dtype)
    bias, d_out = quarters(len(counts), 3, seed=3, dtype=dtype), quarters(rows, 3, seed=4, dtype=dtype)
    return x, weight, bias, torch.tensor(counts), d_out


def results(function, x, weight, bias, tokens_per_expert, d_out) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    out = function(*leaves[:2], tokens_per_expert, bias=leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


# By hand


def test_two_experts_worked_out():
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[[1.0, 0.0]], [[10.0, 100.0]]])
    counts, bias = torch.tensor([1, 2]), torch.tensor([[0.5], [-1.0]])
    assert grouped_linear(x, weight, counts).tolist() == [[1], [430], [650]]
    assert grouped_linear(x, weight, counts, bias=bias).tolist() == [[1.5], [429], [649]]
    d_out = torch.tensor([[1.0], [1.0], [2.0]])
    assert grouped_dgrad(d_out, weight, counts).tolist() == [[1, 0], [10, 100], [20, 200]]
    assert grouped_wgrad(d_out, x, counts).tolist() == [[[1, 2]], [[13, 16]]]  # 3 + 2·5, 4 + 2·6


# Derivatives


def test_gradients_of_gradients_are_its_derivatives():
    x, weight, _, tokens_per_expert, _ = problem(COUNTS["a tail"])
    leaves = [tensor.requires_grad_() for tensor in (x, weight)]
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, tokens_per_expert), leaves)


def test_linear_is_one_expert_with_all_rows():
    x, weight, bias = quarters(5, 4, seed=1), quarters(3, 4, seed=2), quarters(3, seed=3)
    assert torch.equal(linear(x, weight), x @ weight.T) and torch.equal(
        linear(x, weight, bias=bias), x @ weight.T + bias
    )
    assert linear(x[:0], weight).shape == (0, 3)


# Empty groups and tails


@each_layout
def test_an_expert_without_rows_has_a_zero_gradient(counts):
    x, weight, bias, tokens_per_expert, d_out = problem(counts)
    _, _, d_weight, d_bias = results(grouped_linear, x, weight, bias, tokens_per_expert, d_out)
    for e, count in enumerate(counts):
        assert (d_weight[e] == 0).all() == (d_bias[e] == 0).all() == (count == 0)


def test_no_rows_at_all():
    x, weight, bias, tokens_per_expert, d_out = problem([0, 0], rows=0)
    out, d_x, d_weight, d_bias = results(grouped_linear, x, weight, bias, tokens_per_expert, d_out)
    assert out.shape == (0, 3) and d_x.shape == (0, 4)
    assert torch.equal(d_weight, torch.zeros(2, 3, 4).double()) and torch.equal(d_bias, torch.zeros(2, 3).double())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
def test_rows_behind_the_last_segment_reach_nothing(counts, garbage):
    x, weight, bias, tokens_per_expert, d_out = problem(counts)
    total = sum(counts)
    clean = results(grouped_linear, x, weight, bias, tokens_per_expert, d_out)
    spoilt_x = torch.cat([x[:total], torch.full_like(x[total:], garbage)])
    spoilt_d = torch.cat([d_out[:total], torch.full_like(d_out[total:], garbage)])
    spoilt = results(grouped_linear, spoilt_x, weight, bias, tokens_per_expert, spoilt_d)
    for right, got in zip(clean, spoilt, strict=True):
        assert torch.equal(right, got)
    assert (spoilt[0][total:] == 0).all() and (spoilt[1][total:] == 0).all()


def test_nan_stays_with_its_row_and_its_expert():
    x, weight, bias, tokens_per_expert, d_out = problem([2, 3, 2])
    spoilt = torch.cat([x[:2], torch.full_like(x[:1], math.nan), x[3:]])
    out, d_x, d_weight, _ = results(grouped_linear, spoilt, weight, bias, tokens_per_expert, d_out)
    right = results(grouped_linear, x, weight, bias, tokens_per_expert, d_out)
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(out[others], right[0][others]) and out[2].isnan().all()
    assert torch.equal(d_x, right[1]) and torch.equal(d_weight[[0, 2]], right[2][[0, 2]]) and d_weight[1].isnan().any()


# Delayed and accumulated weight gradients


@each_layout
def test_weight_gradient_may_be_taken_later(counts):
    x, weight, bias, tokens_per_expert, d_out = problem(counts)
    _, d_x, d_weight, _ = results(grouped_linear, x, weight, bias, tokens_per_expert, d_out)
    alone = x.clone().requires_grad_()
    (now,) = torch.autograd.grad(grouped_linear(alone, weight, tokens_per_expert), alone, d_out)
    assert torch.equal(now, d_x) and torch.equal(grouped_wgrad(d_out, x, tokens_per_expert), d_weight)
    assert torch.equal(grouped_dgrad(d_out, weight, tokens_per_expert), d_x)


def test_accumulation_adds_to_a_copy():
    x, _, _, tokens_per_expert, d_out = problem([2, 0, 3], dtype=torch.bfloat16)
    before = quarters(3, 3, 4, seed=5, dtype=torch.float32)
    kept = before.clone()
    after = grouped_wgrad(d_out, x, tokens_per_expert, accumulate_into=before)
    assert torch.equal(before, kept) and after.dtype == torch.float32
    assert torch.equal(after, before + grouped_wgrad(d_out.float(), x.float(), tokens_per_expert))


def test_accumulation_does_not_round_the_product_to_the_dtype_of_the_rows():
    # product: 1 + 2^-6 + 2^-14
    d_out, x = torch.tensor([[1 + 2**-7]]).bfloat16(), torch.tensor([[1 + 2**-7]]).bfloat16()
    for before, dtype in ((0.0, torch.float32), (1.0, torch.float32), (1.0, torch.float64)):
        into = torch.full((1, 1, 1), before, dtype=dtype)
        assert grouped_wgrad(d_out, x, torch.tensor([1]), accumulate_into=into).item() == before + 1 + 2**-6 + 2**-14
    assert grouped_wgrad(d_out, x, torch.tensor([1])).item() == 1 + 2**-6


def test_accumulation_leaves_an_empty_expert_as_it_was():
    for kept in (-0.0, math.nan, 1.0):
        into = torch.full((2, 1, 1), kept)
        after = grouped_wgrad(torch.ones(1, 1), torch.ones(1, 1), torch.tensor([1, 0]), accumulate_into=into)
        assert torch.equal(after[1].view(torch.int32), into[1].view(torch.int32))


# Rounding


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_sums_are_taken_in_float32_and_rounded_once(dtype, large):
    terms = torch.tensor(
        [large, 1, 2**-8], dtype=dtype
    )  # a little above half way to large + 2, the next number; in `dtype` they make `large`
    ones, one = torch.ones(1, 3, dtype=dtype), torch.tensor([1])
    assert grouped_linear(terms[None], ones[None], one).item() == large + 2
    assert grouped_dgrad(terms[None], torch.ones(1, 3, 1, dtype=dtype), one).item() == large + 2
    assert grouped_wgrad(terms[:, None], ones.T, torch.tensor([3])).item() == large + 2
    bias = torch.tensor([[2**-8]], dtype=dtype)
    assert (
        grouped_linear(terms[None, :2], ones[None, :, :2], one, bias=bias).item() == large + 2
    )  # the bias has its part in the one rounding


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_gradient_of_the_bias_is_summed_in_float32(dtype, large):
    bias = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    out = grouped_linear(
        torch.zeros(9, 1, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype), torch.tensor([9]), bias=bias
    )
    (d_bias,) = torch.autograd.grad(out, bias, torch.tensor([large, *[1.0] * 8], dtype=dtype)[:, None])
    assert d_bias.dtype == dtype and d_bias.item() == large + 8
    wide = torch.zeros(1, 1, requires_grad=True)
    out = grouped_linear(
        torch.zeros(2, 1, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype), torch.tensor([2]), bias=wide
    )
    (d_wide,) = torch.autograd.grad(out, wide, torch.tensor([[large], [1.0]], dtype=dtype))
    assert (
        d_wide.dtype == torch.float32 and d_wide.item() == large + 1
    )  # not rounded to the dtype of the rows on its way


def test_sums_may_be_asked_for_in_float64():
    fine, ones, one = (
        torch.tensor([[1.0, 2.0**-30, -1.0]]),
        torch.ones(1, 1, 3),
        torch.tensor([1]),
    )  # in float32, 1 + 2^-30 = 1
    assert grouped_linear(fine, ones, one, accumulator="float64").item() == 2.0**-30
    assert grouped_dgrad(fine, ones.mT, one, accumulator="float64").item() == 2.0**-30
    assert grouped_wgrad(fine.T, ones[0].T, torch.tensor([3]), accumulator="float64").item() == 2.0**-30
    weight = torch.ones(1, 3, 1, requires_grad=True)  # three outputs: its gradient sums over them
    leaf = torch.ones(1, 1, requires_grad=True)
    out = grouped_linear(leaf, weight, one, accumulator="float64")
    (d_leaf,) = torch.autograd.grad(out, leaf, fine)
    assert out.dtype == d_leaf.dtype == torch.float32 and d_leaf.item() == 2.0**-30


def test_float64_is_never_narrowed():
    fine = torch.tensor([[1.0, 2.0**-50]], dtype=torch.float64)
    ones, one = torch.ones(1, 1, 2, dtype=torch.float64), torch.tensor([1])
    assert (
        grouped_linear(fine, ones, one).item()
        == grouped_wgrad(fine.T, torch.ones(2, 1).double(), torch.tensor([2])).item()
        == 1 + 2.0**-50
    )
    assert grouped_dgrad(fine, ones.reshape(1, 2, 1), one).item() == 1 + 2.0**-50


def test_strides_do_not_matter():
    x, weight, _, tokens_per_expert, _ = problem([2, 0, 3])
    turned = x.T.contiguous().T, weight.permute(2, 0, 1).contiguous().permute(1, 2, 0), tokens_per_expert
    assert torch.equal(grouped_linear(*turned), grouped_linear(x, weight, tokens_per_expert))
    spread = torch.ones(1, 1).double().expand(7, 3)
    assert torch.equal(
        grouped_wgrad(spread, turned[0], tokens_per_expert), grouped_wgrad(spread.contiguous(), x, tokens_per_expert)
    )


# Errors

X, W, N = torch.zeros(4, 3), torch.zeros(2, 5, 3), torch.tensor([1, 2])


@pytest.mark.parametrize(("named", "call"), [
    ("rows", lambda: grouped_linear(torch.zeros(4), W, N)),
    ("rows", lambda: grouped_linear(X.long(), W, N)),
    ("weight", lambda: grouped_linear(X, W[0], N)),
    ("weight", lambda: grouped_linear(X, W[:0], N[:0])),
    ("weight", lambda: grouped_linear(X, W.mT, N)),
    ("weight", lambda: grouped_linear(X, W.double(), N)),
    ("bias", lambda: grouped_linear(X, W, N, bias=torch.zeros(2, 3))),
    ("bias", lambda: grouped_linear(X, W, N, bias=torch.zeros(5))),
    ("tokens_per_expert", lambda: grouped_linear(X, W, torch.tensor([1, 2, 0]))),
    ("tokens_per_expert", lambda: grouped_linear(X, W, torch.tensor([1.0, 2.0]))),
    ("tokens_per_expert", lambda: grouped_linear(X, W, torch.tensor([True, True]))),
    ("tokens_per_expert", lambda: grouped_linear(X, W, torch.tensor([-1, 2]))),
    ("tokens_per_expert", lambda: grouped_linear(X, W, torch.tensor([3, 2]))),
    ("tokens_per_expert", lambda: grouped_wgrad(X, X, torch.tensor([3, 2]))),
    ("tokens_per_expert", lambda: grouped_wgrad(X, X, torch.tensor(3))),
    ("accumulator", lambda: grouped_linear(X, W, N, accumulator="bfloat16")),
    ("weight", lambda: grouped_dgrad(X, W, N)),
    ("d_out", lambda: grouped_wgrad(X[:3], X, N)),
    ("d_out", lambda: grouped_wgrad(X.double(), X, N)),
    ("accumulate_into", lambda: grouped_wgrad(torch.zeros(4, 5), X, N, accumulate_into=torch.zeros(2, 3, 5))),
    ("accumulate_into",
     lambda: grouped_wgrad(torch.zeros(4, 5), X, N, accumulate_into=torch.zeros(2, 5, 3).bfloat16())),
    ("recipe", lambda: grouped_linear(X, W, N, recipe="mxfp8")),
    ("state", lambda: grouped_linear(X, W, N, recipe=Recipe("delayed"))),
    ("state", lambda: grouped_linear(X, W, N, state=LinearState(None, None, None))),
    ("state", lambda: grouped_linear(X, W, N, recipe=Recipe("current"), state=LinearState(None, None, None))),
    ("noise", lambda: grouped_wgrad(torch.zeros(4, 5), X, N, noise=torch.zeros(2, 4, 5))),
    ("x", lambda: grouped_linear(X, W, N, recipe=Recipe("mxfp8"))),
    ("splits", lambda: grouped_linear(torch.zeros(4, 32), torch.zeros(2, 32, 32), N, recipe=Recipe("mxfp8"))),
    ("weight", lambda: linear(X, W)),
    ("weight", lambda: linear(X, W[0].T)),
    ("bias", lambda: linear(X, W[0], bias=torch.zeros(3))),
])  # fmt: skip
def test_illegal_calls_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} is "):
        call()
