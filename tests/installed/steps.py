"""What the driver does for the tests of this folder: the commands of the documents, the tutorial,
and the recipes.
"""

import re
from pathlib import Path
from typing import Any

from tests.installed import recipes
from tests.installed.documented import MINE, ROOT, RUNS

TUTORIAL = (ROOT / "docs/judge-a-kernel.md").read_text()
REPLAY = "moe-conformance replay c8df06db888f --impl my_kernels"
Printed = tuple[str, list[str]]  # a command, and the lines that the page prints after it
SLOW = (
    "import time\n\nimport moe_ref\n\n\ndef permute(*given):\n    time.sleep(0.3)\n    return moe_ref.permute(*given)\n"
)


def kernels() -> tuple[str, str, str]:
    """The module of the tutorial: with the mistake, corrected, and with its declaration."""
    text = TUTORIAL[TUTORIAL.index("    from moe_ref") :]
    module = re.split(r"^(?=\S| {4}\$)", text, flags=re.MULTILINE)[0]
    mistaken = re.sub(r"^ {4}", "", module, flags=re.MULTILINE).strip() + "\n"
    mistake = mistaken[mistaken.index("    row_probs = None\n") : mistaken.index("    counts")]
    (correction,) = re.findall(r"^ {8}(row_probs = None if .*)$", TUTORIAL, re.MULTILINE)
    (declaration,) = re.findall(r"^ {4}(def declares.*\n) {4}( {4}return .*\n)", TUTORIAL, re.MULTILINE)
    corrected = mistaken.replace(mistake, f"    {correction}\n")
    return mistaken, corrected, f"{corrected}\n\n{''.join(declaration)}"


def transcript() -> list[Printed]:
    """The commands of the tutorial with what they print; of gradients not the case, for it depends
    on the time that its reduction had.
    """
    printed: list[Printed] = []
    for line in re.findall(r"^ {4}(.*)$", TUTORIAL, re.MULTILINE):
        if line.startswith("$ moe-conformance"):
            printed.append((line.removeprefix("$ "), []))
        elif printed and re.match(r"(CONFORMANT|NOT CONFORMANT|permute|FAIL|PASS|case:)", line):
            printed[-1][1].append(line)
    return printed


def stories() -> list[tuple[str, list[Any]]]:
    """The tutorial: its files, written as its text says, and its commands."""
    commands_shown = [command for command, _ in transcript()]
    assert commands_shown == [MINE, REPLAY, REPLAY, MINE, MINE]
    commands = [(f"$ {command}", ["call", command.split()]) for command in commands_shown]
    files = [("", ["write", {"my_kernels.py": text}]) for text in kernels()]
    return [("", ["cd", "story"]), files[0], *commands[:2], files[1], *commands[2:4], files[2], commands[4]]


def steps(wheel: Path) -> list[tuple[str, list[Any]]]:
    """(label, step) of everything; a command of the documents is its own label."""
    commands = []
    for run in RUNS:
        words = f"{run.command} {run.short}".replace("examples/", f"{ROOT}/examples/").split()
        commands.append((run.command, ["call", words]))
    mistaken, _, declaring = kernels()
    modules = {"right": declaring, "wrong": mistaken, "slow": SLOW}
    return [*commands, *stories(), *recipes.steps(wheel, modules)]
