"""Delayed scaling in the module: its scales follow what its products have seen, and are saved."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_ref
from moe_fast import MoELayer, split_extra_state
from moe_ref.config import LayerConfig, LinearAmax, LinearState, Recipe, RouterConfig
from moe_ref.config.state import new_quantizer_state

EXPERTS, HIDDEN, WIDTH, STEPS = 2, 6, 4, 3
RECIPE = Recipe("delayed", amax_history_len=3)
CONFIG = LayerConfig(router=RouterConfig(num_experts=EXPERTS, topk=1), recipe=RECIPE)


def layer(seed: int = 0, **options) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(CONFIG, HIDDEN, WIDTH, init_std=1.0, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    return torch.randn(5, HIDDEN) * 2.0**step, torch.randn(5, HIDDEN)


def stepped(ours: MoELayer, steps: range) -> list[Tensor]:
    """Outputs of steps, two micro-batches each."""
    outputs = []
    for step in steps:
        for x, dy in (batch(2 * step), batch(2 * step + 1)):
            outputs.append(ours(x))
            outputs[-1].backward(dy)
            if ours.delay_wgrad:
                ours.backward_dw()
        ours.finish_batch()
    return [y.detach() for y in outputs]


def referenced(ours: MoELayer) -> tuple[list[Tensor], list[LinearState]]:
    """The same steps of the reference, and its states after them."""
    fresh = [new_quantizer_state(RECIPE, num_groups=EXPERTS) for _ in LinearState._fields]
    states, outputs = [LinearState(*fresh), LinearState(*fresh)], []
    for step in range(STEPS):
        amaxes = [LinearAmax(*(torch.zeros(EXPERTS) for _ in LinearAmax._fields)) for _ in states]
        for x, dy in (batch(2 * step), batch(2 * step + 1)):
            settings = {"states": [ours.router.state], "linear_states": [tuple(states)], "amaxes": [tuple(amaxes)]}
            outputs.append(moe_ref.moe_layer([x], [ours.layer_parameters], CONFIG, **settings).output[0])
            torch.autograd.grad(outputs[-1], ours.experts.linear_fc1.weight, dy)
        states = [
            LinearState(
                *(moe_ref.update_scales(state, RECIPE, role=role, reduced_amax=amax) for role, state, amax in operands)
            )
            for operands in (zip(LinearState._fields, *pair, strict=True) for pair in zip(states, amaxes, strict=True))
        ]
    return [y.detach() for y in outputs], states


def test_scales_follow_the_amaxes_as_in_the_reference():
    ours = layer()
    expected, states = referenced(ours)
    for y, y_right in zip(stepped(ours, range(STEPS)), expected, strict=True):
        torch.testing.assert_close(y, y_right)
    for linear, expected_states in zip(ours.experts.scaled, states, strict=True):
        for got, state in zip(linear.state, expected_states, strict=True):
            torch.testing.assert_close(got.amax_history, state.amax_history)
            torch.testing.assert_close(got.scale, state.scale)
            assert (state.scale != 1).all()


@pytest.mark.parametrize("options", [{"recompute": "moe"}, {"recompute": "moe_act"}, {"delay_wgrad": True}])
def test_a_layer_that_computes_again_or_later_sees_the_same(options):
    immediate, recomputed = layer(), layer(**options)
    stepped(immediate, range(1))
    stepped(recomputed, range(1))
    for x, y in zip(immediate.experts.buffers(), recomputed.experts.buffers(), strict=True):
        assert torch.equal(x, y)


def test_an_evaluation_changes_no_state():
    ours = layer()
    states = [x.clone() for x in ours.experts.buffers()]
    ours.eval()(batch(0)[0])
    with torch.no_grad():
        ours.train()(batch(0)[0])
    assert all(torch.equal(x, old) for x, old in zip(ours.experts.buffers(), states, strict=True))
    ours(batch(0)[0])
    assert not all(torch.equal(x, old) for x, old in zip(ours.experts.buffers(), states, strict=True))


@pytest.mark.parametrize("split", [False, True])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(split):
    ours = layer()
    stepped(ours, range(2))
    state = {name: x.clone() if isinstance(x, Tensor) else x for name, x in ours.state_dict().items()}
    assert {name for name in state if "extra" in name} == {f"experts.linear_fc{i}._extra_state" for i in (1, 2)}
    for i in (1, 2) if split else ():
        state = split_extra_state(state, num_experts=EXPERTS, prefix=f"experts.linear_fc{i}.")
    resumed = layer(seed=1)
    resumed.load_state_dict(state)
    for y, z in zip(stepped(ours, range(2, 3)), stepped(resumed, range(2, 3)), strict=True):
        assert torch.equal(y, z)


def test_a_checkpoint_without_scales_or_of_another_length_is_refused():
    ours, state = layer(), layer().state_dict()
    lost = {name: x for name, x in state.items() if name != "experts.linear_fc1._extra_state"}
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(lost)
    longer = MoELayer(replace(CONFIG, recipe=replace(RECIPE, amax_history_len=4)), HIDDEN, WIDTH)
    with pytest.raises(ValueError, match="amax_history is of 3 steps; it must be of 4 steps"):
        longer.load_state_dict(state)


def test_a_cast_keeps_the_dtype_of_scales():
    ours = layer().to(torch.bfloat16)
    assert ours.experts.linear_fc1.weight.dtype == torch.bfloat16
    assert {x.dtype for x in ours.experts.buffers()} == {torch.float32}


def test_states_and_the_recipe_belong_together():
    ours = layer()
    with pytest.raises(ValueError, match="linear_states is None; it must be given with a recipe of delayed"):
        moe_ref.moe_layer([batch(0)[0]], [ours.layer_parameters], CONFIG, states=[ours.router.state])
