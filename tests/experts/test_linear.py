"""grouped_linear and its gradients beyond values: accumulation, rounding, overrides, refusals.

`evidence.formulations.experts` has the same functions row by row, for the cases of tests/evidence;
results that were worked out by hand are golden cases of the suite. Which operand is quantised in
which direction is judged by the suite, on the reference as on honest variants: test_precision.py.
"""

import math

import pytest
import torch
from torch import Tensor

from moe_ref.config import LinearState, Recipe
from moe_ref.config.quantization import OVERRIDES
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad, linear
from moe_ref.quantization.quantize import HADAMARD_SIGNS
from tests.common.fast import normal


def quarters(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/4 from -2 to 2: every sum of products here is exact in float32, and rounded
    once gives one answer.
    """
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4


def test_gradients_of_gradients_are_its_derivatives():
    leaves = [quarters(7, 4, seed=1).double().requires_grad_(), quarters(3, 3, 4, seed=2).double().requires_grad_()]
    counts = torch.tensor([2, 0, 3])  # two rows are left behind the last segment
    assert torch.autograd.gradgradcheck(lambda x, weight: grouped_linear(x, weight, counts), leaves)


# ---- accumulated weight gradients


def test_accumulation_adds_to_a_copy():
    x, d_out, tokens_per_expert = quarters(7, 4, seed=1), quarters(7, 3, seed=4), torch.tensor([2, 0, 3])
    into = quarters(3, 3, 4, seed=5)
    copy = into.clone()
    total = grouped_wgrad(d_out.bfloat16(), x.bfloat16(), tokens_per_expert, accumulate_into=into)
    assert torch.equal(into, copy) and total.dtype == torch.float32
    assert torch.equal(total, into + grouped_wgrad(d_out, x, tokens_per_expert))


def test_accumulation_does_not_round_the_product_to_the_dtype_of_the_rows():
    # product: 1 + 2^-6 + 2^-14
    d_out, x = torch.tensor([[1 + 2**-7]]).bfloat16(), torch.tensor([[1 + 2**-7]]).bfloat16()
    for start, dtype in ((0.0, torch.float32), (1.0, torch.float32), (1.0, torch.float64)):
        into = torch.full((1, 1, 1), start, dtype=dtype)
        assert grouped_wgrad(d_out, x, torch.tensor([1]), accumulate_into=into).item() == start + 1 + 2**-6 + 2**-14
    assert grouped_wgrad(d_out, x, torch.tensor([1])).item() == 1 + 2**-6


def test_accumulation_leaves_an_empty_expert_as_it_was():
    for value in (-0.0, math.nan, 1.0):
        into = torch.full((2, 1, 1), value)
        total = grouped_wgrad(torch.ones(1, 1), torch.ones(1, 1), torch.tensor([1, 0]), accumulate_into=into)
        assert torch.equal(total[1].view(torch.int32), into[1].view(torch.int32))


# ---- rounding


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_sums_are_taken_in_float32_and_rounded_once(dtype, large):
    # a little above half way to large + 2, the next number; in `dtype` they make `large`
    terms = torch.tensor([large, 1, 2**-8], dtype=dtype)
    ones, one_row = torch.ones(1, 3, dtype=dtype), torch.tensor([1])
    assert grouped_linear(terms[None], ones[None], one_row).item() == large + 2
    assert grouped_dgrad(terms[None], torch.ones(1, 3, 1, dtype=dtype), one_row).item() == large + 2
    assert grouped_wgrad(terms[:, None], ones.T, torch.tensor([3])).item() == large + 2
    bias = torch.tensor([[2**-8]], dtype=dtype)
    # the bias has its part in the one rounding
    assert grouped_linear(terms[None, :2], ones[None, :, :2], one_row, bias=bias).item() == large + 2


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_gradient_of_the_bias_is_summed_in_float32(dtype, large):
    def d_bias(cotangent: list[float], bias_dtype: torch.dtype) -> Tensor:
        bias = torch.zeros(1, 1, dtype=bias_dtype, requires_grad=True)
        rows = torch.zeros(len(cotangent), 1, dtype=dtype)
        out = grouped_linear(rows, rows[:1, :, None], torch.tensor([len(rows)]), bias=bias)
        return torch.autograd.grad(out, bias, torch.tensor(cotangent, dtype=dtype)[:, None])[0]

    low, high = d_bias([large, *[1.0] * 8], dtype), d_bias([large, 1.0], torch.float32)
    assert low.dtype == dtype and low.item() == large + 8
    assert high.dtype == torch.float32 and high.item() == large + 1  # not rounded to the dtype of the rows on its way


def test_sums_may_be_asked_for_in_float64():
    fine, ones, one_row = torch.tensor([[1.0, 2.0**-30, -1.0]]), torch.ones(1, 1, 3), torch.tensor([1])
    # in float32, 1 + 2^-30 = 1
    assert grouped_linear(fine, ones, one_row, accumulator="float64").item() == 2.0**-30
    assert grouped_dgrad(fine, ones.mT, one_row, accumulator="float64").item() == 2.0**-30
    assert grouped_wgrad(fine.T, ones[0].T, torch.tensor([3]), accumulator="float64").item() == 2.0**-30
    weight = torch.ones(1, 3, 1, requires_grad=True)  # three outputs: its gradient sums over them
    leaf = torch.ones(1, 1, requires_grad=True)
    out = grouped_linear(leaf, weight, one_row, accumulator="float64")
    (d_leaf,) = torch.autograd.grad(out, leaf, fine)
    assert out.dtype == d_leaf.dtype == torch.float32 and d_leaf.item() == 2.0**-30


def test_float64_is_never_narrowed():
    fine = torch.tensor([[1.0, 2.0**-50]], dtype=torch.float64)
    ones, one_row = torch.ones(1, 1, 2, dtype=torch.float64), torch.tensor([1])
    assert (
        grouped_linear(fine, ones, one_row).item()
        == grouped_wgrad(fine.T, torch.ones(2, 1).double(), torch.tensor([2])).item()
        == 1 + 2.0**-50
    )
    assert grouped_dgrad(fine, ones.reshape(1, 2, 1), one_row).item() == 1 + 2.0**-50


# ---- recipes whose backward is overridden, and the transform


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_backward_needs_no_noise_and_no_dtype_and_refuses_noise(override):
    recipe = Recipe("nvfp4", backward_override=override)  # transforms bf16 only; gradients by noise
    x, weight, counts = normal(32, 32), normal(1, 32, 32, seed=2), torch.tensor([32])
    leaves = [factor.clone().requires_grad_() for factor in (x, weight)]
    grouped_linear(*leaves, counts, recipe=recipe).sum().backward()
    assert grouped_dgrad(x, weight, counts, recipe=recipe).isfinite().all()
    for function, factors in ((grouped_linear, (x, weight)), (grouped_dgrad, (x, weight)), (grouped_wgrad, (x, x))):
        with pytest.raises(ValueError, match=f"^noise is given with backward_override '{override}'"):
            function(*factors, counts, recipe=recipe, noise=torch.zeros(2, 32, 32))


def test_whole_blocks_of_rows_are_asked_for_by_what_is_quantised_alone():
    x, weight, counts = normal(40, 32), normal(1, 32, 32, seed=2), torch.tensor([40])
    for override in OVERRIDES:
        grouped_dgrad(x, weight, counts, recipe=Recipe("mxfp8", backward_override=override))
    grouped_wgrad(x, x, counts, recipe=Recipe("mxfp8", backward_override="high_precision"))
    with pytest.raises(ValueError, match="multiples of 32"):
        grouped_wgrad(x, x, counts, recipe=Recipe("mxfp8", backward_override="dequantized"))


def test_hadamard_transforms_cancel_in_the_weight_gradient():
    """Walsh functions with the transform's signs: each column becomes a single 4, exact in E2M1."""
    signs = torch.tensor(HADAMARD_SIGNS)
    walsh = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    x = (signs[:, None] * walsh).bfloat16()
    noise = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
    d_weight = grouped_wgrad(x, x, torch.tensor([16]), recipe=Recipe("nvfp4"), noise=noise)
    assert torch.equal(d_weight, 16 * torch.eye(16).bfloat16()[None])


# ---- refusals

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
