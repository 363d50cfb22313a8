"""Slots that libraries differ on: experts that a token names twice, and probabilities of zero.

P20: see test_plan.py.
"""

import pytest
import torch

import moe_ref
from moe_fast.dispatch import indices as fast
from moe_ref.config import IndexPolicy

TWICE = torch.tensor([[1, 0, 1], [-1, 0, 1]])
PROBS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 16.0]])


@pytest.mark.parametrize(
    ("policy", "indices", "probs"),
    [
        ({"duplicates": "count each"}, TWICE.tolist(), [[1, 2, 4], [0, 0, 16]]),
        ({"duplicates": "last slot"}, [[-1, 0, 1], [-1, 0, 1]], [[0, 2, 4], [0, 0, 16]]),
        ({"duplicates": "count each", "zero_prob": "drop"}, [[1, 0, 1], [-1, -1, 1]], [[1, 2, 4], [0, 0, 16]]),
    ],
)
def test_p20_slots_that_libraries_differ_on_are_kept_or_emptied_as_the_policy_says(policy, indices, probs):
    got = moe_ref.apply_index_policy(TWICE, PROBS, num_experts=2, policy=IndexPolicy(**policy))
    assert got[0].tolist() == indices and got[1].tolist() == probs


@pytest.mark.parametrize("applied", (moe_ref.apply_index_policy, fast.apply_index_policy), ids=("moe_ref", "moe_fast"))
def test_the_last_expert_that_uint8_names_is_no_empty_slot(applied):
    indices = torch.tensor([[255, 0]], dtype=torch.uint8)
    kept, _ = applied(indices, None, num_experts=256, policy=IndexPolicy())
    assert kept.tolist() == [[255, 0]]


def test_p20_the_last_slot_is_the_one_that_a_map_keeps():
    indices, probs = moe_ref.apply_index_policy(TWICE, PROBS, num_experts=2, policy=IndexPolicy(duplicates="last slot"))
    policed, plain = (moe_ref.indices_to_multihot(i, p, num_experts=2) for i, p in ((indices, probs), (TWICE, PROBS)))
    assert torch.equal(policed.routing_map, plain.routing_map) and torch.equal(policed.probs, plain.probs)


def test_p20_deepep_counts_an_expert_that_is_named_twice_twice_and_sends_its_token_once():
    (sent,) = moe_ref.deepep_dispatch(
        [torch.ones(2, 1)], [TWICE], num_experts=2, probs=[PROBS], policy=IndexPolicy(duplicates="count each")
    )
    assert len(sent.rows) == 2 and sent.tokens_per_expert.tolist() == [2, 3] and sent.indices.tolist() == TWICE.tolist()
    assert moe_ref.deepep_layout(TWICE, num_experts=2, ranks=1).num_tokens_per_expert.tolist() == [2, 3]


def test_p20_in_low_latency_both_slots_of_an_expert_read_its_later_row():
    x, policy = [torch.tensor([[1.0]])], IndexPolicy(duplicates="count each")
    (sent,) = moe_ref.deepep_low_latency_dispatch(x, [TWICE[:1]], num_experts=2, max_tokens_per_rank=2, policy=policy)
    assert sent.tokens_per_expert.tolist() == [1, 2]
    rows = torch.tensor([[[10.0], [torch.nan]], [[torch.nan], [100.0]]])
    assert (
        moe_ref.deepep_low_latency_combine([rows], [TWICE[:1]], [PROBS[:1]], [sent.handle])[0].item()
        == 2 * 10 + (1 + 4) * 100
    )


def test_a_routed_expert_of_probability_zero_is_dispatched_like_any_other():
    x, zero, routed = [torch.ones(1, 1)], [torch.zeros(1, 2)], [torch.tensor([[0, 1]])]
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch, moe_ref.hybridep_dispatch):
        assert dispatch(x, routed, probs=zero)[0].tokens_per_expert.tolist() == [0, 1]
    index, prob = [torch.tensor([[1]])], [torch.zeros(1, 1)]
    assert moe_ref.deepep_dispatch(x, index, num_experts=2, probs=prob)[0].tokens_per_expert.tolist() == [0, 1]
    dropped = moe_ref.deepep_dispatch(x, index, num_experts=2, probs=prob, policy=IndexPolicy(zero_prob="drop"))
    assert dropped[0].tokens_per_expert.tolist() == [0, 0] and len(dropped[0].rows) == 0
