"""The experts of `moe_ref`, routed and shared: worked out by hand, and ways to run them.

`evidence.formulations.experts` has the same functions row by row, for the cases of tests/evidence.
"""

import math

import pytest
import torch
from torch import Tensor

from moe_ref.experts.mlp import grouped_mlp, latent_projection, pad_segments, sequential_mlp, trim_segments
from moe_ref.experts.shared import shared_experts
from tests.judge.near import near
from tests.layer.kept import alive_bytes

WIDTH, HIDDEN, ROWS = 4, 3, 7
COUNTS = [[3, 4], [2, 0, 3], [0, 0, 5], [0, 1, 0], [0, 0]]
CALLS = [
    {},
    {"probs_on_input": True},
    {"align": 4},
    {"align": 1, "probs_on_input": True},
    {"clamp": 0.5, "offset": 1.0, "alpha": 1.702},
    {"clamp": 0.5, "interleave": 2, "align": 3},
    {"kind": "quick_geglu", "offset": 1.0},
    {"kind": "squared_relu"},
    {"kind": "relu", "align": 2},
    {"kind": "gelu", "probs_on_input": True},
]
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call.values())) or "plain")
each_layout = pytest.mark.parametrize("counts", COUNTS, ids=str)
NAMES = ("rows", "fc1_weight", "fc2_weight", "probs", "fc1_bias", "fc2_bias")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )


def tensors(
    counts: list[int], call: dict, *, dtype: torch.dtype = torch.float64, rows: int = ROWS
) -> dict[str, Tensor]:
    """One of each, in the order of NAMES."""
    experts, wide = len(counts), WIDTH if call.get("kind", "swiglu") in ("squared_relu", "relu", "gelu") else 2 * WIDTH
    shapes = (
        (rows, HIDDEN),
        (experts, wide, HIDDEN),
        (experts, HIDDEN, WIDTH),
        (rows,),
        (experts, wide),
        (experts, HIDDEN),
    )
    return {
        name: numbers(*shape, seed=seed, dtype=dtype)
        for seed, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))
    }


def call_it(function, given: dict[str, Tensor | None], counts: list[int], call: dict) -> Tensor:
    named = {name: given[name] for name in NAMES[3:] if given.get(name) is not None}
    return function(given["rows"], torch.tensor(counts), given["fc1_weight"], given["fc2_weight"], **named, **call)


