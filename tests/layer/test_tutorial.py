"""The layer in plain loops computes the layer of the reference, bit by bit.

Loops add in another order than matrix products, so the values are such that no order matters.
Tokens and the weights of the router and of fc1 are small integers: their products are exact. A row
of fc2 has one entry other than 0, a power of 2. A sum over two experts is rounded once. What
remains, the scores and the activation, are the same operations on the same numbers.
"""

import pytest
import torch
from torch import Tensor

import moe_ref
from moe_ref import tutorial
from moe_ref.config import LayerConfig, LayerParameters, RouterConfig
from moe_ref.config.state import new_state

HIDDEN, WIDTH, EXPERTS = 6, 5, 4


def integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, dtype=torch.float64)


def one_entry_per_row(seed: int) -> Tensor:
    """[E,H,F]: each number of the output is a number of the activation, times a power of 2."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.randint(WIDTH, (EXPERTS, HIDDEN, 1), generator=generator)
    power = torch.randint(-2, 3, (EXPERTS, HIDDEN, 1), generator=generator)
    return torch.zeros(EXPERTS, HIDDEN, WIDTH, dtype=torch.float64).scatter(2, column, torch.pow(2.0, power).double())


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_plain_loops_equal_the_layer_bit_by_bit(score_function, topk, num_tokens):
    x = integers(num_tokens, HIDDEN, seed=1)
    router_weight, fc1_weight = integers(EXPERTS, HIDDEN, seed=2), integers(EXPERTS, 2 * WIDTH, HIDDEN, seed=3)
    fc2_weight = one_entry_per_row(seed=4)
    config = LayerConfig(router=RouterConfig(num_experts=EXPERTS, topk=topk, score_function=score_function))
    parameters = LayerParameters(router_weight, fc1_weight, fc2_weight)
    expected = moe_ref.moe_layer([x], [parameters], config, states=[new_state(config.router)]).output[0]
    settings = {"topk": topk, "score_function": score_function}
    y = tutorial.moe_layer(x, router_weight, fc1_weight, fc2_weight, **settings)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
