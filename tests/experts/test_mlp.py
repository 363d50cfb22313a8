"""The experts of `moe_ref`, routed and shared: worked out by hand, written again row by row, and where they round."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_ref.config import LinearState, Recipe
from moe_ref.config.state import new_quantizer_state
from moe_ref.experts.activations import glu
from moe_ref.experts.linear import grouped_linear, linear
from moe_ref.experts.mlp import grouped_mlp, latent_projection, pad_segments, sequential_mlp, trim_segments
from moe_ref.experts.shared import shared_experts
from tests.judge.near import near

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


def squash(h: list[Tensor], *, kind="swiglu", offset=0.0, clamp=None, alpha=None, interleave=None) -> list[Tensor]:
    """The activation of one row, number by number."""
    if kind == "squared_relu":
        return [x * x if x > 0 else 0 * x for x in h]
    if kind == "relu":
        return [x if x > 0 else 0 * x for x in h]
    if kind == "gelu":
        return [x * (1 + torch.erf(x / math.sqrt(2))) / 2 for x in h]
    width, slope = len(h) // 2, alpha or {"swiglu": 1.0, "quick_geglu": 1.702}[kind]
    size = interleave or width
    out = []
    for j in range(width):
        u, v = h[j // size * 2 * size + j % size], h[j // size * 2 * size + size + j % size]
        if clamp is not None:
            u, v = (
                (u if u <= clamp else 0 * u + clamp),
                (v if abs(v) <= clamp else 0 * v + math.copysign(clamp, v.detach())),
            )
        out.append(u / (1 + torch.exp(-slope * u)) * (v + offset))
    return out


def row_by_row(
    rows,
    tokens_per_expert,
    fc1_weight,
    fc2_weight,
    *,
    probs=None,
    fc1_bias=None,
    fc2_bias=None,
    probs_on_input=False,
    align=None,
    **call,
) -> Tensor:
    """For each row: find its expert by counting, then two sums of products. Padding has no part in it."""
    owners = [e for e, count in enumerate(tokens_per_expert.tolist()) for _ in range(count)]
    out = []
    for i in range(len(rows)):
        if i >= len(owners):
            out += [torch.zeros((), dtype=rows.dtype)] * HIDDEN
            continue
        e, p = owners[i], torch.tensor(1.0) if probs is None else probs[i]
        before, after = (p, 1.0) if probs_on_input else (1.0, p)
        h = [
            (before * rows[i] * w).sum() + (0 if fc1_bias is None else fc1_bias[e, f])
            for f, w in enumerate(fc1_weight[e])
        ]
        a = [after * x for x in squash(h, **call)]
        out += [
            sum(x * w for x, w in zip(a, row, strict=True)) + (0 if fc2_bias is None else after * fc2_bias[e, k])
            for k, row in enumerate(fc2_weight[e])
        ]
    return torch.stack(out).reshape(len(rows), HIDDEN)


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


def agrees(function, counts: list[int], call: dict, **how) -> bool:
    pairs = zip(results(function, counts, call, **how), results(row_by_row, counts, call, **how), strict=True)
    return all(near(x, y) for x, y in pairs)


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


# Against a loop, and against differences


@each_layout
@each_call
@pytest.mark.parametrize("function", [grouped_mlp, sequential_mlp])
def test_experts_and_their_gradients_are_what_a_loop_over_rows_finds(function, counts, call):
    assert agrees(function, counts, call)


@pytest.mark.parametrize(
    "without",
    [("fc1_bias",), ("fc2_bias",), ("fc1_bias", "fc2_bias"), ("probs",), ("probs", "fc1_bias", "fc2_bias")],
    ids=str,
)
def test_each_optional_tensor_may_be_left_out(without):
    assert agrees(grouped_mlp, [2, 0, 3], {}, without=without) and agrees(
        sequential_mlp, [2, 0, 3], {}, without=without
    )


@each_call
def test_gradients_of_experts_are_their_derivatives(call):
    given = tensors([1, 0, 1], call, rows=3)
    assert torch.autograd.gradcheck(
        lambda *leaves: call_it(grouped_mlp, dict(zip(NAMES, leaves, strict=True)), [1, 0, 1], call),
        list(given.values()),
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
    right = row_by_row(x, torch.tensor([ROWS]), w1, w2, **call)
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


def test_recomputation_keeps_fewer_tensors():
    def kept(**how) -> int:
        count = 0

        def pack(x):
            nonlocal count
            count += 1
            return x

        given = tensors([2, 0, 3], {})
        with saved_tensors_hooks(pack, lambda x: x):
            call_it(grouped_mlp, given, [2, 0, 3], how)
        return count

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


# Rounding: 515 is half way between 514 and 516, which bfloat16 has only the latter of: 512, 516, 520


def one(value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.tensor([[value]], dtype=dtype)


def plain_mlp(x: float, w1: float, w2: float, **call) -> float:
    """relu experts of width 1 in bfloat16."""
    return grouped_mlp(one(x), torch.tensor([1]), one(w1)[None], one(w2)[None], kind="relu", **call).item()


def test_fc1_rounds_before_the_activation_is_weighted():
    assert plain_mlp(5, 103, 1, probs=torch.tensor([1.5])) == 776  # 515 → 516, · 1.5 = 774 → 776; 772.5 would be 772


def test_first_bias_is_added_before_fc1_rounds():
    assert plain_mlp(5, 103, 1, fc1_bias=one(-1)) == 512  # 514 → 512; 516 - 1 would be 516


def test_second_bias_is_added_after_fc2_rounds():
    assert plain_mlp(5, 1, 103, fc2_bias=one(-1)) == 516  # 515 → 516, and 515 again → 516; 514 would be 512


def test_second_bias_meets_the_prob_in_float32():
    assert (
        plain_mlp(0, 0, 0, fc2_bias=one(129), probs=torch.tensor([1 + 2**-8])) == 130
    )  # 129.504; in bfloat16 the prob is 1


def test_weighted_input_is_rounded():
    assert (
        plain_mlp(129, 3, 1, probs=torch.tensor([1 + 2**-8]), probs_on_input=True) == 390
    )  # 129.504 → 130; 388.5 would be 388


def test_gradient_of_the_probs_adds_activation_and_bias_before_it_is_rounded():
    probs, counts = torch.ones(1).bfloat16().requires_grad_(), torch.tensor([1])
    w1, w2 = torch.tensor([[[256.0], [1.0]]]).bfloat16(), torch.ones(1, 1, 2).bfloat16()
    out = grouped_mlp(one(1), counts, w1, w2, kind="relu", probs=probs, fc2_bias=one(261, torch.float32))
    (d_probs,) = torch.autograd.grad(out, probs, one(1))
    assert d_probs.item() == 520  # 257 + 261 = 518 → 520; 256 + 260 = 516


def test_gradient_of_the_second_bias_is_summed_before_it_is_rounded():
    bias, probs = one(0).requires_grad_(), torch.full((3,), 1 + 2**-8)
    out = grouped_mlp(
        torch.zeros(3, 1).bfloat16(),
        torch.tensor([3]),
        one(0)[None],
        one(0)[None],
        kind="relu",
        probs=probs,
        fc2_bias=bias,
    )
    (d_bias,) = torch.autograd.grad(out, bias, torch.full((3, 1), 129.0).bfloat16())
    assert d_bias.item() == 388  # 3 · 129.504 = 388.51; each rounded, 3 · 130 = 390


def test_shared_gate_is_in_the_dtype_of_x():
    x, w1, w2 = (
        torch.tensor([[1.0, 134.0]]).bfloat16(),
        torch.tensor([[0.0, 1.0]]).bfloat16(),
        torch.tensor([[0.0], [3.0]]).bfloat16(),
    )
    out = shared_experts(x, w1, w2, kind="relu", gate_weight=torch.tensor([[3.0, 0.0]]).bfloat16())
    assert out[0, 1].item() == 384  # σ(3) → 0.953125, · 402 = 383.16 → 384; not rounded, 382.93 → 382


# Recipes


def low_precision(recipe: Recipe, counts: list[int], **call):
    """Experts of 32 columns; out, and the gradients of rows, weights and probs."""
    shapes = ((sum(counts), 32), (len(counts), 64, 32), (len(counts), 32, 32), (sum(counts),))
    rows, w1, w2, probs = (numbers(*shape, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes))
    out = call.pop("function", grouped_mlp)(rows, torch.tensor(counts), w1, w2, probs=probs, recipe=recipe, **call)
    return [out, *torch.autograd.grad(out, [rows, w1, w2, probs], numbers(*out.shape, seed=9, dtype=torch.bfloat16))]


def by_parts(rows, counts, w1, w2, *, probs, recipe) -> Tensor:
    h = grouped_linear(rows, w1, counts, recipe=recipe)
    return grouped_linear(glu(h, probs=probs), w2, counts, recipe=recipe)


@pytest.mark.parametrize(
    "recipe", [Recipe("current"), Recipe("block"), Recipe("mxfp8")], ids=lambda recipe: recipe.scaling
)
def test_both_linear_layers_follow_the_recipe(recipe):
    right, plain = (low_precision(r, [32, 0, 64], function=by_parts) for r in (recipe, None))
    for x, y, z in zip(right, low_precision(recipe, [32, 0, 64]), plain, strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)


@pytest.mark.parametrize(
    "how",
    [{"recompute": "moe"}, {"recompute": "moe_act"}, {"align": 32}, {"function": sequential_mlp}],
    ids=["recomputed", "activation recomputed", "aligned", "sequential"],
)
def test_low_precision_does_not_depend_on_how_it_is_run(how):
    for x, y in zip(
        low_precision(Recipe("mxfp8"), [32, 0, 32]), low_precision(Recipe("mxfp8"), [32, 0, 32], **how), strict=True
    ):
        assert torch.equal(x, y)


def test_padding_makes_uneven_experts_legal_for_blocks_along_tokens():
    recipe, counts = Recipe("mxfp8"), [5, 0, 33]
    with pytest.raises(ValueError, match=r"^splits is "):
        low_precision(recipe, counts)
    assert [x.shape for x in low_precision(recipe, counts, align=recipe.alignment)] == [
        x.shape for x in low_precision(None, counts)
    ]


def test_each_layer_has_its_own_state():
    recipe = Recipe("delayed")
    unit = new_quantizer_state(recipe)
    plain, tight = (
        LinearState(unit, unit, unit),
        LinearState(unit._replace(scale=torch.tensor([448.0])), unit, unit),
    )  # tight: 1 is the largest input
    mlp = partial(
        grouped_mlp,
        torch.tensor([[0.5]]),
        torch.tensor([1]),
        torch.full((1, 1, 1), 4.0),
        torch.ones(1, 1, 1),
        kind="relu",
        recipe=recipe,
    )
    assert mlp(state=(plain, plain)).item() == mlp(state=(tight, plain)).item() == 2  # 0.5 fits
    assert mlp(state=(plain, tight)).item() == 1  # 2 does not
    shared = partial(
        shared_experts, torch.tensor([[0.5]]), torch.full((1, 1), 4.0), torch.ones(1, 1), kind="relu", recipe=recipe
    )
    assert shared(state=(tight, plain)).item() == 2 and shared(state=(plain, tight)).item() == 1


def test_each_layer_has_its_own_noise():
    x, w1, w2, d_out = (numbers(16, 16, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    up, down, spare = torch.full((2, 16, 16), 0.999), torch.zeros(2, 16, 16), torch.zeros(2, 3, 16)

    def gradients(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        noise = (torch.cat([first, spare], dim=1), second)  # rows behind the last segment are not read
        out = grouped_mlp(x, torch.tensor([16]), w1[None], w2[None], kind="relu", recipe=Recipe("nvfp4"), noise=noise)
        return torch.autograd.grad(out, [w1, w2], d_out)

    d_w1, d_w2 = gradients(up, up)
    other_d_w1, same_d_w2 = gradients(down, up)
    assert not torch.equal(d_w1, other_d_w1) and torch.equal(d_w2, same_d_w2)
    assert not torch.equal(d_w2, gradients(up, down)[1])


def test_shared_experts_follow_the_recipe():
    x, w1, w2 = numbers(5, 32, seed=0), numbers(64, 32, seed=1), numbers(32, 32, seed=2)
    g, recipe = numbers(1, 32, seed=3), Recipe("current")
    right = linear(glu(linear(x, w1, recipe=recipe)), w2, recipe=recipe) * torch.sigmoid(x @ g.T)
    assert near(shared_experts(x, w1, w2, gate_weight=g, recipe=recipe), right)
    assert torch.equal(latent_projection(x, w1, recipe=recipe), linear(x, w1, recipe=recipe))
    assert not torch.equal(latent_projection(x, w1, recipe=recipe), linear(x, w1))


# Twins: what `agrees` must not accept

CALL = {"clamp": 0.5, "offset": 1.0}


def without_empty(counts: Tensor) -> Tensor:
    return torch.cat([counts[counts > 0], counts[counts == 0]])


def bias_without_prob(rows, counts, w1, w2, *, probs, fc1_bias, fc2_bias, **call):
    y = grouped_mlp(rows, counts, w1, w2, probs=probs, fc1_bias=fc1_bias, **call)
    owned = torch.cat([fc2_bias[e].expand(count, -1) for e, count in enumerate(counts.tolist())])
    return y + torch.cat([owned, torch.zeros(len(rows) - len(owned), HIDDEN)])


TWINS = {
    "clamp ignored": lambda *given, clamp, **call: grouped_mlp(*given, **call),
    "offset ignored": lambda *given, offset, **call: grouped_mlp(*given, **call),
    "halves taken for blocks": lambda *given, **call: grouped_mlp(*given, interleave=2, **call),
    "value before gate": lambda x, n, w1, w2, *, fc1_bias, **call: grouped_mlp(
        x, n, w1.roll(WIDTH, 1), w2, fc1_bias=fc1_bias.roll(WIDTH, 1), **call
    ),
    "prob twice": lambda *given, probs, **call: grouped_mlp(*given, probs=probs**2, **call),
    "prob on the input as well": lambda x, *given, probs, **call: grouped_mlp(
        x * probs[:, None], *given, probs=probs, **call
    ),
    "prob on the input instead": lambda *given, **call: grouped_mlp(*given, probs_on_input=True, **call),
    "prob of the next row": lambda *given, probs, **call: grouped_mlp(*given, probs=probs.roll(1), **call),
    "second bias not scaled": bias_without_prob,
    "second bias dropped": lambda *given, fc2_bias, **call: grouped_mlp(*given, **call) + 0 * fc2_bias.sum(),
    "first bias dropped": lambda *given, fc1_bias, **call: grouped_mlp(*given, **call) + 0 * fc1_bias.sum(),
    "empty expert shifts the others": lambda x, counts, *given, **call: grouped_mlp(
        x, without_empty(counts), *given, **call
    ),
    "fc2 of another expert": lambda x, counts, w1, w2, **call: grouped_mlp(x, counts, w1, w2.roll(1, 0), **call),
    "last expert takes the tail": lambda x, counts, *given, **call: grouped_mlp(
        x, torch.tensor([2, 0, 5]), *given, **call
    ),
    "no gradient of the probs": lambda *given, probs, **call: (
        grouped_mlp(*given, probs=probs.detach(), **call) + 0 * probs.sum()
    ),
    "no gradient of fc1": lambda x, counts, w1, w2, **call: (
        grouped_mlp(x, counts, w1.detach(), w2, **call) + 0 * w1.sum()
    ),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_wrong_experts_are_noticed(twin):
    assert agrees(grouped_mlp, [2, 0, 3], CALL) and not agrees(twin, [2, 0, 3], CALL)


def test_probs_left_on_the_activation_are_noticed():
    def flag_ignored(*given, probs_on_input, **call):
        return grouped_mlp(*given, **call)

    assert not agrees(flag_ignored, [2, 0, 3], {"probs_on_input": True})


# Errors

X, N, W1, W2, P = torch.zeros(4, 3), torch.tensor([1, 2]), torch.zeros(2, 8, 3), torch.zeros(2, 3, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("fc1_weight", lambda: grouped_mlp(X, N, W1[0], W2)),
        ("fc1_weight", lambda: grouped_mlp(X, N, W1[:, :7], W2)),
        ("fc1_weight", lambda: grouped_mlp(X, N, W1.bfloat16(), W2)),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2.mT)),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2[:1])),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2, kind="relu")),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, torch.zeros(2, 5, 4))),
        ("tokens_per_expert", lambda: grouped_mlp(X, N[:1], W1, W2)),
        ("tokens_per_expert", lambda: grouped_mlp(X, N + 1, W1, W2)),
        ("tokens_per_expert", lambda: sequential_mlp(X, N[:1], W1, W2)),
        ("tokens_per_expert", lambda: sequential_mlp(X, N - 2, W1, W2)),
        ("probs", lambda: grouped_mlp(X, N, W1, W2, probs=P[:3])),
        ("probs", lambda: sequential_mlp(X, N, W1, W2, probs=torch.zeros(5))),
        ("probs_on_input", lambda: grouped_mlp(X, N, W1, W2, probs_on_input=True)),
        ("fc1_bias", lambda: grouped_mlp(X, N, W1, W2, fc1_bias=torch.zeros(2, 4))),
        ("fc2_bias", lambda: grouped_mlp(X, N, W1, W2, fc2_bias=torch.zeros(3))),
        ("kind", lambda: grouped_mlp(X, N, W1, W2, kind="swish")),
        ("clamp", lambda: grouped_mlp(X, N, W1, W2, clamp=-1.0)),
        ("clamp", lambda: sequential_mlp(X, N, W1[:, :4], W2, kind="relu", clamp=1.0)),
        ("interleave", lambda: grouped_mlp(X, N, W1, W2, interleave=3)),
        ("align", lambda: grouped_mlp(X, N, W1, W2, align=0)),
        ("recompute", lambda: grouped_mlp(X, N, W1, W2, recompute="mlp")),
        ("state", lambda: grouped_mlp(X, N, W1, W2, recipe=Recipe("delayed"), state=LinearState(None, None, None))),
        ("state", lambda: sequential_mlp(X, N, W1, W2, recipe=Recipe("delayed"), state=(None, None))),
        ("noise", lambda: sequential_mlp(X, N, W1, W2, recipe=Recipe("nvfp4"), noise=(P, P))),
        ("noise", lambda: shared_experts(X, W1[0], W2[0], noise=P)),
        ("fc1_weight", lambda: shared_experts(X, W1, W2[0])),
        ("fc2_weight", lambda: shared_experts(X, W1[0], W2[0].T)),
        ("gate_weight", lambda: shared_experts(X, W1[0], W2[0], gate_weight=torch.zeros(3))),
        ("gate_weight", lambda: shared_experts(X, W1[0], W2[0], gate_weight=torch.zeros(2, 3))),
        ("clamp", lambda: shared_experts(X, W1[0], W2[0], clamp=0.0)),
        ("weight", lambda: latent_projection(X, W2[0])),
    ],
)
def test_illegal_calls_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} is "):
        call()
