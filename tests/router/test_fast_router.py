"""The router in `moe_fast` equals the reference's: choices exactly, numbers to the last bits, and no memory left unwritten.

Logits and probs are multiples of a power of two from a short list, so that ties are many and all others are far apart.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from conformance.core.tensors import laid_out
from moe_fast.launch import tuning

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
EMPTY = torch.empty
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
SHAPES = [
    (1, 1, 1, None),
    (9, 12, 12, None),
    (40, 33, 7, None),
    (21, 64, 8, (8, 4)),
    (17, 20, 4, (5, 2)),
    (13, 36, 6, (3, 2)),
    (7, 9, 3, (9, 3)),
]  # T, E, K, groups
FAR = 2**31 + 4096  # elements: past every 32-bit offset
SMALL = {
    "topk": tuning.Router(2, 64, 4),
    "topk_backward": tuning.Router(2, 64, 4),
    "aux_scores": tuning.Router(2, 64, 4),
    "z_loss": tuning.Router(2, 64, 4, max_programs=3),
    "balance": tuning.Tile(4, 4, 4),
    "balance_programs": 7,
    "loss_step": 2,
    "drop": tuning.Tile(8, 4, 4),
    "drop_column": tuning.Tile(16, 2, 4),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is full of ones: NaN in every float, -1 in every integer."""

    def poisoned(*arguments, **settings):
        fresh = EMPTY(*arguments, **settings)
        if fresh.untyped_storage().nbytes() < 2**24:
            fresh.untyped_storage().fill_(0xFF)
        return fresh

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, **SMALL))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def steps(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, least: int = -40, most: int = 40) -> Tensor:
    return (torch.randint(least, most + 1, shape, generator=generator(seed)) / 8).to(dtype)


