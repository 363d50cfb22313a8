"""What the driver does for the tests of this folder: the commands of the documents, the story of
the first verdict, and the recipes.
"""

import re
from pathlib import Path
from typing import Any

from tests.installed import recipes
from tests.installed.documented import MINE, ROOT, RUNS

REPLAY = "moe-conformance replay c8df06db888f --impl my_kernels"
Printed = tuple[str, list[str]]  # a command, and the lines that the page prints after it
SLOW = (
    "import time\n\nimport moe_ref\n\n\ndef permute(*given):\n    time.sleep(0.3)\n    return moe_ref.permute(*given)\n"
)


def kernels(page: str) -> str:
    """The first module that a page shows."""
    text = (ROOT / page).read_text()
    text = text[text.index("    from moe_ref") :]
    module = re.split(r"^(?=\S| {4}\$)", text, flags=re.MULTILINE)[0]
    return re.sub(r"^ {4}", "", module, flags=re.MULTILINE).strip() + "\n"


def transcript() -> list[Printed]:
    """The commands of the first verdict with what they print; of gradients not the case, for it
    depends on the time that its reduction had.
    """
    found: list[Printed] = []
    for line in re.findall(r"^ {4}(.*)$", (ROOT / "docs/first-verdict.md").read_text(), re.MULTILINE):
        if line.startswith("$ moe-conformance"):
            found.append((line.removeprefix("$ "), []))
        elif found and re.match(r"(CONFORMANT|NOT CONFORMANT|permute|FAIL|PASS|case:)", line):
            found[-1][1].append(line)
    return found


def stories() -> list[tuple[str, list[Any]]]:
    """The first verdict: its files, written as its text says, and its commands."""
    wrong = kernels("docs/first-verdict.md")
    old = wrong[wrong.index("    row_probs = None\n") : wrong.index("    counts")]
    (right,) = re.findall(r"^ {8}(row_probs = None if .*)$", (ROOT / "docs/first-verdict.md").read_text(), re.MULTILINE)
    corrected = wrong.replace(old, f"    {right}\n")
    declared = corrected + '\n\ndef declares(function):\n    return {"accumulator": "storage"}\n'
    told = [command for command, _ in transcript()]
    assert told == [MINE, REPLAY, REPLAY, MINE, MINE]
    commands = [(f"$ {command}", ["call", command.split()]) for command in told]
    files = [("", ["write", {"my_kernels.py": text}]) for text in (wrong, corrected, declared)]
    return [("", ["cd", "story"]), files[0], *commands[:2], files[1], *commands[2:4], files[2], commands[4]]


def steps(wheel: Path) -> list[tuple[str, list[Any]]]:
    """(label, step) of everything; a command of the documents is its own label."""
    commands = []
    for run in RUNS:
        words = f"{run.command} {run.short}".replace("examples/", f"{ROOT}/examples/").split()
        commands.append((run.command, ["call", words]))
    modules = {"right": kernels("docs/judge-a-kernel.md"), "wrong": kernels("docs/first-verdict.md"), "slow": SLOW}
    return [*commands, *stories(), *recipes.steps(wheel, modules)]
