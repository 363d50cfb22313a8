"""Fused activations and quantisers in `moe_fast`: tiles of other sizes change no bit, and
unsupported probs are declared.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_fast
from moe_fast.launch import tuning
from moe_ref.config import Recipe
from tests.common.fast import interpreted, normal

pytestmark = interpreted
WALK = tuning.Walk(tokens=32, columns=32, num_warps=4, steps=2, stages=1)
KINDS = ("rows", "columns", "backward", "low", "low_backward", "groups")
SMALL = replace(tuning.INTERPRETER.activate_quantize, **dict.fromkeys(KINDS, WALK))


def results(recipe: Recipe, **settings: Any) -> list[torch.Tensor]:
    """Codes, scales and amax of the activation and of its gradient, and d_probs."""
    h, d_out, probs = normal(96, 256, dtype=torch.bfloat16), normal(96, 128, seed=1).bfloat16(), normal(96, seed=2)
    settings |= {"probs": probs, "splits": torch.tensor([32, 0, 64]), "columnwise": True}
    gradient = moe_fast.glu_backward_and_quantize(d_out, h, recipe, **settings)
    forms = (moe_fast.glu_and_quantize(h, recipe, **settings).quantized, gradient.quantized)
    reads = (moe_fast.codes, moe_fast.scales, moe_fast.amax)
    return [read(q, columnwise=columnwise) for q in forms for read in reads for columnwise in (False, True)] + [
        gradient.d_probs
    ]


@pytest.mark.parametrize(
    ("scaling", "settings"),
    [("current", {}), ("block", {"clamp": 1.0, "interleave": 1}), ("mxfp8", {"interleave": 8}), ("nvfp4", {})],
)
def test_small_tiles_change_no_bit(scaling, settings, monkeypatch):
    recipe = Recipe("nvfp4", hadamard=False, stochastic_rounding=False) if scaling == "nvfp4" else Recipe(scaling)
    *large, d_probs = results(recipe, **settings)
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, activate_quantize=SMALL))
    *small, small_d_probs = results(recipe, **settings)
    assert all(torch.equal(a, b) for a, b in zip(large, small, strict=True))
    # why: float32 sums of 128 terms in another order
    torch.testing.assert_close(small_d_probs, d_probs, rtol=1e-5, atol=1e-4)


def test_probs_that_no_kernel_reads_are_declared():
    h, recipe = torch.zeros(2, 4), Recipe("current")
    assert moe_fast.supports("glu_and_quantize", h, recipe, probs=torch.zeros(2)) is None
    assert "probs" in moe_fast.supports("glu_and_quantize", h, recipe, probs=torch.zeros(2).to(torch.float8_e4m3fn))