def noise(like: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(like.shape, generator=generator(seed), dtype=torch.float64).to(like.dtype)


def assert_near(got: Tensor, right: Tensor) -> None:
    """Within the rounding of the dtype, and of float32, of the largest number there is."""
    assert (got.dtype, got.shape) == (right.dtype, right.shape)
    # why: one rounding to the result's dtype, and a few in the accumulator; the suite itself judges by derived bounds
    roundoff = (
        torch.finfo(got.dtype).eps
        + 8 * (0 if got.dtype == torch.float64 else torch.finfo(torch.float32).eps)
        + 8 * torch.finfo(torch.float64).eps
    )
    bound = roundoff * max(1.0, right.double().abs().amax().item() if right.numel() else 0.0)
    assert torch.allclose(got.double(), right.double(), rtol=0, atol=bound, equal_nan=True), (
        got.double() - right.double()
    ).abs().max() / bound


def settings_of(score: tuple[str, bool], num_experts: int, topk: int, groups: tuple[int, int] | None = None, **more):
    settings = {"topk": topk, "score_function": score[0], "pre_softmax": score[1], **more}
    if groups:
        settings |= {"num_groups": groups[0], "group_topk": groups[1]}
    if score[0] != "softmax":
        settings["expert_bias"] = steps(num_experts, seed=7, least=-3, most=3)
    return settings


def assert_routes_alike(logits: Tensor, settings: dict, cotangent=None) -> None:
    """Compact and dense form, forward and backward."""
    for function in ("topk_indices", "topk_routing"):
        results, gradients = [], []
        for namespace in (moe_fast, moe_ref):
            x = logits.detach().requires_grad_()
            result = getattr(namespace, function)(x, **settings)
            g = noise(result[0]) if cotangent is None else cotangent(result[0])
            results.append(result)
            gradients += torch.autograd.grad(result[0], x, g)
        assert torch.equal(results[0][1], results[1][1]) and results[0][1].dtype == results[1][1].dtype
        assert_near(results[0][0], results[1][0])
        assert_near(*gradients)


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routing_equals_the_reference(score, dtype):
    for seed, (num_tokens, num_experts, topk, groups) in enumerate(SHAPES):
        logits = steps(num_tokens, num_experts, dtype=dtype, seed=seed)
        assert_routes_alike(
            logits, settings_of(score, num_experts, topk, groups, scaling_factor=None if seed % 2 else 1.1)
        )


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_routing_in_many_blocks_equals_the_reference(score, small_blocks):
    assert_routes_alike(steps(9, 33), settings_of(score, 33, 5))
    assert_routes_alike(steps(9, 32), settings_of(score, 32, 5, (4, 2)))


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_logits_without_ties_equal_the_reference(score):
    logits = torch.stack([torch.randperm(48, generator=generator(row)) for row in range(20)]) / 8.0 - 3
    assert_routes_alike(logits, settings_of(score, 48, 6))


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_experts_without_groups_and_in_one_group_are_chosen_alike(score):
    logits = steps(6, 10)
    alone, grouped = (moe_fast.topk_routing(logits, **settings_of(score, 10, 3, groups)) for groups in (None, (1, 1)))
    assert torch.equal(alone.probs, grouped.probs)


def test_of_equal_logits_the_lower_experts_are_chosen_and_minus_zero_is_zero():
    zeros = torch.zeros(3, 6)
    zeros[1, ::2] = -0.0
    for dtype in DTYPES:
        assert moe_fast.topk_indices(zeros.to(dtype), topk=3).indices.tolist() == [[0, 1, 2]] * 3
        assert moe_fast.topk_indices(zeros.to(dtype), topk=6).indices.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert moe_fast.topk_indices(zeros[:, :2], topk=2).indices.tolist() == [[0, 1]] * 3


def test_slots_are_in_descending_order_of_key():
    assert moe_fast.topk_indices(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), topk=3).indices.tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_negative_logits_equal_the_reference(score):
    assert_routes_alike(steps(9, 20, least=-80, most=-20), settings_of(score, 20, 4))


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_stay_numbers(score, dtype):
    most = torch.finfo(dtype).max
    logits = torch.tensor(
        [[most, -most, 0, 1, -1, most], [-most] * 5 + [-30], [most, most, most, -most, 200, -200]], dtype=torch.float64
    ).to(dtype)
    settings = {"topk": 4, "score_function": score[0], "pre_softmax": score[1]}
    fast, slow = (namespace.topk_indices(logits, **settings) for namespace in (moe_fast, moe_ref))
    assert torch.equal(fast.indices, slow.indices)
    assert_near(fast.probs, slow.probs)
    x = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(moe_fast.topk_routing(x, **settings).probs.sum(), x)
    assert gradient.isfinite().all()


def test_the_root_of_a_tiny_softplus_is_that_of_the_exponential():
    logits = torch.tensor([[-60.0], [-87.5], [-100.0], [-160.0]], requires_grad=True)
    probs = moe_fast.topk_indices(logits, topk=1, score_function="sqrtsoftplus").probs
    (gradient,) = torch.autograd.grad(probs.sum(), logits)
    right = (logits.detach().double() / 2).exp()
    # why: exp multiplies the half unit of its argument's rounding by the argument, up to 160
    assert torch.allclose(probs.double(), right, rtol=torch.finfo(torch.float32).eps * 200, atol=0)
    assert torch.allclose(gradient.double(), right / 2, rtol=torch.finfo(torch.float32).eps * 200, atol=0)


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("groups", [None, (3, 2)], ids=str)
def test_minus_infinity_is_chosen_last_and_every_expert_once(score, groups):
    logits = steps(5, 12)
    logits[0, 3:] = logits[1, :10] = logits[2] = logits[3, ::2] = -torch.inf
    settings = settings_of(score, 12, 6, groups) | {"expert_bias": None}
    fast, slow = (namespace.topk_indices(logits, **settings) for namespace in (moe_fast, moe_ref))
    assert torch.equal(fast.indices, slow.indices)
    rows = [0, 1, 3, 4] if score[0] == "softmax" else [0, 1, 2, 3, 4]
    assert_near(fast.probs[rows], slow.probs[rows])


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("groups", [None, (3, 2)], ids=str)
def test_a_row_of_nan_or_infinity_chooses_different_experts_and_others_do_not_notice(score, groups):
    logits = steps(6, 12)
    settings = settings_of(score, 12, 6, groups)
    clean = moe_fast.topk_indices(logits, **settings)
    spoilt = logits.clone()
    spoilt[0] = torch.nan
    spoilt[1, 2:9] = -torch.tensor(torch.nan)
    spoilt[2] = torch.full((12,), -1, dtype=torch.int32).view(torch.float32)
    spoilt[3, :8] = torch.inf
    got = moe_fast.topk_indices(spoilt, **settings)
    assert all(len(set(row)) == 6 and set(row) <= set(range(12)) for row in got.indices.tolist())
    assert torch.equal(got.indices[4:], clean.indices[4:]) and torch.equal(got.probs[4:], clean.probs[4:])


