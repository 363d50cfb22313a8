"""Delayed weight gradients of `MoELayer`: the same bits, each once, fc2's before fc1's."""

import importlib

import pytest
import torch
from torch import Tensor

from moe_fast import MoELayer
from moe_ref.config import LayerConfig, Recipe, RouterConfig
from tests.common.fast import interpreted, normal

pytestmark = interpreted
layers = importlib.import_module("moe_fast.layer.layer")
TOKENS, HIDDEN, WIDTH, EXPERTS = 7, 8, 16, 4
EVERYTHING = {"latent": 4, "shared_width": 4, "shared_gate": True, "bias": True}
BATCHES = (1, 2)


def layer(delay: bool, recipe: Recipe | None = None, dtype: torch.dtype = torch.float32, **options) -> MoELayer:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=EXPERTS, topk=2, score_function="sigmoid", aux_loss_coeff=0.5)
    config = LayerConfig(router=router, recipe=recipe, align=16 if recipe else None)
    return MoELayer(config, HIDDEN, WIDTH, init_std=0.5, delay_wgrad=delay, dtype=dtype, **options)


def backward(module: MoELayer, needs_grad: bool = True) -> list[Tensor]:
    """Both micro-batches' forwards, then their backwards; the gradients of the inputs."""
    dtype = module.router.weight.dtype
    inputs = [normal(TOKENS, HIDDEN, seed=seed).to(dtype).requires_grad_(needs_grad) for seed in BATCHES]
    for out in [module(x) for x in inputs]:
        out.backward(normal(TOKENS, HIDDEN, seed=3).to(dtype))
    return [x.grad for x in inputs if x.grad is not None]


def untrained(module: MoELayer) -> list[str]:
    return [name for name, x in module.named_parameters() if x.grad is None]


def experts(module: MoELayer) -> list[torch.nn.Parameter]:
    return [module.experts.linear_fc1.weight, module.experts.linear_fc2.weight]


@pytest.mark.parametrize("options", [
    EVERYTHING,
    {"recompute": "moe"},
    {"recipe": Recipe("block"), "recompute": "moe_act"},
    {"dtype": torch.bfloat16, "overlap_wgrad": True},
    {"overlap_wgrad": True, "recompute": "moe"},
], ids=str)  # fmt: skip
def test_no_bit_of_a_gradient_changes_and_no_parameter_is_left_out(options):
    immediate, delayed = layer(False, **{**options, "overlap_wgrad": False}), layer(True, **options)
    inputs = backward(immediate)
    assert all(torch.equal(a, b) for a, b in zip(backward(delayed), inputs, strict=True))
    assert untrained(delayed) == ["experts.linear_fc1.weight", "experts.linear_fc2.weight"]
    delayed.backward_dw()
    assert untrained(delayed) == []
    for (name, a), b in zip(immediate.named_parameters(), delayed.parameters(), strict=True):
        assert a.grad.any() and torch.equal(a.grad, b.grad), name


def test_an_input_without_gradient_changes_nothing():
    immediate, delayed = layer(False), layer(True)
    backward(immediate, needs_grad=False), backward(delayed, needs_grad=False)
    delayed.backward_dw()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(immediate.parameters(), delayed.parameters(), strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_run_once_per_backward_and_fc2_comes_first(overlap):
    module, hook_calls = layer(True, overlap_wgrad=overlap), []
    for name, weight in zip(("fc1", "fc2"), experts(module), strict=True):
        weight.register_post_accumulate_grad_hook(lambda x, name=name: hook_calls.append((name, x.grad is not None)))
    backward(module)
    assert hook_calls == []
    module.backward_dw()
    assert hook_calls == [("fc2", True)] * len(BATCHES) + [("fc1", True)] * len(BATCHES)
    with pytest.raises(RuntimeError, match="no gradient waits"):
        module.backward_dw()
    assert len(hook_calls) == 2 * len(BATCHES)


@pytest.mark.parametrize("overlap", [False, True])
def test_main_gradients_are_added_to_and_never_replaced(overlap):
    module, hook_calls = layer(True, dtype=torch.bfloat16, overlap_wgrad=overlap), []
    for weight in experts(module):
        weight.main_grad = torch.full_like(weight, 0.5, dtype=torch.float32)
        weight.register_post_accumulate_grad_hook(
            lambda x: hook_calls.append((x.grad_added_to_main_grad, bool(x.grad.any())))
        )
    main_gradients = [x.main_grad for x in experts(module)]
    backward(module)
    twin = layer(True, dtype=torch.bfloat16)
    backward(twin)
    wanted = []
    for linear in (twin.experts.linear_fc1, twin.experts.linear_fc2):
        total = torch.full_like(linear.weight, 0.5, dtype=torch.float32)
        for gradient in linear.waiting:
            total = gradient(accumulate_into=total)
        wanted.append(total)
    module.backward_dw()
    assert hook_calls == [(True, False)] * 2 * len(BATCHES)
    for weight, main, expected in zip(experts(module), main_gradients, wanted, strict=True):
        assert weight.main_grad is main and torch.equal(main, expected) and weight.grad is None
        assert not torch.equal(main, torch.full_like(main, 0.5))


def test_without_a_delay_nothing_waits():
    module = layer(False)
    backward(module)
    assert not module.experts.linear_fc1.waiting
    with pytest.raises(RuntimeError, match="no gradient waits"):
        module.backward_dw()


def test_a_forward_without_gradients_leaves_nothing_to_do():
    module = layer(True)
    with torch.no_grad():
        module(normal(TOKENS, HIDDEN))
    assert not module.experts.linear_fc1.waiting


def test_a_module_that_is_left_out_is_found():
    module = layer(True)
    backward(module)
    module.experts.linear_fc1.waiting.clear()
    module.experts.linear_fc2.backward_dw()
    assert untrained(module) == ["experts.linear_fc1.weight"]


def calls_of(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> list[str]:
    """Of a backward and `backward_dw`: the weights' gradients, and the dispatch's, in order."""
    calls: list[str] = []
    module, dispatch = layer(True, overlap_wgrad=overlap), layers._on_one_rank

    def logged(tokens, *arguments):
        tokens.register_hook(lambda d_tokens: calls.append("dispatch"))
        return dispatch(tokens * 1, *arguments)

    monkeypatch.setattr(layers, "_on_one_rank", logged)
    for name, linear in (("fc1", module.experts.linear_fc1), ("fc2", module.experts.linear_fc2)):
        compute = linear._next
        monkeypatch.setattr(linear, "_next", lambda name=name, compute=compute: (calls.append(name), compute())[1])
    x = normal(TOKENS, HIDDEN).requires_grad_() * 1
    module(x).sum().backward()
    calls.append("end")
    module.backward_dw()
    return calls


def test_beside_the_dispatch_gradients_are_computed_before_its_backward(monkeypatch):
    """The twin is the module without the option, which computes them afterwards."""
    with monkeypatch.context() as overlapped:
        assert calls_of(overlapped, True)[:2] == ["fc2", "fc1"]
    with monkeypatch.context() as sequential:
        assert calls_of(sequential, False)[-3:] == ["end", "fc2", "fc1"]


def test_gradients_beside_the_dispatch_must_be_delayed():
    with pytest.raises(ValueError, match="overlap_wgrad is True; it must be False without delay_wgrad"):
        layer(False, overlap_wgrad=True)
