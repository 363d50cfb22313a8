"""Every kernel's machine code is read where real sizes compile it, and known faults are found."""

from pathlib import Path

import pytest

from evidence.machine_code.disassembly import Section, sections
from evidence.machine_code.findings import cast_twice_used, extracted_late, unwritten
from tests.common.compiler import compiled
from tests.common.fast import interpreted
from tests.evidence.every_kernel import casts_twice_used, first_of_every_kernel

WRONG = Path(__file__).parent / "miscompiled.sass"  # by ptxas 12.8.93: four over six at 4 × 512, registers R2, R51, R53
WRONG_PTX = Path(__file__).parent / "miscompiled.ptx"  # what it was made of
SCALES_ALONE = "moe_fast.fused._permute_and_quantize.row_scales_kernel"  # it has a format of codes, and casts none
LATE = "PRMT R51, R2, 0x7610, R51"


def code(listing: str) -> Section:
    (section,) = sections(listing)
    return section


def moved_to_the_front(listing: str) -> str:
    """The listing with each half moved to its register before the code that reads it."""
    lines = listing.splitlines()
    late = [line for line in lines if "0x7610" in line]
    first_lines = [line for line in lines if "PACK_AB_MERGE_C R2" in line]
    remaining_lines = [line for line in lines if line not in late + first_lines]
    return "\n".join([*remaining_lines[:4], *first_lines, *late, *remaining_lines[4:]])


@interpreted
def test_a_configuration_of_every_kernel_writes_its_registers_before_it_reads_them():
    missing, defects, kernels = compiled(first_of_every_kernel)
    assert missing == []
    assert defects == {}
    assert kernels > 0


@interpreted
def test_no_cast_to_eight_bits_is_stored_by_bytes_and_packed_at_any_tile_of_the_tables():
    defects, counted = compiled(casts_twice_used)
    assert defects == []
    assert [name for name, casts in counted.items() if not casts] == [SCALES_ALONE]
    assert len(counted) > 1


def test_registers_that_are_stored_before_they_are_written_are_found():
    miscompiled = code(WRONG.read_text())
    assert {text.split(": ")[1] for text in unwritten(miscompiled)} == {
        "nothing writes R51 before", "nothing writes R53 before"
    }  # fmt: skip
    assert [text.split(": ")[1] for text in extracted_late(miscompiled.code)] == ["R51 gets the cast at 0x2170"]


def test_the_same_code_in_order_is_right():
    in_order = code(moved_to_the_front(WRONG.read_text()))
    assert LATE in [instruction.text for instruction in in_order.code]
    assert unwritten(in_order) + extracted_late(in_order.code) == []


def test_a_stale_value_that_is_stored_before_the_cast_is_found():
    older = "        /*1b00*/   MOV R51, RZ ;".ljust(62) + "// |   3  ^     |\n"
    lines = WRONG.read_text().splitlines(keepends=True)
    stale = code("".join([*lines[:4], older, *lines[4:]]))
    assert not any("R51" in text.split(": ")[1] for text in unwritten(stale))
    assert extracted_late(stale.code)


@pytest.mark.parametrize("use", ["st.shared.b8", "mov.b32"])
def test_a_cast_with_one_kind_of_use_is_right_and_with_both_is_wrong(use):
    ptx = WRONG_PTX.read_text()
    assert cast_twice_used(ptx) == ["%rs1", "%rs2"]
    assert cast_twice_used("\n".join(line for line in ptx.splitlines() if use not in line)) == []
