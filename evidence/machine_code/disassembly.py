"""nvdisasm's listing of a kernel as instructions: what each reads and writes, and where it goes.

nvdisasm prints a column for each register, with `^` where the instruction writes it, `v` where it
reads it, `x` for both, and `:` where it only lives on:

    /*0090*/   IABS R0, R0 ;   // |  42 x: :
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

BANKS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
TABLE = "// |"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+)(.*?)\s*;")
# A product whose first factor is in registers: it reads the last two of its descriptors' four
# registers.
FACTOR_IN_REGISTERS = re.compile(r" R\d+, R\d+(?:\.reuse)?, gdesc\[UR(\d+)\]")
TARGET = re.compile(r"`\(([^)]+)\)")
ENDS = ("EXIT", "RET", "KILL")
BRANCHES = ("BRA", "BRX", "JMP")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    address: int
    guard: str  # the predicate, or ""
    opcode: str
    operands: str
    reads: frozenset[str]
    writes: frozenset[str]
    targets: tuple[str, ...]  # labels of a branch, of a call, or of where paths meet again

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def text(self) -> str:
        return f"{self.guard}{self.opcode}{self.operands}"


@dataclass(frozen=True)
class Section:
    """The code of one kernel with its internal functions; labels are indices of instructions."""

    code: list[Instruction]
    labels: dict[str, int]

    def successors(self) -> list[list[int]]:
        """The instructions that may come after each; a call returns."""
        meeting: dict[str, str] = {}  # the label at which the paths of a barrier meet
        result = []
        for i, instruction in enumerate(self.code):
            following = [i + 1] if i + 1 < len(self.code) else []
            goals = [self.labels[name] for name in instruction.targets if name in self.labels]
            barrier = instruction.operands.strip().split(",")[0]
            if instruction.base == "BSSY":
                meeting[barrier] = instruction.targets[0]
            elif instruction.base == "BSYNC" and barrier in meeting:
                following = [self.labels[meeting[barrier]]] + (following if instruction.guard else [])
            elif instruction.base in BRANCHES:
                may_diverge = re.search(r"\.(DIV|U)\b", instruction.opcode)
                has_predicate = re.search(r"\bU?P\d\b", TARGET.sub("", instruction.operands))
                is_unconditional = not instruction.guard and not may_diverge and not has_predicate
                following = goals if is_unconditional and goals else [*goals, *following]
            elif instruction.base == "WARPSYNC":
                following = [*goals, *following]
            elif instruction.base in ENDS:
                following = following if instruction.guard else []
            result.append(following)
        return result


def sections(listing: str) -> Iterator[Section]:
    """Each code section of a listing."""
    header: list[str] = []
    columns: dict[int, str] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if line.startswith("//-----"):
            if code:
                yield Section(code, labels)
            header, columns, code, labels = [], {}, [], {}
        text, bar, marks = line.partition(TABLE)
        if label := re.match(r"([.$\w]+):", text):
            labels[label[1]] = len(code)
        match = INSTRUCTION.search(text)
        if not bar or (not match and columns):
            continue
        if match:
            columns = columns or _columns(header)
            code.append(_instruction(match, line, marks, columns))
        elif re.search(r"\d|GPR|PRED", marks):
            header.append(marks)
    if code:
        yield Section(code, labels)


def _instruction(match: re.Match[str], line: str, marks: str, columns: dict[int, str]) -> Instruction:
    address, guard, opcode, operands = match.groups()
    named = re.search(r"BRANCH_TARGETS ([^\"]*)", line)
    targets = tuple(TARGET.findall(operands)) or tuple(re.split(r"[,\s]+", named[1].strip()) if named else ())
    at = {mark: {name for column, name in columns.items() if marks[column : column + 1] == mark} for mark in "^vx"}
    writes = at["^"] | at["x"]
    if opcode.startswith("LDGSTS"):  # it writes shared memory only, and nvdisasm marks registers
        writes = set()
    reads = set() if opcode.startswith("CALL") else at["v"] | at["x"]  # its marks are those of the callee
    if factor := FACTOR_IN_REGISTERS.match(operands):
        reads = reads - {f"UR{int(factor[1]) + i}" for i in (0, 1)}
    return Instruction(int(address, 16), guard or "", opcode, operands, frozenset(reads), frozenset(writes), targets)


def _columns(header: list[str]) -> dict[int, str]:
    """The register of each column, from the lines above a table.

    The number of a register stands in its column from above to below.
    """
    titles = next(line for line in header if "GPR" in line)
    numbers = [line for line in header if line is not titles]
    bars = [i for i, letter in enumerate(titles) if letter == "|"]
    columns = {}
    for left_bar, right_bar in pairwise([-1, *bars]):
        bank = BANKS[titles[left_bar + 1 : right_bar].strip()]
        for column in range(numbers[-1].index("#", left_bar + 1) + 1, right_bar):
            if numbers[-1][column].isdigit():
                digits = "".join(line[column] for line in numbers if column < len(line)).strip()
                columns[column] = f"{bank}{int(digits)}"
    return columns
