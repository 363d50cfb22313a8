"""What is wrong with a kernel's code, as far as it shows without a run.

- `unwritten`: a register is read, and no path to the first execution of that read writes it.
- `extracted_late`: half of two packed 8-bit casts is moved to a register after the register was
  stored. ptxas 12.8 and 12.9 make this of `cast_twice_used`.
- `cast_twice_used`: in PTX, the 16 bits of an 8-bit cast are stored by bytes and also packed.
- `spills`: loads and stores of local memory, which registers are spilled to.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from evidence.machine_code.compiling import Compiled, listing
from evidence.machine_code.disassembly import Instruction, Section, sections

NEAR = 160  # the most instructions between a cast and the move of its half
SPILL = "STL"
MERGES = ("PRMT", "LOP3", "P2R")  # instructions that may fill a part of a register, and keep its other bits
CAST = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+(%rs\d+)")
BYTES = re.compile(r"st\.(?:shared|global)\S*\.b8\s+\[[^\]]*\],\s*\{?([^;}]*)")
PACKED = re.compile(r"mov\.b32\s+%r\d+, \{([^}]*)\}")


class Report(NamedTuple):
    """The findings of one configuration."""

    instructions: int
    spills: int
    findings: list[str]  # each is a defect


def report(compiled: Compiled) -> Report:
    """What is wrong with a configuration's code."""
    code_sections = list(sections(listing(compiled.cubin)))
    defects = [f"PTX {register}: the cast is stored by bytes and packed" for register in cast_twice_used(compiled.ptx)]
    for section in code_sections:
        defects += unwritten(section) + extracted_late(section.code)
    return Report(
        sum(len(section.code) for section in code_sections), sum(spills(section) for section in code_sections), defects
    )


def spills(section: Section) -> int:
    """Instructions that load or store local memory."""
    return sum(instruction.base in ("LDL", SPILL) for instruction in section.code)


def cast_twice_used(ptx: str) -> list[str]:
    """Registers that hold two 8-bit casts and are stored by bytes and also packed."""
    cast, stored, packed = (
        {register for text in pattern.findall(ptx) for register in re.findall(r"%rs\d+", text)}
        for pattern in (CAST, BYTES, PACKED)
    )
    return sorted(cast & stored & packed)


def unwritten(section: Section) -> list[str]:
    """Reads of registers that nothing writes before the read is executed first."""
    successors = section.successors()
    writes = _writes(section, successors)
    defects = []
    for i, register in _not_surely_written(section.code, successors, writes):
        reaching = _reachable([0], successors, without=i)
        writers = [j for j in reaching if j != i and register in writes[j]]
        if i not in _reachable([k for j in writers for k in successors[j]], successors, without=None):
            instruction = section.code[i]
            defects.append(f"{instruction.address:#x} {instruction.text}: nothing writes {register} before")
    return defects


def extracted_late(code: list[Instruction]) -> list[str]:
    """Stores of a register that gets its half of two packed casts only after them."""
    defects = []
    for j, move in enumerate(code):
        out = re.match(r" (R\d+), (R\d+)(?:\.reuse)?, 0x7610, \1\b", move.operands)
        if move.base != "PRMT" or out is None:
            continue
        register, pair = out.groups()
        nearby = range(j - 1, max(j - NEAR, 0), -1)
        cast = next((i for i in nearby if pair in code[i].writes), None)
        if cast is None or not re.match(r"F2FP\..*MERGE_C", code[cast].opcode):
            continue
        for i in nearby:
            if register in code[i].writes:
                break
            if code[i].base == "STS" and register in code[i].reads:
                instruction = code[i]
                defects.append(
                    f"{instruction.address:#x} {instruction.text}: {register} gets the cast at {move.address:#x}"
                )
    return defects


def _writes(section: Section, successors: list[list[int]]) -> list[frozenset[str]]:
    """What each instruction writes; a call writes what its function may write."""
    result = [instruction.writes for instruction in section.code]
    for i, instruction in enumerate(section.code):
        starts = [section.labels[name] for name in instruction.targets if name in section.labels]
        if instruction.base == "CALL" and starts:
            result[i] = frozenset().union(
                *(section.code[j].writes for j in _reachable(starts, successors, without=None))
            )
    return result


def _not_surely_written(
    code: list[Instruction], successors: list[list[int]], writes: list[frozenset[str]]
) -> Iterable[tuple[int, str]]:
    """(instruction, register) of reads that some path reaches without a write of the register.

    Instructions that fill a part of a register, and spills, are no reads: ptxas keeps predicates as
    bits of a register, and saves registers that hold nothing yet.
    """
    surely: dict[int, frozenset[str]] = {0: frozenset()}
    todo = [0]
    while todo:
        i = todo.pop()
        written = surely[i] | writes[i]
        for j in successors[i]:
            both = surely[j] & written if j in surely else written
            if both != surely.get(j):
                surely[j] = both
                todo.append(j)
    for i in sorted(surely):
        instruction = code[i]
        exempt = (
            instruction.writes
            if instruction.base in MERGES
            else instruction.reads
            if instruction.base == SPILL
            else frozenset()
        )
        for register in sorted(instruction.reads - surely[i] - exempt):
            yield i, register


def _reachable(starts: list[int], successors: list[list[int]], without: int | None) -> set[int]:
    """The instructions that are on paths from the starts. No path goes on after `without`."""
    reached: set[int] = set()
    todo = list(starts)
    while todo:
        i = todo.pop()
        if i not in reached:
            reached.add(i)
            todo += successors[i] if i != without else []
    return reached
