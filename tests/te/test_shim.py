"""Transformer Engine's names over our kernels: judged by the suite, used by Megatron unchanged."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from conformance.peers.te import Adapter
from moe_fast.te import shim
from tests.peers import needs_megatron
from tests.te.judging import judged, leaf, wrong
from tests.te.standin import standin

FUNCTIONS = ("permute", "unpermute", "sort_chunks", "topk_routing", "aux_loss_scores", "load_balancing_loss")
MAP = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
SHIM = SimpleNamespace(pytorch=SimpleNamespace(**vars(shim), router=shim))
NAMES = [name for name, x in vars(shim).items() if name.startswith(("moe_", "fused_")) and inspect.isfunction(x)]


def test_the_suite_judges_the_shim_under_our_names():
    adapter = Adapter(SHIM)
    assert adapter.offered == [*FUNCTIONS]
    assert adapter.probes.zero_prob_rows == "copied"
    outcomes = judged(adapter, FUNCTIONS, most=3)
    # like Transformer Engine's, the loss has the dtype of its scores
    assert all(x.startswith("load_balancing_loss") and "has dtype torch." in x for x in wrong(outcomes))
    assert {case.function for case, outcome in outcomes if outcome.status == "PASS"} == {*FUNCTIONS}


@pytest.mark.parametrize("name", NAMES)
def test_every_function_takes_the_parameters_of_the_newest_release_in_its_order(name):
    te = standin("2.20").pytorch
    theirs = inspect.signature(getattr(te, name, None) or getattr(te.router, name)).parameters
    ours = inspect.signature(getattr(shim, name)).parameters
    # other forms of the map, and a histogram: no caller has to ask for them
    unneeded = ("routing_map_format", "topk_indices", "qb_histogram", "qb_bin_bounds", "qb_histogram_mode")
    assert [*ours] == [x for x in theirs if x not in unneeded]
    required = [x for x, p in theirs.items() if p.default is p.empty]
    assert {x for x, p in ours.items() if p.default is p.empty} <= {*required}


def test_results_come_in_the_order_of_transformer_engine():
    te = standin("2.1").pytorch  # copies rows of probability 0, as the shim does
    tokens, probs = leaf(5, 16), leaf(5, 3, seed=1)
    for mine, theirs in zip(
        shim.moe_permute_with_probs(tokens, probs, MAP, 7)[:2],
        te.moe_permute_with_probs(tokens, probs, MAP, 7)[:2],
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    newest = standin("2.20").pytorch
    mine = shim.moe_permute_and_pad_with_probs(tokens, probs, MAP, MAP.sum(0), 4)
    theirs = newest.moe_permute_and_pad_with_probs(tokens, probs, MAP, MAP.sum(0), 4)
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if i != 2)
    for offsets in (None, mine[3]):
        out = shim.moe_unpermute(mine[0], mine[2], probs, restore_shape=(5, 16), pad_offsets=offsets)
        assert torch.allclose(out, newest.moe_unpermute(theirs[0], theirs[2], probs, (5, 16), pad_offsets=theirs[3]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: shim.moe_permute(x, m, map_type="index"), "map_type is 'index'; it must be 'mask'"),
        (lambda x, m: shim.moe_unpermute(x, m, x, probs=x), "probs is given with merging_probs"),
        (
            lambda x, m: shim.moe_permute_and_pad_with_probs(x, m.float(), m, m.sum(), 4),
            r"tokens_per_expert is of shape \(\); it must be of shape \(3,\)",
        ),
    ],
)
def test_what_the_shim_lacks_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(leaf(5, 16), MAP)


@needs_megatron
def test_megatron_permutes_and_routes_by_the_shim_as_without_fusion(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    for name in NAMES:
        fused = name.replace("moe_", "fused_") if name.startswith("moe_") else name
        monkeypatch.setattr(moe_utils, fused, getattr(shim, name), raising=False)
    results = {}
    for fused in (False, True):
        logits, tokens = leaf(5, 4), leaf(5, 16, seed=1)
        probs, routing_map = moe_utils.topk_routing_with_score_function(
            logits, 2, use_pre_softmax=True, score_function="softmax", fused=fused
        )
        rows, row_probs, row_map = moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=10, fused=fused)
        sizes, order = torch.tensor([3, 7]), torch.tensor([1, 0])
        sorted_rows, _ = moe_utils.sort_chunks_by_idxs(rows, sizes, order, fused=fused)
        out = moe_utils.unpermute(rows * row_probs[:, None], row_map, tokens.shape, fused=fused)
        gradients = torch.autograd.grad(out.square().sum() + sorted_rows.sum(), [logits, tokens])
        results[fused] = [probs, routing_map, rows, row_probs, sorted_rows, out, *gradients]
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(results[True], results[False], strict=True))
