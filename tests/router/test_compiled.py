"""The router in a compiled graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_ref.config import RouterConfig
from tests.common.compiled import assert_compiles
from tests.common.fast import interpreted, normal

pytestmark = interpreted
E = 8
CONFIG = RouterConfig(
    num_experts=E, topk=2, score_function="sigmoid", expert_bias=True, capacity_factor=1.0, aux_loss_coeff=0.5,
    seq_aux_loss_coeff=0.25, global_aux_loss_coeff=1.0, z_loss_coeff=0.5,
)  # fmt: skip
STATE = moe_fast.new_state(CONFIG)


def choice(logits: Tensor) -> Any:
    compact = moe_fast.topk_indices(logits, topk=3, num_groups=2, group_topk=1)
    dense = moe_fast.topk_routing(logits, topk=2, score_function="sigmoid", expert_bias=torch.arange(E) / E)
    by_plan = [moe_fast.sinkhorn_routing(logits, topk=2, training=training) for training in (True, False)]
    return *compact, *by_plan, *moe_fast.drop_tokens(*dense, capacity=2, pad_to_capacity=True)


def losses(logits: Tensor) -> Any:
    scores, chosen = moe_fast.aux_loss_scores(logits, topk=2)
    settings = {"total_num_tokens": len(logits), "topk": 2, "num_experts": E, "coeff": 0.5}
    balanced = moe_fast.load_balancing_loss(scores, chosen.sum(0), **settings)
    with_loss = moe_fast.attach_loss(logits * 1, moe_fast.z_loss(logits, coeff=0.25), scale=3.0)
    return balanced, with_loss, moe_fast.update_expert_bias(torch.zeros(E), chosen.sum(0), update_rate=0.5)


def whole(logits: Tensor) -> Any:
    out = moe_fast.route(logits, CONFIG, state=STATE)
    return out, moe_fast.finish_batch(out.state, CONFIG)


def test_one_graph_serves_all_logits_as_eager():
    assert_compiles(whole, *((normal(20, E, seed=seed).requires_grad_(),) for seed in (0, 1)))


@pytest.mark.parametrize("function", [choice, losses], ids=lambda f: f.__name__)
def test_one_graph_serves_other_numbers_of_tokens(function):
    assert_compiles(function, *((normal(tokens, E).requires_grad_(),) for tokens in (20, 24, 31)), dynamic=True)
