"""What megatron-core does unexpectedly: precision, empty batches, translation of its words."""

import inspect

import pytest
import torch

try:
    from evidence.megatron_claims.router import moe_utils
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)


from evidence.megatron_claims.common import inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_dtypes_of_what_the_router_functions_return(dtype):
    logits, padding = torch.randn(3, 4).to(dtype), torch.tensor([True, False, False])
    accumulator = torch.promote_types(dtype, torch.float32)
    for score_function in ("softmax", "sigmoid"):
        probs, routing_map = moe_utils.topk_routing_with_score_function(
            logits, 2, score_function=score_function, scaling_factor=2.5
        )
        assert (probs.dtype, routing_map.dtype) == (dtype, torch.bool)
        aux_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score_function)
        assert (aux_map.dtype, scores.dtype) == (torch.bool, torch.float32 if score_function == "softmax" else dtype)
        assert moe_utils.switch_load_balancing_loss_func(scores, aux_map.sum(0), 3, 2, 4, 0.1).dtype == scores.dtype
    assert moe_utils.z_loss_func(logits, 0.1).dtype == dtype
    assert moe_utils.z_loss_func(logits, 0.1, padding_mask=padding).dtype == accumulator
    assert moe_utils.sinkhorn(logits).dtype == dtype
    dropped = moe_utils.apply_router_token_dropping(probs, routing_map, 2, 1.0)
    assert [value.dtype for value in dropped] == [dtype, torch.bool]
    assert (
        moe_utils.get_updated_expert_bias(torch.tensor([1, 2, 3]), torch.zeros(3, dtype=dtype), 1e-3).dtype
        == accumulator
    )


def test_low_precision_sigmoid_chooses_by_rounded_scores_and_misses_the_best():
    logits = (2 * torch.randn(2000, 256)).bfloat16()
    _, routing_map = moe_utils.topk_routing_with_score_function(logits, 8, score_function="sigmoid")
    worst_chosen = logits.masked_fill(~routing_map, inf).amin(1)
    best_left = logits.masked_fill(routing_map, -inf).amax(1)
    assert 400 < (worst_chosen < best_left).sum() < 700  # of 2000 tokens; 0 with exact scores


def test_the_sigmoid_balancing_loss_of_float16_logits_is_infinite_at_1024_tokens():
    logits = torch.zeros(1024, 4, dtype=torch.float16)
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    loss = moe_utils.switch_load_balancing_loss_func(scores, routing_map.sum(0), 1024, 2, 4, 1.0)
    assert loss == inf  # uniform scores: it is 1


@pytest.mark.parametrize("scaled", [0.0, None])
def test_a_scaling_factor_of_zero_is_none(scaled):
    logits = torch.randn(3, 4)
    assert torch.equal(
        moe_utils.topk_routing_with_score_function(logits, 2, scaling_factor=scaled)[0],
        moe_utils.topk_routing_with_score_function(logits, 2)[0],
    )


# What a translation of the package's words has to know


def test_a_factor_half_a_row_short_gives_every_capacity_and_the_plain_quotient_does_not():
    cases = [(tokens, experts, c) for tokens in range(1, 33) for experts in range(1, 33) for c in range(tokens + 1)]
    short = [moe_utils.get_capacity(t, e, (c - 0.5) * e / t) == c for t, e, c in cases]
    quotient_fits = [moe_utils.get_capacity(t, e, c * e / t) == c for t, e, c in cases]
    assert all(short) and not all(quotient_fits)


def test_dropping_reads_the_probs_of_pairs_that_are_not_routed():
    probs, routing_map = torch.tensor([[0.9], [0.5]]), torch.tensor([[False], [True]])
    assert not moe_utils.apply_router_token_dropping(probs, routing_map, 1, 0.5)[
        1
    ].any()  # the routed token gives way to one that is not
    padded, _ = moe_utils.apply_router_token_dropping(probs, routing_map, 1, 0.5, pad_to_capacity=True)
    assert torch.equal(padded, probs * torch.tensor([[1.0], [0.0]]))


def test_the_loss_scale_is_one_global_read_in_the_backward():
    scaler = moe_utils.MoEAuxLossAutoScaler
    first = torch.tensor(2.0)
    scaler.set_loss_scale(first)
    x, loss = torch.zeros(3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    out = scaler.apply(x, loss)
    scaler.set_loss_scale(torch.tensor(7.0))
    assert first == 7.0  # the first caller's own tensor
    (3 * out).sum().backward()
    assert loss.grad == 7.0 and x.grad.tolist() == [3, 3, 3]


def test_the_bias_update_wants_the_global_process_groups_and_float32_counts():
    assert "group" not in str(inspect.signature(moe_utils.get_updated_expert_bias))
    even = torch.full((7,), 2.0**24 - 3)  # exact in float32, their sum is not
    assert moe_utils.get_updated_expert_bias(even, torch.zeros(7), 1.0).any()
    moe_utils.parallel_state.destroy_model_parallel()
    try:
        with pytest.raises(AssertionError, match="not initialized"):
            moe_utils.get_updated_expert_bias(torch.ones(4), torch.zeros(4), 1.0)
    finally:
        moe_utils.parallel_state.initialize_model_parallel()


def test_sinkhorn_is_nan_from_a_logit_of_89_on():
    assert moe_utils.sinkhorn(torch.tensor([[88.0, 88.0], [0.0, 0.0]])).isfinite().all()
    assert moe_utils.sinkhorn(torch.tensor([[89.0, 89.0], [0.0, 0.0]])).isnan().any()


def test_sinkhorn_takes_as_many_rounds_as_it_likes(monkeypatch):
    rounds, mean = [], torch.mean
    monkeypatch.setattr(torch, "mean", lambda *arguments: rounds.append(1) or mean(*arguments))
    moe_utils.sinkhorn(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    rounds_of_small_logits = len(rounds)
    moe_utils.sinkhorn(torch.tensor([[20.0, 0.0], [0.0, 0.0]]))
    assert rounds_of_small_logits < 10 and len(rounds) > 20000  # each reads the device


def test_the_token_count_of_the_loss_overflows_as_an_int32_tensor():
    scores = torch.full((3, 4), 0.25)
    assert (
        moe_utils.switch_load_balancing_loss_func(
            scores, torch.ones(4), torch.tensor(2**16, dtype=torch.int32), 2, 4, 1.0
        )
        == inf
    )
    assert moe_utils.switch_load_balancing_loss_func(scores, torch.ones(4), torch.tensor([3.0]), 2, 4, 1.0).shape == (
        1,
    )
