"""permute_and_quantize in `moe_fast`: tile sizes change no bit, no other node enters the graph."""

from dataclasses import replace

import pytest
import torch

import moe_fast
from moe_fast.launch import tuning
from moe_ref.config import QuantizerState, Recipe
from tests.common.fast import interpreted, normal

pytestmark = interpreted
RECIPES = {
    "block": Recipe("block", fp8_format="hybrid"),
    "current": Recipe("current"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "mxfp8": Recipe("mxfp8", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
}
SMALL = tuning.PermuteQuantize(
    scatter=tuning.Tile(tokens=2, columns=32, num_warps=2),
    amax=tuning.Tile(tokens=4, columns=16, num_warps=2),
    scales=tuning.Tile(tokens=8, columns=1, num_warps=2),
    gather=tuning.Walk(tokens=16, columns=16, num_warps=2, steps=1, stages=1),
    tall=tuning.Walk(tokens=16, columns=16, num_warps=2, steps=1, stages=1),
    slab=2,
)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, a map in which an expert and a token are left out, and probs."""
    x, probs = normal(40, 160) * torch.exp2(torch.arange(40) % 17 - 8.0)[:, None], normal(40, 5, seed=1)
    chosen = normal(40, 5, seed=2) > 0.3
    chosen[:, 2] = chosen[5] = False
    return x, chosen, probs


@pytest.mark.parametrize("name", RECIPES)
def test_small_tiles_change_no_bit(name, monkeypatch):
    x, chosen, probs = inputs()
    state = QuantizerState(torch.arange(15.0).reshape(5, 3), torch.exp2(torch.arange(5) - 2.0) * 1.25)
    ways = (False,) if name == "nvfp4" else (False, True)
    settings = {"probs": probs, "state": state if name == "delayed" else None, "columnwise": name != "nvfp4"}

    def results() -> list[torch.Tensor]:
        out = moe_fast.permute_and_quantize(x, chosen, RECIPES[name], align=32, num_rows=320, **settings)
        reads = (moe_fast.codes, moe_fast.scales, moe_fast.amax)
        return [read(out.quantized, columnwise=columnwise) for read in reads for columnwise in ways] + [
            out.probs,
            *(out.state or ()),
        ]

    large = results()
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, permute_quantize=SMALL))
    assert all(torch.equal(a, b) for a, b in zip(large, results(), strict=True))


def test_what_needs_no_gradient_is_not_in_the_graph():
    x, chosen, probs = inputs()
    out = moe_fast.permute_and_quantize(x, chosen, RECIPES["block"], probs=probs.requires_grad_(), align=32)
    assert not moe_fast.dequantize(out.quantized).requires_grad and out.probs.requires_grad
