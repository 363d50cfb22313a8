"""Recomputation in `MoELayer`: the same bits, less kept, every token counted once."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import moe_fast
from moe_fast import MoELayer
from moe_fast.experts import mlp
from moe_fast.experts.segments import Plan
from moe_fast.permutation.row_map import RowMap
from moe_fast.router.route import route
from moe_ref.config import DISPATCHERS, LayerConfig, Recipe, RouteOutput, RouterConfig, RouterState
from tests.common.fast import interpreted, normal
from tests.layer.kept import alive_bytes, saved_bytes
from tests.layer.ranks import on_ranks

pytestmark = interpreted
layers, module = (importlib.import_module(f"moe_fast.layer.{name}") for name in ("layer", "module"))
TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 64, 8, 16, 4, 2
ROWS = TOKENS * TOPK
LOSSES = {"expert_bias": True, "aux_loss_coeff": 0.5, "global_aux_loss_coeff": 0.25, "z_loss_coeff": 0.25}
EVERYTHING = {"latent": 4, "shared_width": 4, "shared_gate": True, "bias": True}


def layer(
    recompute: str | None, recipe: Recipe | None = None, dispatcher: str = "alltoall", seed: int = 0, **options
) -> MoELayer:
    torch.manual_seed(seed)
    router = RouterConfig(num_experts=EXPERTS, topk=TOPK, score_function="sigmoid", **LOSSES)
    align, eps = 16 if recipe else None, options.pop("jitter_eps", None)
    config = LayerConfig(router=router, recipe=recipe, align=align, dispatcher=dispatcher, jitter_eps=eps)
    return MoELayer(config, HIDDEN, WIDTH, init_std=0.5, recompute=recompute, **options)


def trained(module: MoELayer, tokens: int = 7) -> list[Tensor]:
    """Two micro-batches, both forwards before both backwards: outputs, gradients, state, losses."""
    inputs = [normal(tokens, HIDDEN, seed=seed).requires_grad_() for seed in (1, 2)]
    outputs, losses = [], []
    for x in inputs:
        outputs.append(module(x))
        losses += [loss for loss in module.losses if loss is not None]
    for out in outputs:
        out.backward(normal(tokens, HIDDEN, seed=3))
    gradients = [leaf.grad for leaf in (*inputs, *module.parameters())]
    assert all(g is not None and g.any() for g in gradients) or not tokens
    return [*(out.detach() for out in outputs), *gradients, *module.buffers(), *losses]


PERMUTED = ("permute", ("permute", "moe_act"))


@pytest.mark.parametrize("recompute", ["moe_act", "moe", PERMUTED[1]], ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"recipe": Recipe("current")}], ids=str)
def test_recomputation_changes_no_bit(recompute, options):
    pairs = zip(trained(layer(None, **options)), trained(layer(recompute, **options)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def jittered_runs_agree() -> None:
    for recompute in ("moe_act", "moe"):
        saved_run, recomputed = (trained(layer(recompute_of, jitter_eps=0.25)) for recompute_of in (None, recompute))
        assert all(torch.equal(a, b) for a, b in zip(saved_run, recomputed, strict=True))


def test_the_second_forward_draws_the_noise_of_the_first(monkeypatch):
    jittered_runs_agree()
    assert not torch.equal(trained(layer(None, jitter_eps=0.25))[0], trained(layer(None))[0])
    original = module.run_again
    monkeypatch.setattr(module, "run_again", lambda run, *inputs, random: original(run, *inputs))
    with pytest.raises(AssertionError):
        jittered_runs_agree()


def of_ranks(group: Any, rank: int) -> int:
    """The number of dispatchers with the same results, one rank without tokens.

    What "moe_act" recomputes is after the dispatch: one dispatcher is enough for it. Only deepep's
    rows are of a permutation on their rank.
    """
    agreeing = 0
    for dispatcher in DISPATCHERS:
        ways = ["moe", *{DISPATCHERS[0]: ["moe_act"], "deepep": ["permute"]}.get(dispatcher, [])]
        if dispatcher == DISPATCHERS[0]:
            with pytest.raises(ValueError, match="recompute is 'permute'"):
                trained(layer("permute", None, dispatcher, rank, group=group), 4 * rank)
        saved_run, *recomputed = (
            trained(layer(recompute, None, dispatcher, rank, group=group, shared_width=4), 4 * rank)
            for recompute in (None, *ways)
        )
        agreeing += all(torch.equal(a, b) for run in recomputed for a, b in zip(saved_run, run, strict=True))
    return agreeing


def test_recomputation_changes_no_bit_over_ranks(tmp_path):
    assert on_ranks(2, of_ranks, tmp_path) == [len(DISPATCHERS)] * 2


def counts_once(module: MoELayer) -> None:
    module(normal(7, HIDDEN)).sum().backward()
    assert module.router.tokens_per_expert.sum() == 7 * TOPK
    assert module.router.global_steps == 1


def counting_in_place(*inputs: Any, state: RouterState, **settings: Any) -> RouteOutput:
    """A twin of `route` that adds to the counters it is given."""
    out = route(*inputs, state=state, **settings)
    state.tokens_per_expert.copy_(out.state.tokens_per_expert)
    return out._replace(state=out.state._replace(tokens_per_expert=state.tokens_per_expert))


def test_the_second_forward_counts_no_token(monkeypatch):
    counts_once(layer("moe"))
    monkeypatch.setattr(layers, "route", counting_in_place)
    counts_once(layer(None))
    with pytest.raises(AssertionError):
        counts_once(layer("moe"))


def test_the_second_forward_sees_the_bias_of_the_first():
    gradients = []
    for recompute in (None, "moe"):
        module, x = layer(recompute), normal(7, HIDDEN).requires_grad_()
        out = module(x)
        module.router.expert_bias = torch.tensor([9.0, 9.0, 0.0, 0.0])  # would change the choice of every token
        module.finish_batch()
        out.backward(normal(7, HIDDEN, seed=3))
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_no_random_number_is_drawn_and_evaluation_leaves_no_trace():
    module, random_state = layer("moe"), torch.get_rng_state()
    module(normal(7, HIDDEN)).sum().backward()
    assert torch.equal(torch.get_rng_state(), random_state)
    module = layer("moe").eval()
    module(normal(7, HIDDEN)).sum().backward()
    with torch.no_grad():
        module.train()(normal(7, HIDDEN))
    assert not module.router.tokens_per_expert.any() and module.experts.linear_fc1.weight.grad is not None


# ---- what is kept


def kept(measure: Callable[..., int], recompute: str | None, **options) -> int:
    """Bytes besides the input, the parameters and the state."""
    module, x = layer(recompute, **options), normal(TOKENS, HIDDEN).requires_grad_()
    module(x)  # the first call fills caches
    inputs = [x, *module.parameters(), *module.buffers()]
    return measure(partial(module, x), inputs)


def launch() -> None:
    moe_fast.permute(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))


alive = partial(alive_bytes, afterwards=launch)
ACTIVATION = ROWS * WIDTH * 4
LEFT = 96  # the losses and what they are summed from


def keeps_no_activation() -> None:
    for measure in (saved_bytes, alive):
        assert kept(measure, "moe_act") <= kept(measure, None) - ACTIVATION


ROW_BYTES, NARROW = ROWS * HIDDEN * 4, {"latent": 4}


def keeps_tokens_not_rows(recompute: str | tuple[str, ...], **options: Any) -> None:
    """The rows are not kept, nor with a recipe their codes; a projected token is kept instead."""
    rows = ROWS * HIDDEN if options.get("recipe") else ROW_BYTES
    rows = (ROWS - TOKENS) * 4 * options["latent"] if "latent" in options else rows
    assert (
        kept(alive, recompute, **options) <= kept(alive, None, **options) - rows - (recompute != "permute") * ACTIVATION
    )


def keeps_nothing(**options) -> None:
    assert kept(saved_bytes, "moe", **options) == 0
    assert kept(alive, "moe", **options) <= LEFT


@pytest.mark.parametrize("recipe", [None, Recipe("current")], ids=str)
def test_recomputation_saves_fewer_bytes(recipe):
    if recipe is None:
        keeps_no_activation()
    keeps_nothing(recipe=recipe)
    keeps_nothing(recipe=recipe, **EVERYTHING)


def test_no_row_is_kept_that_is_permuted_again():
    for recompute, options in ((PERMUTED[0], {"recipe": Recipe("current")}), (PERMUTED[1], {}), (PERMUTED[0], NARROW)):
        keeps_tokens_not_rows(recompute, **options)


def test_an_activation_that_a_hook_keeps_is_found(monkeypatch):
    kept_by_hook = saved_tensors_hooks(lambda x: x, lambda x: x)
    monkeypatch.setattr(mlp, "computed_again", lambda *_: kept_by_hook)
    with pytest.raises(AssertionError):
        keeps_no_activation()
    with pytest.raises(AssertionError):
        keeps_tokens_not_rows("permute")


def test_codes_of_rows_that_are_kept_are_found(monkeypatch):
    """A product that is not told that its rows come again keeps their codes."""
    original = mlp.linear_of
    monkeypatch.setattr(
        mlp, "linear_of", lambda *x, **settings: original(*x[:-1], x[-1]._replace(rows_again=False), **settings)
    )
    with pytest.raises(AssertionError):
        keeps_tokens_not_rows("permute", recipe=Recipe("current"))


def test_tokens_that_have_changed_are_not_permuted_again():
    module = layer("permute")
    module.router.weight.requires_grad_(False)  # whose gradient would find the change
    x = normal(7, HIDDEN).requires_grad_()
    tokens = x * 1
    out = module(tokens)
    with torch.no_grad():
        tokens += 1
    with pytest.raises(RuntimeError, match="tokens have changed since the forward"):
        out.backward(normal(7, HIDDEN, seed=3))


def test_an_activation_that_the_graph_keeps_is_found(monkeypatch):
    original = mlp._experts
    monkeypatch.setattr(mlp, "_experts", lambda call, *inputs: original(call._replace(recomputes=False), *inputs))
    with pytest.raises(AssertionError):
        keeps_no_activation()


def test_a_row_map_that_a_node_keeps_is_found(monkeypatch):
    """An attribute of a node outlives its checkpoint, and no hook sees it."""
    nodes, original = [], RowMap.parts
    monkeypatch.setattr(RowMap, "parts", lambda self: nodes.append(self) or original(self))
    assert kept(saved_bytes, "moe") == 0
    with pytest.raises(AssertionError):
        keeps_nothing()


def test_a_plan_that_a_node_keeps_is_found(monkeypatch):
    monkeypatch.setattr(Plan, "without_tensors", lambda self: self)
    with pytest.raises(AssertionError):
        keeps_nothing()


def test_a_layer_that_keeps_its_rows_is_found(monkeypatch):
    monkeypatch.setattr(module, "run_again", lambda run, *inputs, random: run(*inputs))
    with pytest.raises(AssertionError):
        keeps_nothing()


@pytest.mark.parametrize("recompute", ["", "experts", ("moe", "permute")])
def test_an_unknown_way_of_recomputing_is_refused(recompute):
    with pytest.raises(ValueError, match="recompute is"):
        layer(recompute)
