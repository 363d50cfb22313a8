"""route: the whole router over steps, and its memory."""

import pytest
import torch
from torch.testing import assert_close

import moe_ref
from moe_ref.config import RankGroup, RouterConfig, RouterRanks
from tests.router.reference_helpers import (
    ALL,
    BIASED,
    EXPERTS,
    TOPK,
    balance_by_loop,
    config,
    losses_by_loop,
    map_by_loop,
    random,
    scores_by_loop,
    told,
)


def test_the_losses_of_a_route_are_those_of_a_loop():
    x, how = random(8, EXPERTS), config(*ALL, z_loss_coeff=0.5)
    out = moe_ref.route(x, how, state=moe_ref.new_state(how), batch_size=2)
    assert_close(told(out), losses_by_loop(x, batch=2))
    chosen = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid")
    assert torch.equal(out.probs, chosen.probs) and torch.equal(out.routing_map, chosen.routing_map)
    assert out.indices is None


def test_padding_counts_in_no_loss():
    x, padding = random(9, EXPERTS), torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 0]).bool()
    for name in ALL:
        how = config(name, z_loss_coeff=0.5)
        out = moe_ref.route(x, how, state=moe_ref.new_state(how), padding_mask=padding)
        right = losses_by_loop(x[~padding])
        assert_close(told(out), {"z_loss": right["z_loss"], name: right[name]})
    how = config("seq_aux_loss")
    of_two = moe_ref.route(x[:8], how, state=moe_ref.new_state(how), batch_size=2, padding_mask=padding[:8])
    held = [x[:8][b::2][~padding[:8][b::2]] for b in range(2)]
    length = sum(len(y) for y in held) / 2  # the average
    score, chosen = [scores_by_loop(y, "sigmoid") for y in held], [map_by_loop(y, TOPK, "sigmoid") for y in held]
    right = [
        balance_by_loop(s, [sum(row[e] for row in c) for e in range(EXPERTS)], length, TOPK, 0.5)
        for s, c in zip(score, chosen, strict=True)
    ]
    assert_close(told(of_two), {"seq_aux_loss": sum(right) / 2})


class Objective(torch.autograd.Function):
    """What a router's probs and losses amount to, by loops; its gradient, by `route`."""

    @staticmethod
    def forward(ctx, x, g, how, scale, factor):
        ctx.save_for_backward(x, g)
        ctx.settings = how, scale
        probs = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid").probs
        return (probs * g).sum() + scale * factor * sum(losses_by_loop(x, batch=2).values())

    @staticmethod
    def backward(ctx, d):
        x, g = (y.detach() for y in ctx.saved_tensors)
        how, scale = ctx.settings
        with torch.enable_grad():
            leaf = x.requires_grad_()
            out = moe_ref.route(leaf, how, state=moe_ref.new_state(how), batch_size=2, loss_scale=scale)
            return d * torch.autograd.grad(out.probs, leaf, g)[0], None, None, None, None


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("a_token", [False, True])
def test_the_gradient_of_a_route_is_that_of_its_probs_and_of_its_losses(scale, a_token):
    how = config(*ALL, z_loss_coeff=0.5, loss_per_token=a_token)
    factor = 8 if a_token else 1
    assert torch.autograd.gradcheck(
        lambda x: Objective.apply(x, random(8, EXPERTS, seed=5), how, scale, factor),
        random(8, EXPERTS).requires_grad_(),
    )


def test_a_repeated_layer_shares_its_losses():
    x, how = random(8, EXPERTS), config(*ALL, z_loss_coeff=0.5, loss_divisor=4)
    out = moe_ref.route(x, how, state=moe_ref.new_state(how))
    assert_close(told(out), {name: loss / 4 for name, loss in losses_by_loop(x).items()})


def test_capacity_drops_what_drop_tokens_drops_and_fills_up():
    x, how = (
        random(12, EXPERTS),
        config(capacity_factor=0.75, pad_to_capacity=True),
    )
    out = moe_ref.route(x, how, state=moe_ref.new_state(how))
    chosen = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid")
    right = moe_ref.drop_tokens(*chosen, capacity=3, pad_to_capacity=True)
    assert torch.equal(out.probs, right.probs) and torch.equal(out.routing_map, right.routing_map)
    assert out.routing_map.sum(0).tolist() == [3] * EXPERTS


# ---- what is remembered


def test_the_global_loss_sees_the_mean_of_the_batches_until_the_batch_is_finished():
    how = config("global_aux_loss")
    state, seen = moe_ref.new_state(how), []
    for step in range(3):
        x = random(8, EXPERTS, seed=step)
        out = moe_ref.route(x, how, state=state)
        assert_close(told(out)["global_aux_loss"], losses_by_loop(x, counted=seen)["global_aux_loss"])
        state, seen = out.state, [*seen, x]
    x = random(8, EXPERTS, seed=9)
    fresh = moe_ref.route(x, how, state=moe_ref.finish_batch(state, how))
    assert_close(told(fresh)["global_aux_loss"], losses_by_loop(x)["global_aux_loss"])


