"""route over several ranks."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import moe_ref
from moe_ref.config import RankGroup, RouterConfig, RouterRanks
from moe_ref.dispatch.ranks import play
from tests.router.reference_helpers import ALL, BIASED, EXPERTS, config, losses_by_loop, random, told


def split(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    return x.chunk(ranks)


def routed_by_ranks(x: Tensor, how: RouterConfig, tp: int, dp: int = 1, padding: Tensor | None = None, **settings):
    """Each rank's route: data-parallel parts of the rows, split over the tensor-parallel ranks."""
    parts, masks = (
        [part for shard in split(y, dp) for part in split(shard, tp)]
        for y in (x, torch.zeros(len(x)) if padding is None else padding)
    )

    def run(rank, over):
        own = range(rank // tp * tp, rank // tp * tp + tp)
        leaf = parts[rank].detach().clone().requires_grad_()
        mask = {} if padding is None else {"padding_mask": masks[rank]}
        out = moe_ref.route(
            leaf,
            how,
            state=moe_ref.new_state(how),
            ranks=RouterRanks(RankGroup(tp, over(own)), RankGroup(tp * dp, over(range(tp * dp)))),
            **mask,
            **settings,
        )
        return out, torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0]

    return play(tp * dp, run)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("padding", [None, torch.arange(16) > 10], ids=["whole", "padded"])
def test_the_shares_of_ranks_that_split_the_sequences_add_up(ranks, padding):
    x, how = random(16, EXPERTS), config(*ALL, **({"z_loss_coeff": 0.5} if padding is None else {}))
    ((alone, gradient),) = routed_by_ranks(x, how, 1, batch_size=2, padding=padding)
    shares = routed_by_ranks(x, how, ranks, batch_size=2, padding=padding)
    total = {name: sum(told(out)[name] for out, _ in shares) for name in told(alone)}
    assert_close(total, told(alone))
    assert_close(torch.cat([d for _, d in shares]), gradient)


def test_the_aux_loss_is_of_a_data_parallel_rank_and_the_global_one_of_all():
    x, how = random(16, EXPERTS), config(*ALL)
    shares = [told(out) for out, _ in routed_by_ranks(x, how, 2, 2)]
    for shard, pair in zip(split(x, 2), (shares[:2], shares[2:]), strict=True):
        assert_close(sum(loss["aux_loss"] for loss in pair), losses_by_loop(shard)["aux_loss"])
    assert_close(sum(loss["global_aux_loss"] for loss in shares), losses_by_loop(x)["global_aux_loss"])


def gradient_of_weight(hidden: Tensor, weight: Tensor, how: RouterConfig, ranks: int) -> Tensor:
    """The gradient of the router's weight by its losses, added up over the ranks; divided by all
    tokens where losses are of a token.
    """
    parts = split(hidden, ranks)

    def run(rank, over):
        leaf = weight.clone().requires_grad_()
        every = RankGroup(ranks, over(range(ranks)))
        out = moe_ref.route(
            moe_ref.gate(parts[rank], leaf),
            how,
            state=moe_ref.new_state(how),
            batch_size=2,
            ranks=RouterRanks(every, every),
        )
        return torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0]

    total = sum(play(ranks, run))
    return total / len(hidden) if how.loss_per_token else total


@pytest.mark.parametrize("a_token", [False, True])
@pytest.mark.parametrize("loss", [*ALL, "z"])
def test_the_gradient_of_the_weight_does_not_depend_on_the_number_of_ranks(loss, a_token):
    how = config(
        *(() if loss == "z" else (loss,)),
        loss_per_token=a_token,
        **({"z_loss_coeff": 0.5} if loss == "z" else {}),
    )
    hidden, weight = random(16, 3), random(EXPERTS, 3, seed=1)
    alone = gradient_of_weight(hidden, weight, how, 1)
    assert alone.any()
    for ranks in (2, 4):
        assert_close(gradient_of_weight(hidden, weight, how, ranks), alone)


def test_losses_of_a_token_and_of_a_batch_have_the_same_gradient_in_the_end():
    hidden, weight = random(16, 3), random(EXPERTS, 3, seed=1)
    of_batch, of_token = (
        gradient_of_weight(hidden, weight, config(*ALL, loss_per_token=a_token), 2) for a_token in (False, True)
    )
    assert_close(of_batch, of_token)


@pytest.mark.parametrize("a_token", [False, True])
def test_the_sequence_loss_does_not_depend_on_the_size_of_the_micro_batches(a_token):
    how, x = config("seq_aux_loss", loss_per_token=a_token), random(16, EXPERTS)

    def gradient(batches: list[Tensor], batch_size: int) -> list[Tensor]:
        found = []
        for part in batches:
            leaf = part.clone().requires_grad_()
            scale = 1.0 if a_token else 1 / len(batches)
            out = moe_ref.route(leaf, how, state=moe_ref.new_state(how), batch_size=batch_size, loss_scale=scale)
            found.append(torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0])
        return found

    (together,) = gradient([x], 2)
    for b, apart in enumerate(gradient([x[0::2], x[1::2]], 1)):
        assert_close(together[b::2], apart)


def test_the_bias_is_updated_by_the_counts_of_all_ranks():
    x = random(16, EXPERTS)
    alone = moe_ref.finish_batch(moe_ref.route(x, BIASED, state=moe_ref.new_state(BIASED)).state, BIASED)

    def run(rank, over):
        state = moe_ref.route(split(x, 4)[rank], BIASED, state=moe_ref.new_state(BIASED)).state
        return moe_ref.finish_batch(state, BIASED, ranks=RouterRanks(tp_dp_cp=RankGroup(4, over(range(4)))))

    assert all(torch.equal(state.expert_bias, alone.expert_bias) for state in play(4, run))


# ---- the ranks themselves


def test_ranks_add_up_over_the_groups_that_they_are_in():
    def run(rank, over):
        x = torch.tensor(2**rank)
        pair = range(rank // 2 * 2, rank // 2 * 2 + 2)
        return [int(over(range(4))(x)), int(over(pair)(x)), int(over([rank])(x)), int(over(range(4))(-x))]

    assert play(4, run) == [[15, 3, 1, -15], [15, 3, 2, -15], [15, 12, 4, -15], [15, 12, 8, -15]]


def test_the_order_of_a_sum_is_that_of_the_ranks():
    parts = random(8, dtype=torch.float32)
    right = parts[0]
    for part in parts[1:]:
        right = right + part
    assert all(torch.equal(total, right) for total in play(8, lambda rank, over: over(range(8))(parts[rank])))


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    def run(rank, over):
        if rank == 2:
            raise KeyError("lost")
        return over(range(4))(torch.ones(()))

    with pytest.raises(KeyError, match="lost"):
        play(4, run)