def results(
    function, counts: list[int], call: dict, *, without: tuple[str, ...] = (), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Output and the gradient of everything."""
    given = {name: None if name in without else x for name, x in tensors(counts, call, dtype=dtype).items()}
    leaves = [x for x in given.values() if x is not None]
    out = call_it(function, given, counts, call)
    gradients = (
        torch.autograd.grad(out, leaves, numbers(*out.shape, seed=9, dtype=dtype), allow_unused=True)
        if out.requires_grad
        else [None] * len(leaves)
    )
    return [out, *(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, gradients, strict=True))]


# By hand


def test_one_row_worked_out():
    x, counts = torch.tensor([[math.log(3)]], dtype=torch.float64), torch.tensor([1])
    w1, w2 = torch.tensor([[[1.0], [2.0]]], dtype=torch.float64), torch.tensor([[[10.0]]], dtype=torch.float64)
    p = torch.tensor([0.5], dtype=torch.float64)
    b1, b2 = torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([[6.0]], dtype=torch.float64)
    u = math.log(3)  # σ(u) = 3/4
    assert grouped_mlp(x, counts, w1, w2).item() == pytest.approx(10 * 0.75 * u * 2 * u)
    assert grouped_mlp(x, counts, w1, w2, probs=p, fc1_bias=b1, fc2_bias=b2).item() == pytest.approx(
        10 * 0.5 * 0.75 * u * (2 * u + 1) + 0.5 * 6
    )
    on_input = grouped_mlp(2 * x, counts, w1, w2, probs=p, fc1_bias=b1, fc2_bias=b2, probs_on_input=True)
    assert on_input.item() == pytest.approx(10 * 0.75 * u * (2 * u + 1) + 6)


def test_shared_experts_worked_out():
    x = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    w1, w2, u = (
        torch.tensor([[1.0], [2.0]], dtype=torch.float64),
        torch.tensor([[10.0]], dtype=torch.float64),
        math.log(3),
    )
    assert shared_experts(x, w1, w2).flatten().tolist() == pytest.approx([15 * u * u, 0])
    assert shared_experts(x, w1, w2, gate_weight=torch.tensor([[1.0]]).double()).flatten().tolist() == pytest.approx(
        [0.75 * 15 * u * u, 0]
    )
    assert shared_experts(x, w1, w2, gate_weight=torch.tensor([[0.0]]).double())[0].item() == pytest.approx(
        0.5 * 15 * u * u
    )


@pytest.mark.parametrize(
    "call", [{}, {"clamp": 0.5, "offset": 1.0}, {"interleave": 2}, {"kind": "squared_relu"}], ids=str
)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_one_expert_with_every_token(call, gated):
    given = tensors([ROWS], call)
    x, w1, w2 = given["rows"], given["fc1_weight"], given["fc2_weight"]
    g = numbers(1, HIDDEN, seed=7) if gated else None
    out = shared_experts(x, w1[0], w2[0], gate_weight=g, **call)
    right = grouped_mlp(x, torch.tensor([ROWS]), w1, w2, **call)
    right = right if g is None else right / (1 + torch.exp(-(x * g).sum(1, keepdim=True)))
    assert near(out, right)
    leaves = [x, w1, w2, *([g] if gated else [])]
    for got, want in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(right.sum(), leaves), strict=True):
        assert near(got, want)


def test_latent_projections_go_down_and_up():
    x, down, up, bias = numbers(5, 4, seed=0), numbers(2, 4, seed=1), numbers(4, 2, seed=2), numbers(4, seed=3)
    assert torch.equal(latent_projection(latent_projection(x, down), up, bias=bias), (x @ down.T) @ up.T + bias)


# Ways to run that change nothing


@each_call
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["moe_act", "moe"])
def test_recomputation_changes_no_bit(call, dtype, recompute):
    right, got = (
        results(grouped_mlp, [2, 0, 3], call, dtype=dtype),
        results(grouped_mlp, [2, 0, 3], call | {"recompute": recompute}, dtype=dtype),
    )
    for x, y in zip(right, got, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@each_call
def test_padding_changes_nothing(call):
    for x, y in zip(
        results(grouped_mlp, [2, 0, 3], call), results(grouped_mlp, [2, 0, 3], call | {"align": 8}), strict=True
    ):
        assert near(x, y)  # a longer sum may be taken in another order


@each_call
@each_layout
def test_one_expert_after_another_changes_nothing(counts, call):
    for x, y in zip(results(grouped_mlp, counts, call), results(sequential_mlp, counts, call), strict=True):
        assert near(x, y)


def test_recomputation_keeps_fewer_bytes():
    def kept(**how) -> int:
        given = tensors([2, 0, 3], {})
        return alive_bytes(lambda: call_it(grouped_mlp, given, [2, 0, 3], how), given.values(), lambda: None)

    assert kept() > kept(recompute="moe_act") > kept(recompute="moe")


def test_shared_experts_recomputed_are_the_same():
    x, w1, w2, g = numbers(5, 3, seed=0), numbers(8, 3, seed=1), numbers(3, 4, seed=2), numbers(1, 3, seed=3)
    outputs = [shared_experts(x, w1, w2, gate_weight=g, recompute=recompute) for recompute in (False, True)]
    assert torch.equal(*outputs)
    for a, b in zip(*(torch.autograd.grad(out.sum(), [x, w1, w2, g]) for out in outputs), strict=True):
        assert torch.equal(a, b)


def test_interleaved_weights_are_another_order_of_the_same_function():
    given = tensors([2, 0, 3], {})
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])  # u_0 u_1 v_0 v_1 u_2 u_3 v_2 v_3
    turned = given | {"fc1_weight": given["fc1_weight"][:, order], "fc1_bias": given["fc1_bias"][:, order]}
    for function in (grouped_mlp, sequential_mlp):
        assert torch.equal(
            call_it(function, turned, [2, 0, 3], {"interleave": 2}), call_it(function, given, [2, 0, 3], {})
        )


# Padding and tails


def test_padding_stands_at_the_end_of_each_segment():
    x, counts = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([1, 0, 5])
    padded = pad_segments(x, counts, 4)
    assert padded.tolist() == [1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0]
    assert torch.equal(trim_segments(padded, counts, 4), x)
    assert torch.equal(pad_segments(x[:, None].expand(6, 2), counts, 4)[:, 1], padded) and pad_segments(
        x[:0], counts * 0, 4
    ).shape == (0,)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@each_call
def test_rows_behind_the_last_segment_reach_nothing(call, garbage):
    for function in (grouped_mlp, sequential_mlp):
        clean, spoilt = tensors([2, 0, 3], call), tensors([2, 0, 3], call)
        for name in ("rows", "probs"):
            spoilt[name] = (
                torch.cat([clean[name][:5], torch.full_like(clean[name][5:], garbage)]).detach().requires_grad_()
            )
        pair = []
        for given in (clean, spoilt):
            out = call_it(function, given, [2, 0, 3], call)
            d_out = torch.cat(
                [torch.ones(5, HIDDEN), torch.full((2, HIDDEN), 1.0 if given is clean else garbage)]
            ).double()
            pair.append([out, *torch.autograd.grad(out, list(given.values()), d_out)])
        for right, got in zip(*pair, strict=True):
            assert torch.equal(right, got)
        assert (pair[1][0][5:] == 0).all() and (pair[1][1][5:] == 0).all() and (pair[1][4][5:] == 0).all()


def test_experts_without_rows_have_zero_gradients():
    for function in (grouped_mlp, sequential_mlp):
        _, _, d_w1, d_w2, _, d_b1, d_b2 = results(function, [2, 0, 3], {})
        for d in (d_w1, d_w2, d_b1, d_b2):
            assert [bool((d[e] != 0).any()) for e in range(3)] == [True, False, True]


def test_no_rows_at_all_give_zero_gradients_and_not_none():
    for function in (grouped_mlp, sequential_mlp):
        given = tensors([0, 0], {}, rows=0)
        out = call_it(function, given, [0, 0], {"align": 4})
        gradients = torch.autograd.grad(out.sum(), list(given.values()))
        assert out.shape == (0, HIDDEN) and all((d == 0).all() for d in gradients)


def test_gradients_that_wait_are_those_of_the_backward_and_each_waits_once():
    counts, call = [3, 4], CALLS[0]
    given = tensors(counts, call)
    now = torch.autograd.grad(
        call_it(grouped_mlp, given, counts, call).sum(), [given["fc2_weight"], given["fc1_weight"]]
    )
    waiting: list = []
    call_it(grouped_mlp, given, counts, call | {"wgrads": waiting}).sum().backward()
    assert given["fc1_weight"].grad is None and given["fc2_weight"].grad is None and given["rows"].grad.any()
    assert all(torch.equal(wgrad(), right) for wgrad, right in zip(waiting, now, strict=True))
    with torch.no_grad():
        call_it(grouped_mlp, given, counts, call | {"wgrads": waiting})
    assert len(waiting) == 2
    with pytest.raises(ValueError, match="wgrads is tuple"):
        call_it(grouped_mlp, given, counts, call | {"wgrads": ()})