def test_a_group_of_equal_experts_counts_no_more_of_them_than_there_are_slots():
    logits = torch.tensor([[-1.0] * 4 + [2.0] * 4])
    assert moe_fast.topk_indices(logits, topk=4, num_groups=2, group_topk=1).indices.tolist() == [[4, 5, 6, 7]]
    assert moe_fast.topk_indices(logits[:, 2:6], topk=3, num_groups=2, group_topk=2).indices.tolist() == [[2, 3, 0]]
    assert moe_fast.topk_indices(
        torch.tensor([[4.0, 4, 4, 0, 5, 5, 1, 0]]), topk=3, num_groups=2, group_topk=1
    ).indices.tolist() == [[0, 1, 2]]


def test_groups_of_equal_sums_are_kept_from_the_lowest_on():
    logits = torch.tensor([[0.0, 3, 2, 1, 3, 0, 1.5, 1.5]])
    assert moe_fast.topk_indices(logits, topk=4, num_groups=4, group_topk=2).indices.tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_given_indices_are_used_in_their_order(score, dtype):
    given = torch.stack([torch.randperm(20, generator=generator(row))[:5] for row in range(9)])
    for indices in (given, laid_out(given.int(), "strided")):
        assert_routes_alike(
            steps(9, 20, dtype=dtype),
            settings_of(score, 20, 5, (4, 2), precomputed_indices=indices, scaling_factor=3.0),
        )


@pytest.mark.parametrize("layout", ["transposed", "strided", "shifted", "expanded"])
@pytest.mark.parametrize("score", SCORES[1:3], ids=str)
def test_logits_bias_and_cotangents_of_any_stride_are_routed_alike(layout, score):
    settings = settings_of(score, 20, 4)
    if score[0] == "sigmoid":
        settings["expert_bias"] = steps(20, 3, seed=5).T[1]
    assert_routes_alike(laid_out(steps(9, 20), layout), settings, lambda like: laid_out(noise(like), layout))


