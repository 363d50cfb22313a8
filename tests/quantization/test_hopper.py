"""The quantiser for Hopper compiles without one; on a Hopper the gate judges its results."""

import pytest
import torch

import moe_fast
from moe_fast.quantization import gathered, hopper
from moe_fast.quantization.quantize import quantize_for_products
from moe_ref.config import Recipe
from tests.common.compiler import compiled
from tests.common.fast import interpreted, normal
from tests.experts.compile_gluon import compile_gluon

pytestmark = interpreted
SHARED_BYTES = 227 * 1024 // 2  # of one of two programs
PUBLIC, TURNED, ROWS = ("*u8", "*fp32", "*bf16", None), (None, "*fp32", None, "*u8"), ("*u8", "*fp32")
ABSENT = (None, None, None, None)
FORMS = {
    "public": (PUBLIC, PUBLIC, False),
    "both": ((*ROWS, None, None), TURNED, False),
    "squares": ((*ROWS, None, "*u8"), ABSENT, True),
}


@pytest.mark.parametrize(("forms", "splits"), [("public", False), ("squares", False), ("both", True)])
def test_both_directions_compile_and_two_programs_fit_a_multiprocessor(forms, splits):
    rows, columns, square = FORMS[forms]
    constants = {"FORMAT": "e4m3", "POWER_OF_TWO": splits, "SQUARE": square, "WHOLE": forms == "public", "BLOCK_G": 128}
    constants |= {"STAGES": hopper.WALK.stages, "num_warps": hopper.WALK.num_warps, "maxnreg": hopper.WALK.registers}
    tiles = {"x_desc": ("bf16", [128, 128])}
    shared, _, _ = compiled(
        compile_gluon,
        "quantization._hopper",
        "quantize_tiles_kernel",
        tiles,
        constants,
        forms={"row_form": rows, "column_form": columns},
        int64_names=("epsilon", "infinity"),
        absent=() if splits else ("splits_ptr",),
    )
    assert shared <= SHARED_BYTES


GATHERED = {
    "public": (PUBLIC, PUBLIC, True),
    "rows": ((*ROWS, None, None), ABSENT, False),
    "columns": (ABSENT, TURNED, False),
}


@pytest.mark.parametrize("forms", GATHERED)
def test_rows_that_are_gathered_compile_and_two_programs_fit(forms):
    rows, columns, public = GATHERED[forms]
    constants = {"FORMAT": "e5m2", "POWER_OF_TWO": True, "WHOLE": public, "BLOCK_G": 128, "STAGES": hopper.WALK.stages}
    constants |= {"num_warps": hopper.WALK.num_warps, "maxnreg": hopper.WALK.registers}
    shared, _, spilled = compiled(
        compile_gluon,
        "quantization._hopper_gathered",
        "quantize_gathered_kernel",
        {},
        constants,
        forms={"row_form": rows, "column_form": columns},
        int64_names=("epsilon", "infinity"),
        divisible=("tokens_ptr", "stride_tokens_t", "num_columns"),
    )
    assert shared <= SHARED_BYTES and not spilled


def test_which_tokens_are_gathered(monkeypatch):
    """Whole lines of two-byte numbers, on a Hopper, by blocks."""
    monkeypatch.setattr(gathered, "is_hopper", lambda device: True)
    block, x = Recipe("block"), torch.zeros(8, 160, dtype=torch.bfloat16)
    assert gathered.can_gather(x[:, :144], block) and gathered.can_gather(x.half(), block)
    for tokens in (x[:, :136], x[:, 4:148], x.T, x[:, ::2], x.float(), x[:0]):
        assert not gathered.can_gather(tokens, block)
    assert not gathered.can_gather(torch.empty(2**20, 2**12, dtype=torch.bfloat16, device="meta"), block)
    assert not any(gathered.can_gather(x, Recipe(scaling)) for scaling in ("mxfp8", "nvfp4", "current"))
    monkeypatch.undo()
    assert not gathered.can_gather(x, block)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("for_products", [False, True])
def test_the_kernel_is_launched_for_both_directions_of_two_byte_blocks_alone(for_products, square, monkeypatch):
    """Blocks of 128 that span rows of two-byte numbers, with the arguments of the other kernel."""
    launched = []
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "have_descriptors", lambda x: x.stride(1) == 1)
    monkeypatch.setattr(hopper, "quantize_tiles", lambda *arguments: launched.append(arguments))
    quantize = quantize_for_products if for_products else moe_fast.quantize
    x, role = normal(200, 96, seed=1, dtype=torch.bfloat16), "weight" if square else "input"
    quantize(x.float(), Recipe("block"), role=role, columnwise=True)
    quantize(x.T.contiguous().T, Recipe("block"), role=role, columnwise=True)
    quantize(x[:192], Recipe("mxfp8"), role=role, columnwise=True)
    if not square:
        quantize(x, Recipe("block"), role=role)
    assert launched == []
    quantize(x, Recipe("block"), role=role, columnwise=True)
    ((tensor, splits, forms, arguments, _, format, squares, public, grid),) = launched
    assert tensor.data_ptr() == x.data_ptr() and splits is None and (format, squares) == ("e4m3", square)
    assert arguments[:2] == x.shape and (grid.tiles, grid.settings["BLOCK_N"]) == (2, 128)
    assert len(forms) == 6 and (forms[3].scale_ptr is None) == square
    turned = forms[0 if square else 3].turned_ptr
    assert (turned is not None) == for_products == (not public)
