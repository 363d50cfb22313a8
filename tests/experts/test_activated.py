"""The quantising activation for Hopper compiles without one; on a Hopper the gate judges its
results.
"""

import pytest
import torch

from moe_fast.experts.activations import Settings
from moe_fast.fused import hopper
from moe_fast.quantization.hopper import WALK
from moe_ref.config import Recipe
from tests.common.compiler import compiled
from tests.common.fast import interpreted
from tests.experts.compile_gluon import compile_gluon
from tests.quantization.test_hopper import ABSENT, PUBLIC, ROWS, SHARED_BYTES, TURNED

pytestmark = interpreted
FORMS = {
    "public": (PUBLIC, PUBLIC, True),
    "rows": ((*ROWS, None, None), ABSENT, False),
    "both": ((*ROWS, None, None), TURNED, False),
}
BLOCK = Recipe("block")
SWIGLU = Settings("swiglu", True, False)


def shared_bytes(kernel: str, tiles: tuple[str, ...], forms: str, more: bool) -> int:
    """Of the kernel; `more`: with α, a clamp, and a product that is rounded before the probs."""
    rows, columns, whole = FORMS[forms]
    constants = {"FORMAT": "e4m3", "POWER_OF_TWO": True, "WHOLE": whole, "BLOCK_G": 128}
    constants |= {"SCALED": more, "CLAMPED": more, "ROUND_FIRST": more}
    constants |= {"num_warps": WALK.num_warps, "maxnreg": WALK.registers}
    shared, _, _ = compiled(
        compile_gluon,
        "fused._hopper_activated",
        kernel,
        {name: ("bf16", [1, 128, 128]) for name in tiles},
        constants,
        forms={"row_form": rows, "column_form": columns},
        wide=("offset", "clamp", "alpha", "epsilon", "infinity"),
    )
    return shared


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("forms", FORMS)
def test_activations_compile_and_two_programs_fit_a_multiprocessor(forms, more):
    assert shared_bytes("quantize_activated_tiles_kernel", ("h_desc",), forms, more) <= SHARED_BYTES


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("forms", FORMS)
def test_gradients_compile_and_two_programs_fit_a_multiprocessor(forms, more):
    assert shared_bytes("quantize_gradient_tiles_kernel", ("d_desc", "h_desc"), forms, more) <= SHARED_BYTES


def test_which_activations_are_quantised_at_once(monkeypatch):
    """Gates of σ before their values, in whole lines, on a Hopper, by blocks."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "have_descriptors", lambda x: x.stride(2) == 1 and x.stride(1) % 8 == 0)
    h, probs = torch.zeros(8, 272, dtype=torch.bfloat16), torch.zeros(8)
    assert hopper.can_activate(h, probs, SWIGLU, BLOCK) and hopper.can_activate(h.half(), None, SWIGLU, BLOCK)
    for settings in (Settings("reglu", True, False), Settings("swiglu", True, False, interleave=1)):
        assert not hopper.can_activate(h, probs, settings, BLOCK)
    assert not hopper.can_activate(h, probs, Settings("swiglu", True, False, offset=-1.0), BLOCK)
    assert not hopper.can_activate(h, probs.double(), SWIGLU, BLOCK)
    assert not hopper.can_activate(h.float(), probs, SWIGLU, BLOCK)
    assert not hopper.can_activate(h, probs, SWIGLU, Recipe("mxfp8"))
    monkeypatch.undo()
    assert not hopper.can_activate(h, probs, SWIGLU, BLOCK)
