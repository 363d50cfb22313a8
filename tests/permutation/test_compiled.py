"""Permutation in a compiled graph, under our names and Transformer Engine's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_fast.te import shim
from tests.common.compiled import Graph, assert_compiles, outcome, same
from tests.common.fast import interpreted

pytestmark = interpreted
H, E = 16, 8
SIZES, ORDER = torch.tensor([10, 3, 0, 7]), torch.tensor([2, 0, 3, 1])


def routing(seed: int, tokens: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, probs and a map of two experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    x, probs = torch.randn(tokens, H, generator=generator), torch.rand(tokens, E, generator=generator)
    chosen = probs.topk(2).indices
    return x.requires_grad_(), probs.requires_grad_(), torch.zeros(tokens, E, dtype=torch.bool).scatter(1, chosen, True)


def permute_and_pad(x: Tensor, probs: Tensor, routed: Tensor) -> Any:
    rows, row_probs, row_id_map, offsets, counts = shim.moe_permute_and_pad_with_probs(
        x, probs, routed, routed.sum(0), 4
    )
    return rows, row_probs, offsets, counts, shim.moe_unpermute(rows, row_id_map, probs, pad_offsets=offsets)


def there_and_back(x: Tensor, probs: Tensor, routed: Tensor) -> Tensor:
    rows, row_probs, row_id_map = shim.moe_permute_with_probs(x, probs, routed, 2 * len(x))
    rows, row_probs = shim.moe_sort_chunks_by_index_with_probs(rows, row_probs, SIZES, ORDER)
    rows = shim.moe_sort_chunks_by_index((rows * row_probs[:, None]).to(x.dtype), SIZES[ORDER], ORDER.argsort())
    return shim.moe_unpermute(rows, row_id_map, restore_shape=x.shape)


def in_capacity(x: Tensor, probs: Tensor, routed: Tensor) -> Any:
    out = moe_fast.permute(x, routed, probs=probs, capacity=4)
    return out.rows, out.probs, out.tokens_per_expert, out.overflow, moe_fast.unpermute(out.rows, out.row_map)


def other_forms(_: Tensor, probs: Tensor, routed: Tensor) -> Any:
    padded = moe_fast.pad_routing_map(routed, align=4)
    listed = moe_fast.multihot_to_indices(padded.routing_map, probs, topk=3)
    return *padded, *listed, *moe_fast.indices_to_multihot(listed.indices, listed.probs, num_experts=E)


FUNCTIONS = [permute_and_pad, there_and_back, in_capacity, other_forms]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_one_graph_serves_every_routing_as_eager(function):
    used = [x.requires_grad_(name in USED[function]) for name, x in zip("xp", routing(0)[:2], strict=True)]
    second = [x.requires_grad_(name in USED[function]) for name, x in zip("xp", routing(1)[:2], strict=True)]
    assert_compiles(function, (*used, routing(0)[2]), (*second, routing(1)[2]))


USED = dict(zip(FUNCTIONS, ("xp", "xp", "xp", "p"), strict=True))  # inputs with a gradient


def test_one_graph_serves_other_numbers_of_tokens():
    assert_compiles(permute_and_pad, *(routing(0, tokens) for tokens in (20, 24, 31)), dynamic=True)


def test_a_row_map_goes_from_one_graph_to_another():
    x, probs, routed = routing(0)
    permuted = Graph(lambda: shim.moe_permute(x, routed, 2 * len(x))).function()
    merge = Graph(lambda rows, row_id_map, p: shim.moe_unpermute(rows, row_id_map, p)).function
    rows, row_id_map = permuted[0].detach().requires_grad_(), permuted[1]
    eager = outcome(lambda rows, p: shim.moe_unpermute(rows, row_id_map, p), rows, probs)
    assert same(outcome(lambda rows, p: merge(rows, row_id_map, p), rows, probs), eager)


def test_an_illegal_call_says_why():
    x, _, routed = routing(0)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"ValueError.*routing_map is of shape"):
        Graph(lambda x, routed: shim.moe_permute(x, routed, 3)).function(x, routed[1:])
