"""Which tokens the activated product gathers on a Hopper. The gate there judges the results."""

import pytest
import torch

from moe_fast.experts import activated_linear
from moe_fast.experts.activated_linear import MOST_GATHERED, can_gather_activated
from moe_fast.experts.activations import Settings
from moe_fast.launch import backend
from tests.common.fast import interpreted

pytestmark = interpreted
ROWS = 4096
TOKENS, PROBS = torch.zeros(64, 160, dtype=torch.bfloat16), torch.zeros(64, 2)


def weight(width: int = 48) -> torch.Tensor:
    return torch.zeros(2, 2 * width, 160, dtype=torch.bfloat16)


@pytest.fixture
def on_a_hopper(monkeypatch):
    monkeypatch.setattr(activated_linear, "is_hopper", lambda device: True)
    monkeypatch.setattr(activated_linear, "tile_of", lambda *a: TILE)
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)


class TILE:
    rows = activated_linear.hopper.MATMUL_ROWS


def gathers(tokens=TOKENS, num_rows=ROWS, of=None, bias=None, probs=PROBS, **settings) -> bool:
    activation = Settings(**({"kind": "swiglu", "gated": True, "round_first": False} | settings))
    return can_gather_activated(tokens, num_rows, weight() if of is None else of, bias, probs, activation)


def test_tokens_in_whole_lines_without_a_gradient_are_gathered(on_a_hopper):
    assert gathers() and gathers(bias=torch.zeros(2, 96)) and gathers(of=weight(MOST_GATHERED))
    assert not gathers(TOKENS[:, 8:]) and not gathers(TOKENS.float()) and not gathers(TOKENS[:0])
    assert not gathers(num_rows=0) and not gathers(of=weight(MOST_GATHERED + 16)) and not gathers(of=weight(44))
    assert not gathers(probs=PROBS.double()) and not gathers(gated=False) and not gathers(interleave=16)


@pytest.mark.parametrize("name", ["tokens", "of", "bias", "probs"])
def test_rows_are_written_where_an_input_needs_a_gradient(name, on_a_hopper):
    inputs = {"tokens": TOKENS, "of": weight(), "bias": torch.zeros(2, 96), "probs": PROBS}
    wanted = inputs | {name: inputs[name].clone().requires_grad_()}
    assert gathers(**inputs) and not gathers(**wanted)
    with torch.no_grad():
        assert gathers(**wanted)


def test_no_token_is_gathered_on_another_device(on_a_hopper, monkeypatch):
    monkeypatch.setattr(activated_linear, "is_hopper", lambda device: False)
    assert not gathers()
