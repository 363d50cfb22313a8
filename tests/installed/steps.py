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
    wrong = re.sub(r"^ {4}", "", module, flags=re.MULTILINE).strip() + "\n"
    mistake = wrong[wrong.index("    row_probs = None\n") : wrong.index("    counts")]
    (right,) = re.findall(r"^ {8}(row_probs = None if .*)$", TUTORIAL, re.MULTILINE)
    (declaration,) = re.findall(r"^ {4}(def declares.*\n) {4}( {4}return .*\n)", TUTORIAL, re.MULTILINE)
    corrected = wrong.replace(mistake, f"    {right}\n")
    return wrong, corrected, f"{corrected}\n\n{''.join(declaration)}"


def transcript() -> list[Printed]:
    """The commands of the tutorial with what they print; of gradients not the case, for it depends
    on the time that its reduction had.
    """
    found: list[Printed] = []
    for line in re.findall(r"^ {4}(.*)$", TUTORIAL, re.MULTILINE):
        if line.startswith("$ moe-conformance"):
            found.append((line.removeprefix("$ "), []))
        elif found and re.match(r"(CONFORMANT|NOT CONFORMANT|permute|FAIL|PASS|case:)", line):
            found[-1][1].append(line)
    return found


def stories() -> list[tuple[str, list[Any]]]:
    """The tutorial: its files, written as its text says, and its commands."""
    told = [command for command, _ in transcript()]
    assert told == [MINE, REPLAY, REPLAY, MINE, MINE]
    commands = [(f"$ {command}", ["call", command.split()]) for command in told]
    files = [("", ["write", {"my_kernels.py": text}]) for text in kernels()]
    return [("", ["cd", "story"]), files[0], *commands[:2], files[1], *commands[2:4], files[2], commands[4]]


def steps(wheel: Path) -> list[tuple[str, list[Any]]]:
    """(label, step) of everything; a command of the documents is its own label."""
    commands = []
    for run in RUNS:
        words = f"{run.command} {run.short}".replace("examples/", f"{ROOT}/examples/").split()
        commands.append((run.command, ["call", words]))
    wrong, _, right = kernels()
    modules = {"right": right, "wrong": wrong, "slow": SLOW}
    return [*commands, *stories(), *recipes.steps(wheel, modules)]
