"""A call of the layer like an earlier one skips the checks; any other call is checked in full."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

import moe_fast
from moe_fast.launch import legal
from moe_ref.config import LayerConfig, LayerParameters, RouterConfig
from moe_ref.config.state import new_state
from tests.common.fast import interpreted, normal

pytestmark = interpreted
ROUTER = RouterConfig(num_experts=4, topk=2)
PARAMETERS = LayerParameters(normal(4, 8, seed=1), normal(4, 12, 8, seed=2), normal(4, 8, 6, seed=3))


@pytest.fixture
def checks(monkeypatch) -> list[str]:
    """The checks that run, of the layer and of one stage; no call is known yet."""
    ran: list[str] = []
    monkeypatch.setattr(legal, "_passed", {})
    for file, name in (("layer.call", "check_layer"), ("permutation.permute", "check_permute")):
        module = import_module(f"moe_fast.{file}")
        check = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *of, check=check, name=name: ran.append(name) or check(*of))
    return ran


CONFIG = LayerConfig(router=ROUTER)
OTHERS = {
    "tokens": {"tokens": 6},
    "dtype": {"dtype": torch.bfloat16},
    "gradient": {"gradient": True},
    "config": {"config": replace(CONFIG, clamp=1.0)},
    "evaluation": {"training": False},
    "sequences": {"batch_size": 5},
    "recompute": {"recompute": "moe_act"},
    "mask": {"padding_mask": torch.zeros(5, dtype=torch.bool)},
}


def call(tokens=5, dtype=torch.float32, gradient=False, config=CONFIG, parameters=PARAMETERS, **settings):
    x = normal(tokens, 8).to(dtype).requires_grad_(gradient)
    parameters = LayerParameters(*(None if p is None else p.to(dtype) for p in parameters))
    return moe_fast.moe_layer(x, parameters, config, state=new_state(ROUTER), **settings).output


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_call_is_checked_once_and_any_other_anew(changes, checks):
    first = call()
    assert checks == ["check_layer", "check_permute"]
    assert torch.equal(call(), first) and len(checks) == 2
    call(**changes)
    assert checks == ["check_layer", "check_permute"] * 2


def test_an_illegal_call_is_refused_every_time_also_after_legal_ones(checks):
    call()
    for _ in range(2):
        with pytest.raises(ValueError, match="fc1_weight"):
            call(parameters=PARAMETERS._replace(fc1_weight=normal(3, 12, 8)))
        with pytest.raises(ValueError, match="recompute"):
            call(recompute="rows")
    assert checks.count("check_layer") == 5


def test_after_a_known_call_public_functions_check_again(checks):
    """Checks are off within the known call alone."""
    call(), call()
    with pytest.raises(ValueError, match="routing_map"):
        moe_fast.permute(normal(5, 8), torch.ones(4, 4, dtype=torch.bool))


def test_few_calls_are_remembered(monkeypatch, checks):
    monkeypatch.setattr(legal, "MOST", 3)
    for tokens in range(1, 8):
        call(tokens)
        assert len(legal._passed) <= 3
