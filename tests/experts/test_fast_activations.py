"""The activations of `moe_fast` equal the reference's in float64 within the roundings that there are, and leave no memory unwritten.

Values of h are eighths, so that many lie on the clamp's bounds exactly.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from conformance.core.covering import covering
from conformance.core.tensors import laid_out
from moe_fast.launch import tuning
from moe_ref.config import GATED, PLAIN
from moe_ref.experts import activations as moe_ref

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
EMPTY = torch.empty
BF16, FP16, FP32, FP64 = DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
LAYOUTS = ("contiguous", "transposed", "strided", "shifted", "expanded")
ELEMENTWISE = {
    "dtype": DTYPES,
    "probs": (None, *DTYPES),
    "early": (False, True),
    "layout": LAYOUTS,
    "laid_out": ("h", "probs", "d_out"),
    "blocks": ("default", "small"),
    "shape": ((37, 20), (1, 12), (5, 132)),  # rows, columns of the result: beyond a block of either size
}
GLU = {
    "kind": GATED,
    "offset": (0.0, 1.0, -0.5),
    "clamp": (None, 0.75),
    "alpha": (None, 2.5),
    "interleave": (None, 1, 4),
    **ELEMENTWISE,
}
GLU_CASES = covering(GLU, lambda row: row["alpha"] is None or row["kind"] in ("swiglu", "quick_geglu"))[0]
PLAIN_CASES = covering({"kind": PLAIN, **ELEMENTWISE}, lambda row: True)[0]
SMALL = {"activation": tuning.Tile(16, 16, 4), "activation_backward": tuning.Tile(8, 32, 4)}
ROUNDINGS = 16  # that a value or a slope is made of, each of a factor that is no larger than `reach` below has it
STEEPEST = 1.13  # no slope but that of squared_relu exceeds it
GPT_OSS = {"kind": "swiglu", "alpha": 1.702, "clamp": 0.75, "offset": 1.0, "interleave": 1}  # with a narrower clamp
SETTINGS = ("offset", "clamp", "alpha", "interleave")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is full of ones: NaN in every float."""

    def poisoned(*arguments, **settings):
        fresh = EMPTY(*arguments, **settings)
        if fresh.untyped_storage().nbytes() < 2**24:
            fresh.untyped_storage().fill_(0xFF)
        return fresh

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, **SMALL))