def test_the_bias_is_updated_by_what_was_counted_without_padding():
    x, padding = random(8, EXPERTS), torch.arange(8) > 5
    state = moe_ref.new_state(BIASED)
    for _ in range(2):
        state = moe_ref.route(x, BIASED, state=state, padding_mask=padding).state
    counts = [2 * sum(row[e] for row in map_by_loop(x[:6], TOPK, "sigmoid")) for e in range(EXPERTS)]
    assert state.tokens_per_expert.tolist() == counts
    after = moe_ref.finish_batch(state, BIASED)
    # 2 · 6 · 2 rows of 6 experts
    assert after.expert_bias.tolist() == [0.25 * ((c < 4) - (c > 4)) for c in counts]
    assert not after.tokens_per_expert.any()
    frozen = moe_ref.finish_batch(state, BIASED, frozen=True)
    assert not frozen.expert_bias.any() and not frozen.tokens_per_expert.any()
    moved = moe_ref.route(x, BIASED, state=after).routing_map
    assert torch.equal(
        moved, moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid", expert_bias=after.expert_bias).routing_map
    )


def same(a, b) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(moe_ref.state_tensors(a).values(), moe_ref.state_tensors(b).values(), strict=True)
    )


def test_neither_evaluation_nor_a_pass_without_gradients_leaves_a_trace():
    how = config(*ALL, expert_bias=True, z_loss_coeff=0.5)
    x, state = random(8, EXPERTS), moe_ref.new_state(how)
    evaluated = moe_ref.route(x, how, state=state, training=False)
    with torch.no_grad():
        first_pass = moe_ref.route(x, how, state=state)
    for out in (evaluated, first_pass):
        assert same(out.state, state) and told(out) == {}
    recomputed = moe_ref.route(x, how, state=first_pass.state)
    assert recomputed.state.tokens_per_expert.sum() == 8 * TOPK
    assert recomputed.state.global_steps == 1
    assert torch.equal(recomputed.probs, first_pass.probs)


REPLAYED = config()


def test_what_is_recorded_can_be_replayed_forward_and_then_backward_in_order():
    state, recorded = moe_ref.new_state(REPLAYED), []
    for seed in range(3):
        out = moe_ref.route(random(4, EXPERTS, seed=seed), REPLAYED, state=state, replay="record")
        recorded.append(out.indices)
        assert torch.equal(out.indices.sort(dim=1).values, out.routing_map.nonzero()[:, 1].reshape(4, TOPK))
    other = random(4, EXPERTS, seed=9)
    for target in recorded:
        out = moe_ref.route(other, REPLAYED, state=state, replay="forward", replay_target=target)
        state = out.state
        right = moe_ref.topk_routing(other, topk=TOPK, score_function="sigmoid", precomputed_indices=target)
        assert torch.equal(out.routing_map, right.routing_map) and torch.equal(out.probs, right.probs)
    for target in recorded:
        out = moe_ref.route(other, REPLAYED, state=state, replay="backward")
        state = out.state
        assert torch.equal(
            out.routing_map,
            moe_ref.topk_routing(other, topk=TOPK, score_function="sigmoid", precomputed_indices=target).routing_map,
        )
    assert state.replay_queue == ()
    with pytest.raises(ValueError, match="empty queue"):
        moe_ref.route(other, REPLAYED, state=state, replay="backward")


def test_a_state_is_saved_and_restored_with_its_queue():
    how = config("global_aux_loss", expert_bias=True)
    state = moe_ref.new_state(how)
    target = torch.arange(TOPK).expand(4, TOPK)
    for _ in range(2):
        state = moe_ref.route(random(4, EXPERTS), how, state=state, replay="forward", replay_target=target).state
    tensors = moe_ref.state_tensors(state)
    back = moe_ref.state_from({name: x.clone() for name, x in reversed(tensors.items())})
    assert same(back, state) and len(back.replay_queue) == 2
    assert all(
        tensors[name].dtype == torch.int64 for name in ("tokens_per_expert", "global_tokens_per_expert", "global_steps")
    )
    assert tensors["expert_bias"].dtype == torch.float32


def test_the_state_that_was_given_is_not_changed():
    state = moe_ref.new_state(BIASED)
    before = {name: x.clone() for name, x in moe_ref.state_tensors(state).items()}
    later = moe_ref.route(random(8, EXPERTS), BIASED, state=state).state
    moe_ref.finish_batch(later, BIASED)
    assert all(torch.equal(x, before[name]) for name, x in moe_ref.state_tensors(state).items())
    assert later.tokens_per_expert.any()


def test_the_example_of_a_state_holds():
    how = RouterConfig(
        num_experts=3,
        topk=1,
        score_function="sigmoid",
        expert_bias=True,
        bias_update_rate=0.25,
        global_aux_loss_coeff=1.0,
    )
    logits = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    both = RankGroup(2, lambda x: 2 * x)  # two ranks with the same tokens
    state = moe_ref.new_state(how)
    for _ in range(2):
        state = moe_ref.route(logits, how, state=state, ranks=RouterRanks(tp_dp_cp=both)).state
    assert state.tokens_per_expert.tolist() == [6, 2, 0]
    assert (state.global_tokens_per_expert.tolist(), int(state.global_steps)) == ([12, 4, 0], 2)
    after = moe_ref.finish_batch(state, how, ranks=RouterRanks(tp_dp_cp=both))
    assert after.expert_bias.tolist() == [-0.25, 0.25, 0.25]


# ---- several ranks