@pytest.mark.parametrize("layout", ["wide_rows", "wide_columns"])
def test_rows_and_columns_far_apart_are_read(layout):
    logits, settings = steps(3, 4), settings_of(SCORES[2], 4, 2)
    assert_routes_alike(laid_out(logits, layout), settings, lambda like: laid_out(noise(like), layout))
    given = laid_out(torch.tensor([[0, 1, 3], [3, 1, 2], [2, 0, 1]]), layout)
    assert_routes_alike(
        logits, settings | {"topk": 3, "precomputed_indices": given}, lambda like: laid_out(noise(like), layout)
    )
    far_logits = laid_out(logits, layout)
    padding = EMPTY(FAR, dtype=torch.bool)[:: (FAR - 1) // 2].copy_(torch.tensor([False, True, False]))
    for fast, slow in zip(
        aux(moe_fast, far_logits, 2, "softmax", padding), aux(moe_ref, logits, 2, "softmax", padding), strict=True
    ):
        assert_near(fast.float(), slow.float())
    for fast, slow in zip(z(moe_fast, far_logits, padding), z(moe_ref, logits, padding), strict=True):
        assert_near(fast, slow)
    routed = logits > 0
    assert_drops_alike(laid_out(logits, layout), laid_out(routed, layout), capacity=1)


def test_a_bias_has_no_gradient_and_no_influence_on_weights():
    logits, bias = steps(4, 8).requires_grad_(), steps(8, seed=1).requires_grad_()
    chosen = moe_fast.topk_indices(logits, topk=2, score_function="sigmoid", expert_bias=bias)
    assert torch.autograd.grad(chosen.probs.sum(), [logits, bias], allow_unused=True)[1] is None
    score = logits.detach().sigmoid().gather(1, chosen.indices)
    assert_near(chosen.probs.detach(), score / score.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_any_dtype_counts(dtype):
    settings = {"topk": 3, "score_function": "sigmoid", "expert_bias": steps(12, seed=2, least=-4, most=4).to(dtype)}
    for logits in (steps(8, 12), steps(8, 12, dtype=torch.float64)):
        assert_routes_alike(logits, settings)


def aux(
    namespace, logits: Tensor, topk: int, score: str, padding: Tensor | None, layout: str = "contiguous"
) -> list[Tensor]:
    x = logits.detach().requires_grad_()
    result = namespace.aux_loss_scores(x, topk=topk, score_function=score, padding_mask=padding)
    gradient = torch.autograd.grad(result.scores, x, laid_out(noise(result.scores), layout))
    return [result.scores.detach(), result.routing_map, *gradient]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_for_the_losses_equal_the_reference(score, dtype):
    for num_tokens, num_experts, topk in [(1, 1, 1), (20, 12, 12), (9, 33, 1)]:
        logits = steps(num_tokens, num_experts, dtype=dtype)
        for padding in (
            None,
            torch.rand(num_tokens, generator=generator()) < 0.3,
            (torch.arange(2 * num_tokens) % 3)[::2].int(),
        ):
            (scores, chosen, gradient), right = (
                aux(namespace, logits, topk, score, padding, "strided") for namespace in (moe_fast, moe_ref)
            )
            assert_near(scores, right[0])
            assert torch.equal(chosen, right[1])
            assert_near(gradient, right[2])


def test_scores_in_many_blocks_and_of_padding_are_right(small_blocks):
    logits = steps(9, 33)
    logits[2] = -torch.inf
    logits[4] = torch.nan
    padding = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    scores, chosen, gradient = aux(moe_fast, logits, 4, "softmax", padding)
    right = aux(moe_ref, logits[~padding], 4, "softmax", None)
    assert (
        torch.equal(scores[padding], torch.zeros(3, 33))
        and not chosen[padding].any()
        and torch.equal(gradient[padding], torch.zeros(3, 33))
    )
    assert_near(scores[~padding], right[0])
    assert torch.equal(chosen[~padding], right[1])


def balance(namespace, scores: Tensor, counts: Tensor, total, num_experts: int) -> list[Tensor]:
    x = scores.detach().requires_grad_()
    loss = namespace.load_balancing_loss(x, counts, total_num_tokens=total, topk=3, num_experts=num_experts, coeff=0.1)
    return [loss.detach(), *torch.autograd.grad(loss * 3, x)]


TOTALS = [77, 0, torch.tensor(40), torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([[0]])]


@pytest.mark.parametrize(
    ("dtype", "total"),
    [*zip(DTYPES, TOTALS, strict=False), (torch.float64, TOTALS[2]), (torch.float32, TOTALS[4])],
    ids=str,
)
def test_the_balancing_loss_equals_the_reference(dtype, total, small_blocks):
    for rows, columns in [(0, 4), (37, 12)]:
        scores = laid_out(steps(rows, columns, dtype=dtype, least=0), "transposed")
        for counts in (
            torch.randint(0, 50, (columns, 2), generator=generator())[:, 1],
            torch.rand(columns, generator=generator()).to(dtype),
        ):
            for fast, slow in zip(
                balance(moe_fast, scores, counts, total, 4), balance(moe_ref, scores, counts, total, 4), strict=True
            ):
                assert_near(fast, slow)


def test_uniform_routing_has_a_balancing_loss_of_its_coefficient():
    scores, counts = torch.full((64, 8), 1 / 8), torch.full((8,), 24)
    assert_near(
        moe_fast.load_balancing_loss(scores, counts, total_num_tokens=64, topk=3, num_experts=8, coeff=0.5),
        torch.tensor(0.5),
    )


def z(namespace, logits: Tensor, padding: Tensor | None) -> list[Tensor]:
    x = logits.detach().requires_grad_()
    loss = namespace.z_loss(x, coeff=0.1, padding_mask=padding)
    return [loss.detach(), *torch.autograd.grad(loss * 3, x)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", ["default", "small"])
def test_the_z_loss_equals_the_reference(dtype, blocks, request):
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    for num_tokens, num_experts in [(0, 4), (1, 1), (9, 33)]:
        logits = laid_out(steps(num_tokens, num_experts, dtype=dtype, seed=num_tokens), "transposed")
        logits[1:2, 3:] = -torch.inf
        for padding in (
            None,
            torch.rand(num_tokens, generator=generator()) < 0.3,
            torch.ones(num_tokens, dtype=torch.int64),
        ):
            for fast, slow in zip(z(moe_fast, logits, padding), z(moe_ref, logits, padding), strict=True):
                assert_near(fast, slow)


def test_a_row_of_nothing_but_minus_infinity_has_an_infinite_z_loss():
    assert moe_fast.z_loss(torch.full((1, 3), -torch.inf), coeff=0.5) == torch.inf


def test_padding_never_reaches_the_z_loss():
    logits = steps(5, 8)
    logits[2] = torch.nan
    padding = torch.tensor([0, 0, 1, 0, 0])
    loss, gradient = z(moe_fast, logits, padding)
    right = z(moe_ref, logits[padding == 0], None)
    assert_near(loss, right[0])
    assert torch.equal(gradient[2], torch.zeros(8))


def assert_drops_alike(probs: Tensor, routing_map: Tensor, cotangent=noise, **settings) -> None:
    results = []
    for namespace in (moe_fast, moe_ref):
        x = probs.detach().requires_grad_(probs.dtype.itemsize > 1)
        result = namespace.drop_tokens(x, routing_map, **settings)
        results.append(
            [
                result.probs.detach(),
                result.routing_map,
                *(torch.autograd.grad(result.probs, x, cotangent(x)) if x.requires_grad else ()),
            ]
        )
    for fast, slow in zip(*results, strict=True):
        assert fast.dtype == slow.dtype
        assert torch.equal(fast.float(), slow.float()), settings


def odds(num_tokens: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Probs with many ties, zeros, negative ones and both zeros; NaN where nothing is routed."""
    probs = steps(num_tokens, num_experts, least=-4, most=8)
    probs[::3] *= -1
    routed = torch.rand(num_tokens, num_experts, generator=generator(5)) < 0.5
    return probs.masked_fill(~routed, torch.nan).to(dtype), routed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_drops_equal_the_reference(dtype):
    for num_tokens, num_experts in [(0, 4), (1, 1), (41, 9)]:
        probs, routed = odds(num_tokens, num_experts, dtype)
        for capacity, pad in [
            (0, False),
            (7, False),
            (num_tokens + 2, False),
            (0, True),
            (25, True),
            (num_tokens + 2, True),
        ]:
            assert_drops_alike(probs, routed, capacity=capacity, pad_to_capacity=pad)
        assert_drops_alike(probs, routed, capacity=num_tokens // 4, drop_policy="position")
        assert_drops_alike(probs, routed, capacity=num_tokens // 2, drop_policy="position", pad_to_capacity=True)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drops_in_many_blocks_equal_the_reference(policy, pad, small_blocks):
    probs, routed = odds(35, 3, torch.bfloat16)
    assert_drops_alike(
        laid_out(probs, "transposed"),
        laid_out(routed.int(), "strided"),
        capacity=11,
        drop_policy=policy,
        pad_to_capacity=pad,
    )
    assert_drops_alike(
        probs,
        routed,
        lambda like: laid_out(noise(like), "expanded"),
        capacity=15,
        drop_policy=policy,
        pad_to_capacity=pad,
    )


def test_infinite_probs_are_dropped_in_order():
    probs = torch.tensor([[-torch.inf], [torch.inf], [0.0], [-1.0], [torch.inf]])
    kept = moe_fast.drop_tokens(probs, torch.ones(5, 1, dtype=torch.bool), capacity=3).routing_map
    assert kept.T.tolist() == [[False, True, True, False, True]]
    assert moe_fast.drop_tokens(probs, torch.ones(5, 1, dtype=torch.bool), capacity=5).routing_map.all()


def test_routed_tokens_go_before_unrouted_ones_whatever_their_probs():
    probs = torch.tensor([[0.0], [torch.nan], [-torch.inf], [-2.0]])
    strange = torch.full((4, 1), -1, dtype=torch.int32).view(torch.float32)  # a NaN of nothing but ones
    for some in (*(probs.to(dtype) for dtype in DTYPES), strange):
        kept = moe_fast.drop_tokens(
            some, torch.tensor([[0], [1], [1], [1]]), capacity=3, pad_to_capacity=True
        ).routing_map
        assert kept.T.tolist() == [[False, True, True, True]]


def test_expert_capacity_equals_the_reference():
    for case in [(31, 60, 1, 60), (31, 60, 1, 1.25), (0, 4, 2, 1.0), (100, 8, 2, 0.1), (7, 3, 2, 1.3)]:
        settings = dict(zip(("num_experts", "topk", "capacity_factor"), case[1:], strict=True))
        assert moe_fast.expert_capacity(case[0], **settings) == moe_ref.expert_capacity(case[0], **settings)


@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gate_equals_the_reference(router_dtype, with_bias):
    results = []
    for namespace in (moe_fast, moe_ref):
        inputs = [steps(5, 16, dtype=torch.bfloat16), steps(8, 16, seed=1), steps(8, dtype=torch.float16, seed=2)][
            : 2 + with_bias
        ]
        inputs = [x.requires_grad_() for x in inputs]
        logits = namespace.gate(*inputs[:2], bias=inputs[2] if with_bias else None, router_dtype=router_dtype)
        results.append([logits.detach(), *torch.autograd.grad(logits, inputs, noise(logits))])
    for fast, slow in zip(*results, strict=True):
        assert fast.dtype == slow.dtype and torch.equal(fast, slow)


def test_what_needs_no_gradient_at_the_gate_gets_none():
    x, weight = steps(5, 16).requires_grad_(), steps(8, 16)
    moe_fast.gate(x, weight, bias=steps(8)).sum().backward()
    assert torch.equal(x.grad, weight.sum(0).expand(5, 16)) and weight.grad is None


def test_jitter_draws_what_the_reference_draws():
    x = steps(4, 6)
    torch.manual_seed(0)
    fast = moe_fast.jitter(x, eps=0.25)
    torch.manual_seed(0)
    assert torch.equal(fast, moe_ref.jitter(x, eps=0.25))


def test_an_attached_loss_gets_its_scale_and_the_carrier_its_own_gradient():
    x, loss = steps(3, 4).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    out = moe_fast.attach_loss(x, loss, scale=0.5)
    dx, dloss = torch.autograd.grad(out, [x, loss], torch.full((3, 4), 7.0))
    assert torch.equal(out, x) and torch.equal(dx, torch.full((3, 4), 7.0)) and dloss == 0.5


def test_a_bias_steps_as_in_the_reference():
    bias, counts = steps(9), torch.tensor([3, 4, 5, 4, 4, 4, 0, 8, 4])
    assert torch.equal(
        moe_fast.update_expert_bias(bias, counts, update_rate=0.25),
        moe_ref.update_expert_bias(bias, counts, update_rate=0.25),
    )


def test_no_tokens_give_empty_results_and_gradients():
    for score in SCORES:
        assert_routes_alike(EMPTY(0, 8), settings_of(score, 8, 2, (4, 2)))
    for got in aux(moe_fast, EMPTY(0, 8), 2, "sigmoid", None):
        assert got.shape == (0, 8)


ILLEGAL = [
    ("topk_indices", (torch.ones(2, 4, dtype=torch.int32),), {"topk": 2}),
    ("topk_indices", (torch.ones(2, 4),), {"topk": 5}),
    ("topk_routing", (torch.ones(2, 4),), {"topk": 2, "num_groups": 3, "group_topk": 1}),
    ("topk_routing", (torch.ones(2, 4),), {"topk": 2, "expert_bias": torch.ones(4)}),
    ("topk_routing", (torch.ones(2, 4),), {"topk": 2, "scaling_factor": 0.0}),
    ("topk_routing", (torch.ones(2, 4),), {"topk": 2, "score_function": "tanh"}),
    ("topk_indices", (torch.ones(2, 4),), {"topk": 2, "precomputed_indices": torch.ones(2, 3, dtype=torch.int64)}),
    ("aux_loss_scores", (torch.ones(2, 4),), {"topk": 0}),
    ("aux_loss_scores", (torch.ones(4),), {"topk": 1}),
    ("aux_loss_scores", (torch.ones(2, 4),), {"topk": 1, "score_function": "tanh"}),
    ("aux_loss_scores", (torch.ones(2, 4),), {"topk": 1, "padding_mask": torch.ones(3)}),
    (
        "load_balancing_loss",
        (torch.ones(2, 4), torch.ones(4)),
        {"total_num_tokens": -1, "topk": 1, "num_experts": 4, "coeff": 1.0},
    ),
    ("z_loss", (torch.ones(2),), {"coeff": 1.0}),
    ("z_loss", (torch.ones(2, 4),), {"coeff": -1.0}),
    ("z_loss", (torch.ones(2, 4),), {"coeff": 1.0, "padding_mask": torch.ones(3)}),
    ("drop_tokens", (torch.ones(2, 4), torch.ones(2, 4)), {"capacity": 1}),
    ("drop_tokens", (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)), {"capacity": -1}),
    ("gate", (torch.ones(2, 4), torch.ones(3, 5)), {}),
    ("jitter", (torch.ones(2, 4),), {"eps": 1}),
    ("attach_loss", (torch.ones(2), torch.ones(())), {"scale": float("nan")}),
    ("update_expert_bias", (torch.ones(4).half(), torch.ones(4)), {"update_rate": 1}),
    ("update_expert_bias", (torch.ones(2, 2), torch.ones(2, 2)), {"update_rate": 1}),
    ("update_expert_bias", (torch.ones(4), torch.ones(5)), {"update_rate": 1}),
    ("update_expert_bias", (torch.ones(4), torch.ones(4)), {"update_rate": -1}),
    ("expert_capacity", (-1,), {"num_experts": 4, "topk": 1, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 0, "topk": 1, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 4, "topk": 0, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 4, "topk": 1, "capacity_factor": 0}),
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


def test_what_is_not_fused_is_not_supported_and_raises():
    for logits, settings, word in [
        (torch.ones(1, 2049), {"topk": 1}, "2048"),
        (torch.ones(1, 64), {"topk": 33}, "32"),
        (torch.ones(1, 4).to(torch.float8_e5m2), {"topk": 1}, "float8"),
        (
            torch.ones(1, 4),
            {"topk": 1, "score_function": "sigmoid", "expert_bias": torch.ones(4).to(torch.float8_e5m2)},
            "expert_bias",
        ),
    ]:
        assert word in moe_fast.supports("topk_indices", logits_TE=logits.to("meta"), **settings)
        for function in (moe_fast.topk_indices, moe_fast.topk_routing):
            with pytest.raises(ValueError, match=word):
                function(logits, **settings)
    assert moe_fast.supports("topk_routing", torch.ones(1, 2048), topk=32) is None
    assert (
        moe_fast.supports("load_balancing_loss", torch.ones(1, 4096), torch.ones(4096), topk=40, num_experts=4096)
        is None
    )
    for function, more in ((moe_fast.aux_loss_scores, {"topk": 1}), (moe_fast.z_loss, {"coeff": 1.0})):
        with pytest.raises(ValueError, match="2048"):
            function(torch.ones(1, 2049), **more)
    assert "float8" in moe_fast.supports("load_balancing_loss", torch.ones(1, 4).to(torch.float8_e5m2))


def test_the_widest_row_and_the_most_slots_are_routed():
    assert_routes_alike(torch.randperm(2048, generator=generator())[None] / 8.0, {"topk": 32})