def eighths(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return (torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


class Problem(SimpleNamespace):
    """h, probs, d_out and a call's settings."""

    @property
    def gated(self) -> bool:
        return self.kind in GATED

    @property
    def call(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in SETTINGS} if self.gated else {}
        return {"kind": self.kind, **named, "round_before_probs": self.early}

    def results(self, namespace: Any) -> list[Tensor]:
        """The result and its gradients."""
        h, probs = (x if x is None else x.detach().requires_grad_() for x in (self.h, self.probs))
        out = (namespace.glu if self.gated else namespace.activation)(h, probs=probs, **self.call)
        return [out.detach(), *torch.autograd.grad(out, [x for x in (h, probs) if x is not None], self.d_out)]


def problem_of(
    kind: str,
    *,
    shape=(9, 12),
    dtype=FP32,
    probs: torch.dtype | None = FP32,
    early=False,
    layout="contiguous",
    laid="h",
    **settings,
) -> Problem:
    rows, width = shape
    tensors = {
        "h": eighths(rows, 2 * width if kind in GATED else width, dtype=dtype),
        "probs": None if probs is None else eighths(rows, seed=1, dtype=probs),
        "d_out": eighths(rows, width, seed=2, dtype=dtype),
    }
    if tensors[laid] is not None:
        tensors[laid] = laid_out(tensors[laid], layout)
    return Problem(
        **tensors,
        kind=kind,
        early=early,
        **{name: settings.get(name, 0.0 if name == "offset" else None) for name in SETTINGS},
    )


def problem_of_row(row: dict[str, Any]) -> Problem:
    return problem_of(
        **{name: value for name, value in row.items() if name not in ("blocks", "laid_out")}, laid=row["laid_out"]
    )


def in_float64(problem: Problem) -> list[Tensor]:
    """What the reference finds without rounding to speak of."""
    wide = {
        name: None if x is None else x.double() for name in ("h", "probs", "d_out") for x in [getattr(problem, name)]
    }
    return Problem(**{**vars(problem), **wide, "early": False}).results(moe_ref)


def bounds(problem: Problem, right: list[Tensor]) -> list[Tensor]:
    """How far an honest result may be from `right`.

    |f| ≤ reach, u² of squared_relu and |u| of every other kind; |f'| ≤ steep. Each of some roundings to `unit` of the accumulator
    moves f by no more than unit · reach and f' by no more than unit · steep; a sum over F has F roundings more. With
    `round_before_probs` there is one more, of the storage. Last, the result is rounded.
    """
    h, d_out = problem.h.double(), problem.d_out.double().abs()
    p = 1.0 if problem.probs is None else problem.probs.double().abs()[:, None]
    gate, value = columns(h.shape[1], problem.interleave) if problem.gated else (list(range(h.shape[1])), None)
    u, v = h[:, gate], 1.0
    if value is not None:
        v = h[:, value]
        if problem.clamp is not None:
            u, v = u.clamp(max=problem.clamp), v.clamp(-problem.clamp, problem.clamp)
        v = (v + problem.offset).abs()
    squared = problem.kind == "squared_relu"
    reach, steep = (u * u, 2 * u.abs()) if squared else (u.abs(), STEEPEST)
    stored = unit_of(problem.h.dtype)
    exact = problem.h.dtype == FP64 or (problem.probs is not None and problem.probs.dtype == FP64)
    unit = ROUNDINGS * unit_of(FP64 if exact else FP32) + (stored if problem.early and problem.probs is not None else 0)
    d_h = torch.zeros_like(h)
    d_h[:, gate] = unit * d_out * p * steep * v
    if value is not None:
        d_h[:, value] = unit * d_out * p * reach
    before = [unit * reach * v * p, d_h]
    if problem.probs is not None:
        sums = unit + u.shape[1] * unit_of(FP64 if exact else FP32)
        before.append((sums * d_out * reach * v).sum(1))
    dtypes = [problem.h.dtype, problem.h.dtype, None if problem.probs is None else problem.probs.dtype]
    return [
        error + unit_of(dtype) * (x.abs() + error) + least_of(dtype)
        for error, x, dtype in zip(before, right, dtypes, strict=False)
    ]


def columns(width: int, interleave: int | None) -> tuple[list[int], list[int]]:
    """Those of the gates, and those of the values."""
    size = interleave or width // 2
    gate = [j for j in range(width) if j // size % 2 == 0]
    return gate, [j + size for j in gate]


def unit_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def least_of(dtype: torch.dtype) -> float:
    """Float32's smallest normal number, which may become 0 on the way; or the step between the smallest numbers of the dtype."""
    return max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps, 0 if dtype == FP64 else torch.finfo(FP32).tiny)


def agrees(namespace: Any, problem: Problem) -> bool:
    right = in_float64(problem)
    results = problem.results(namespace)
    dtypes = [problem.h.dtype] * 2 + ([] if problem.probs is None else [problem.probs.dtype])
    assert [x.dtype for x in results] == dtypes and [x.shape for x in results] == [x.shape for x in right]
    return all(
        bool(((x.double() - y).abs() <= bound).all())
        for x, y, bound in zip(results, right, bounds(problem, right), strict=True)
    )


@pytest.mark.parametrize("row", GLU_CASES, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_glu_and_its_gradients_equal_the_reference(row, request):
    if row["blocks"] == "small":
        request.getfixturevalue("small_blocks")
    assert agrees(moe_fast, problem_of_row(row))


@pytest.mark.parametrize("row", PLAIN_CASES, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_activation_and_its_gradients_equal_the_reference(row, request):
    if row["blocks"] == "small":
        request.getfixturevalue("small_blocks")
    assert agrees(moe_fast, problem_of_row(row))


def test_every_pair_of_settings_is_in_some_case():
    for axes, cases in ((GLU, GLU_CASES), ({"kind": PLAIN, **ELEMENTWISE}, PLAIN_CASES)):
        for a in axes:
            for b in axes:
                met = {(row[a], row[b]) for row in cases}
                impossible = 2 * 3 // 2 if {a, b} == {"kind", "alpha"} else 0  # kinds without an α
                assert a == b or len(met) == len(axes[a]) * len(axes[b]) - impossible, (a, b)


@pytest.mark.parametrize("kind", GATED)
def test_float64_is_never_narrowed(kind):
    """A constant in float32 would be off by a thousand times the bound."""
    assert agrees(moe_fast, problem_of(kind, dtype=FP64, probs=FP64, offset=1 / 3, clamp=math.pi))
    assert agrees(moe_fast, problem_of(kind, dtype=FP64, probs=None, offset=-1 / 3))
    if kind == "swiglu":
        assert agrees(moe_fast, problem_of(kind, dtype=FP64, alpha=1 / 3))


@pytest.mark.parametrize("layout", ["wide_rows", "wide_columns"])
@pytest.mark.parametrize("interleave", [None, 1, 2])
def test_rows_and_columns_far_apart_are_read(layout, interleave):
    for laid in ("h", "d_out", "probs"):
        problem = problem_of("swiglu", shape=(3, 4), interleave=interleave)
        right = problem.results(moe_fast)
        far = laid_out(getattr(problem, laid), layout)
        for got, want in zip(Problem(**{**vars(problem), laid: far}).results(moe_fast), right, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("interleave", [None, 2])
def test_gates_and_values_each_far_from_the_first_column_are_read(interleave):
    """Half the width of h is more than 2³¹ elements, and so is the way to the second pair of blocks."""
    near = eighths(3, 8, dtype=BF16)
    far = EMPTY(7 * (2**29 + 8) + 3, dtype=BF16).as_strided((3, 8), (1, 2**29 + 8)).copy_(near)
    assert torch.equal(moe_fast.glu(far, interleave=interleave), moe_fast.glu(near, interleave=interleave))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_numbers_make_no_nan(dtype):
    magnitude = torch.tensor([20.0, 1e3, 60000.0, torch.finfo(dtype).max], dtype=dtype)
    u = torch.cat([magnitude, -magnitude])[:, None]
    h, ones = torch.cat([u, torch.ones_like(u)], dim=1), torch.ones_like(u)
    for kind in GATED:
        for clamp in (None, 7.0):
            out, d_h = (
                moe_fast.glu(h, kind=kind, clamp=clamp),
                moe_fast.glu_backward(ones, h, kind=kind, clamp=clamp).d_h,
            )
            assert out.isfinite().all() and d_h.isfinite().all(), kind
            assert (d_h[1:4, 0] == (clamp is None)).all() and (d_h[5:, 0] == 0).all(), kind  # f is u or 0 this far out
    for kind in PLAIN:
        out, d_h = moe_fast.activation(u, kind=kind), moe_fast.activation_backward(ones, u, kind=kind).d_h
        assert not out.isnan().any() and not d_h.isnan().any() and (out[5:] == 0).all() and (d_h[5:] == 0).all(), kind
        assert kind == "squared_relu" or (out[1:4] == magnitude[1:, None]).all(), kind


def test_the_tail_of_a_negative_gate_is_that_of_the_exponential():
    u = torch.tensor([[-20.0], [-60.0], [-80.0]])
    # why: exp multiplies the half unit of its argument's rounding by the argument, up to 80
    close = {"rtol": torch.finfo(FP32).eps * 100, "atol": 0}
    torch.testing.assert_close(moe_fast.activation(u, kind="silu").double(), u.double() * u.double().exp(), **close)
    d_h = moe_fast.activation_backward(torch.ones_like(u), u, kind="silu").d_h
    torch.testing.assert_close(d_h.double(), (1 + u.double()) * u.double().exp(), **close)


def test_gradient_passes_at_the_bounds_and_not_beyond():
    above, below = math.nextafter(2.0, 3.0), math.nextafter(2.0, 1.0)
    u, v = [2.0, above, below, -9.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 2.0, above, -2.0, -above]
    d_h = moe_fast.glu_backward(torch.ones(1, 8).double(), torch.tensor([u + v], dtype=FP64), clamp=2.0).d_h
    passes = (d_h != 0).flatten().tolist()
    assert passes == [True, False, True, True, True, True, True, True, True, True, True, True, True, False, True, False]


def test_infinities_within_a_clamp_are_bounds():
    h = torch.tensor([[math.inf, -math.inf]])
    assert torch.equal(moe_fast.glu(h, clamp=3.0), moe_fast.glu(torch.tensor([[3.0, -3.0]])))
    assert moe_fast.glu_backward(torch.ones(1, 1), h, clamp=3.0).d_h.tolist() == [[0, 0]]


@pytest.mark.parametrize("clamp", [None, 2.0])
@pytest.mark.parametrize("kind", [*GATED, *PLAIN])
def test_nan_stays_a_nan_and_in_its_row(kind, clamp):
    gated = kind in GATED
    h, probs = eighths(3, 8), torch.tensor([1.0, 0.0, 2.0])  # a prob of 0 does not hide it
    spoilt = torch.cat([h[:1], torch.full((1, 8), math.nan), h[2:]])
    function, backward = (
        (moe_fast.glu, moe_fast.glu_backward) if gated else (moe_fast.activation, moe_fast.activation_backward)
    )
    call = {"kind": kind, "probs": probs} | ({"clamp": clamp} if gated else {})
    clean, got = function(h, **call), function(spoilt, **call)
    assert torch.equal(clean[[0, 2]], got[[0, 2]]) and got[1].isnan().all()
    clean, got = (backward(torch.ones(3, 4 if gated else 8), x, **call) for x in (h, spoilt))
    assert torch.equal(clean.d_h[[0, 2]], got.d_h[[0, 2]]) and torch.equal(clean.d_probs[[0, 2]], got.d_probs[[0, 2]])


def test_prob_of_zero_keeps_its_own_gradient():
    d_h, d_probs = moe_fast.glu_backward(
        torch.ones(1, 1), torch.tensor([[3.0, 2.0]]), probs=torch.zeros(1), kind="reglu"
    )
    assert d_h.tolist() == [[0, 0]] and d_probs.item() == 6


# Rounding


def test_activation_is_not_rounded_before_it_is_multiplied():
    h, probs = (
        torch.tensor([[5.0, 103.0]]).bfloat16(),
        torch.tensor([1.5]),
    )  # 515 · 1.5 = 772.5; but 515 → 516, and 516 · 1.5 = 774
    assert moe_fast.glu(h, probs=probs, kind="reglu").item() == 772
    assert moe_fast.glu(h, probs=probs, kind="reglu", round_before_probs=True).item() == 776
    assert moe_fast.glu(h, kind="reglu").item() == moe_fast.glu(h, kind="reglu", round_before_probs=True).item() == 516
    h, probs = (
        torch.tensor([[23.0]]).bfloat16(),
        torch.tensor([1.51]),
    )  # 529 · 1.51 = 798.79; but 529 → 528, and 528 · 1.51 = 797.28
    assert (
        moe_fast.activation(h, probs=probs).item() == 800
        and moe_fast.activation(h, probs=probs, round_before_probs=True).item() == 796
    )


def test_probs_are_not_rounded_to_the_dtype_of_h():
    h, probs = torch.tensor([[1.0, 129.0]]).bfloat16(), torch.tensor([1 + 2**-8])  # 129.504; the prob would round to 1
    assert moe_fast.glu(h, probs=probs, kind="reglu").item() == 130


def test_gradients_are_rounded_where_the_reference_rounds_them():
    h, probs = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.tensor([1 + 2**-8])
    g = torch.tensor([[129.0]]).bfloat16()  # g p = 129.504, · 3 = 388.51; rounded first, 130 · 3 = 390
    assert moe_fast.glu_backward(g, h, probs=probs, kind="reglu").d_h[0, 0].item() == 388
    assert moe_fast.glu_backward(g, h, probs=probs, kind="reglu", round_before_probs=True).d_h[0, 0].item() == 390
    h, g = torch.tensor([[5.0, 103.0]]).bfloat16(), torch.ones(1, 1).bfloat16()
    assert moe_fast.glu_backward(g, h, probs=probs, kind="reglu").d_probs.item() == 515
    assert moe_fast.glu_backward(g, h, probs=probs, kind="reglu", round_before_probs=True).d_probs.item() == 516


def test_gradient_of_the_probs_is_summed_in_float32(small_blocks):
    values = torch.tensor([[256.0, *[1.0] * 40]]).bfloat16()  # in bfloat16, 256 + 1 = 256
    ones, probs = torch.ones_like(values), torch.ones(1).bfloat16()
    for d_probs in (
        moe_fast.glu_backward(ones, torch.cat([ones, values], dim=1), probs=probs, kind="reglu").d_probs,
        moe_fast.activation_backward(ones, values, probs=probs, kind="relu").d_probs,
    ):
        assert d_probs.dtype == BF16 and d_probs.tolist() == [296]


# Shapes, and what is asked for


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (3, 0), (0, 0), (3, 1), (1, 1)])
@pytest.mark.parametrize("function", ["glu", "activation"])
def test_the_smallest_sizes_are_right(rows, width, function):
    kind = "swiglu" if function == "glu" else "silu"
    for probs in (None, FP32):
        problem = problem_of(kind, shape=(rows, width), probs=probs)
        assert agrees(moe_fast, problem)
        fast, slow = (
            getattr(n, f"{function}_backward")(problem.d_out, problem.h, probs=problem.probs, kind=kind)
            for n in (moe_fast, moe_ref)
        )
        assert fast.d_h.shape == slow.d_h.shape and (fast.d_probs is None) == (slow.d_probs is None)
        if width == 0 and probs:
            assert torch.equal(fast.d_probs, torch.zeros(rows))


@pytest.mark.parametrize("wanted", ["h", "probs"])
def test_a_gradient_is_the_same_when_the_other_is_not_wanted(wanted, small_blocks):
    problem = problem_of("swiglu", shape=(5, 36), clamp=0.75)
    both = moe_fast.glu_backward(problem.d_out, problem.h, probs=problem.probs, **problem.call)
    inputs = {name: getattr(problem, name).requires_grad_(name == wanted) for name in ("h", "probs")}
    out = moe_fast.glu(inputs["h"], probs=inputs["probs"], **problem.call)
    (alone,) = torch.autograd.grad(out, inputs[wanted], problem.d_out)
    assert torch.equal(alone, getattr(both, f"d_{wanted}"))


def test_backward_functions_are_the_gradients():
    for kind in (*GATED, *PLAIN):
        problem = problem_of(kind, dtype=BF16)
        backward = moe_fast.glu_backward if problem.gated else moe_fast.activation_backward
        result = backward(problem.d_out, problem.h, probs=problem.probs, **problem.call)
        for got, want in zip(problem.results(moe_fast)[1:], result, strict=True):
            assert torch.equal(got, want)


def test_two_calls_give_the_same_bits_and_inputs_stay_as_they_were(small_blocks):
    problem = problem_of("geglu", shape=(9, 40))
    before = [x.clone() for x in (problem.h, problem.probs, problem.d_out)]
    for first, second in zip(problem.results(moe_fast), problem.results(moe_fast), strict=True):
        assert torch.equal(first, second)
    assert all(torch.equal(x, y) for x, y in zip(before, (problem.h, problem.probs, problem.d_out), strict=True))


def test_interleaved_columns_change_nothing_but_their_order():
    halves = eighths(5, 48)
    for size in (1, 2, 8, 24):
        alternating = torch.empty_like(halves)
        alternating[:, columns(48, size)[0]], alternating[:, columns(48, size)[1]] = halves[:, :24], halves[:, 24:]
        assert torch.equal(moe_fast.glu(alternating, interleave=size), moe_fast.glu(halves))


# Twins: what `agrees` must not accept


def rerouted(change: Callable[..., tuple[Tensor, dict[str, Any]]]) -> SimpleNamespace:
    """moe_fast, whose glu is called with other arguments."""

    def glu(h: Tensor, **call: Any) -> Tensor:
        h, call = change(h, **call)
        return moe_fast.glu(h, **call)

    return SimpleNamespace(glu=glu)


class Spoilt(torch.autograd.Function):
    """glu whose results are changed."""

    @staticmethod
    def forward(ctx, h, probs, call, spoil):
        ctx.save_for_backward(h, probs)
        ctx.call, ctx.spoil = call, spoil
        return spoil("out", moe_fast.glu(h, probs=probs, **call))

    @staticmethod
    def backward(ctx, g):
        h, probs = ctx.saved_tensors
        d_h, d_probs = moe_fast.glu_backward(g, h, probs=probs, **ctx.call)
        return ctx.spoil("d_h", d_h), ctx.spoil("d_probs", d_probs), None, None


def spoilt(name: str, change: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    def spoil(of: str, x: Tensor) -> Tensor:
        return change(x.clone()) if of == name else x

    return SimpleNamespace(glu=lambda h, *, probs, **call: Spoilt.apply(h, probs, call, spoil))


def one_off(x: Tensor) -> Tensor:
    """The largest element in the last row, by a thousandth."""
    row = x.view(len(x), -1)[-1]
    row[row.abs().argmax()] *= 1.001
    return x


def last_column_zero(x: Tensor) -> Tensor:
    x[:, -1] = 0
    return x


TWINS = {
    "clamp ignored": rerouted(lambda h, *, clamp, **call: (h, call)),
    "offset ignored": rerouted(lambda h, *, offset, **call: (h, call)),
    "another slope of the sigmoid": rerouted(lambda h, *, alpha, **call: (h, call)),
    "halves": rerouted(lambda h, *, interleave, **call: (h, call)),
    "value before gate": rerouted(lambda h, **call: (h.view(len(h), -1, 2).flip(2).reshape(h.shape), call)),
    "prob twice": rerouted(lambda h, *, probs, **call: (h, {**call, "probs": probs * probs})),
    "rounded first": rerouted(lambda h, *, round_before_probs, **call: (h.bfloat16().float(), call)),
    "gelu for silu": rerouted(lambda h, *, kind, alpha, **call: (h, {**call, "kind": "geglu"})),
    "one element of the result": spoilt("out", one_off),
    "one element of d_h": spoilt("d_h", one_off),
    "one prob's gradient": spoilt("d_probs", one_off),
    "d_h through bfloat16": spoilt("d_h", lambda x: x.bfloat16().to(x.dtype)),
    "d_probs of the row before": spoilt("d_probs", lambda x: x.roll(1)),
    "last column forgotten": spoilt("out", last_column_zero),
    "memory left unwritten": spoilt("d_h", lambda x: torch.empty_like(x)),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_activation_is_noticed(name):
    if name == "rounded first":  # eighths below 5 are bfloat16 numbers
        problem = problem_of(**GPT_OSS)
        problem.h = problem.h * 1.001
    else:
        problem = problem_of(**GPT_OSS)
    assert agrees(moe_fast, problem) and not agrees(TWINS[name], problem)


def test_a_sum_in_bfloat16_is_noticed():
    problem = problem_of("reglu", shape=(3, 40), dtype=BF16, probs=BF16)
    right = in_float64(problem)
    u, v = problem.h.chunk(2, dim=1)
    narrow = torch.zeros(3, dtype=BF16)
    for column in (problem.d_out * torch.relu(u) * v).unbind(1):
        narrow = narrow + column
    assert ((narrow.double() - right[2]).abs() > bounds(problem, right)[2]).any()


# Errors

ILLEGAL = [
    ("glu", (torch.zeros(2, 3),), {}),
    ("glu", (torch.zeros(4),), {}),
    ("glu", (torch.zeros(2, 4, dtype=torch.int64),), {}),
    ("glu", (torch.zeros(2, 4),), {"probs": torch.zeros(3)}),
    ("glu", (torch.zeros(2, 4),), {"kind": "silu"}),
    ("glu", (torch.zeros(2, 4),), {"clamp": 0.0}),
    ("glu", (torch.zeros(2, 4),), {"offset": math.nan}),
    ("glu", (torch.zeros(2, 4),), {"kind": "geglu", "alpha": 1.0}),
    ("glu", (torch.zeros(2, 12),), {"interleave": 4}),
    ("glu", (torch.zeros(2, 4),), {"kind": "quick_geglu", "fp8_input_store": True}),
    ("glu_backward", (torch.zeros(2, 4), torch.zeros(2, 4)), {}),
    ("glu_backward", (torch.zeros(2, 2).double(), torch.zeros(2, 4)), {}),
    ("glu_backward", (torch.zeros(2, 2), torch.zeros(2, 4)), {"clamp": -1.0}),
    ("activation", (torch.zeros(2, 4).to(torch.float8_e4m3fn),), {}),
    ("activation", (torch.zeros(2, 4),), {"kind": "swiglu"}),
    ("activation", (torch.zeros(2, 4),), {"probs": torch.zeros(2, 1)}),
    ("activation_backward", (torch.zeros(2, 2), torch.zeros(2, 4)), {}),
]


@pytest.mark.parametrize(
    ("function", "arguments", "settings"), ILLEGAL, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_illegal_call_raises_what_the_reference_raises(function, arguments, settings):
    messages = []
    for namespace in (moe_fast, moe_ref):
        with pytest.raises(ValueError) as raised:
            getattr(namespace, function)(*arguments, **settings)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_probs_of_eight_bits_are_not_supported_and_raise():
    h, probs = torch.zeros(2, 4), torch.zeros(2).to(torch.float8_e5m2)
    for function, arguments in (
        ("glu", (h,)),
        ("activation", (h,)),
        ("glu_backward", (h[:, :2], h)),
        ("activation_backward", (h, h)),
    ):
        assert "float8" in moe_fast.supports(function, *arguments, probs=probs)
        assert moe_fast.supports(function, *arguments, probs=probs.float()) is None
        with pytest.raises(ValueError, match="float8"):
            getattr(moe_fast, function)(*arguments, probs=probs)
