"""The kernel that quantises activations on a Hopper compiles without one; on one the gate judges
its results.
"""

import pytest
import torch

from moe_fast.experts import activated
from moe_fast.experts.activated import WALK, Activated, can_quantize_activated
from moe_fast.experts.activations import Settings
from moe_ref.config import Recipe
from tests.common.compiler import compiled
from tests.common.fast import interpreted
from tests.experts.compile_gluon import compile_gluon
from tests.quantization.test_hopper import ABSENT, PUBLIC, ROWS, SHARED_BYTES, TURNED

pytestmark = interpreted
FORMS = {
    "public": (PUBLIC, PUBLIC, True),
    "rows": ((*ROWS, None, None), ABSENT, False),
    "columns": (ABSENT, TURNED, False),
    "both": ((*ROWS, None, None), TURNED, False),
}
BLOCK = Recipe("block")
SWIGLU = Settings("swiglu", True, False)


@pytest.mark.parametrize(
    ("forms", "all_options", "dtype"),  # all options: α, a clamp, and a product that is rounded before the probs
    [("public", True, "fp16"), ("rows", False, "fp16"), ("columns", False, "bf16"), ("both", True, "bf16")],
)
def test_the_kernel_compiles_and_two_programs_fit_a_multiprocessor(forms, all_options, dtype):
    rows, columns, public = FORMS[forms]
    constants = {"FORMAT": "e4m3", "POWER_OF_TWO": True, "WHOLE": public, "BLOCK_G": 128}
    constants |= {"SCALED": all_options, "CLAMPED": all_options, "ROUND_FIRST": all_options}
    constants |= {"num_warps": WALK.num_warps, "maxnreg": WALK.registers}
    shared, _, spilled = compiled(
        compile_gluon,
        "experts._hopper_activated",
        "quantize_activated_kernel",
        {"h_desc": (dtype, [1, 128, 128])},
        constants,
        forms={"row_form": rows, "column_form": columns},
        int64_names=("offset", "clamp", "alpha", "epsilon", "infinity"),
    )
    assert shared <= SHARED_BYTES and not spilled


@pytest.fixture
def on_a_hopper(monkeypatch):
    monkeypatch.setattr(activated, "is_hopper", lambda device: True)
    monkeypatch.setattr(activated, "have_descriptors", lambda x: x.stride(0) % 8 == x.stride(1) % 8 == 0)


H, PROBS = torch.zeros(8, 272, dtype=torch.bfloat16), torch.zeros(8)


def taken(h=H, probs=PROBS, settings=SWIGLU, recipe=BLOCK) -> bool:
    return can_quantize_activated(Activated(h, probs, settings), recipe)


def test_which_activations_are_quantised_at_once(on_a_hopper):
    """Gates of σ before their values, in whole lines, on a Hopper, by blocks."""
    assert taken() and taken(H.half(), None) and taken(settings=Settings("quick_geglu", True, True, 1.0, 7.0, 1.5))
    for settings in (Settings("reglu", True, False), Settings("silu", False, False)):
        assert not taken(settings=settings)
    for options in ({"interleave": 1}, {"interleave": 17}, {"offset": -1.0}):
        assert not taken(settings=Settings("swiglu", True, False, **options))
    assert not taken(H[:, :268]) and not taken(H.float()) and not taken(probs=PROBS.double())
    assert not taken(recipe=Recipe("mxfp8")) and not taken(recipe=Recipe("current"))


def test_no_activation_is_quantised_at_once_on_another_device(on_a_hopper, monkeypatch):
    monkeypatch.setattr(activated, "is_hopper", lambda device: False)
    assert not taken()
