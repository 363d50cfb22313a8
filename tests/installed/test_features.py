"""docs/features.md: every feature has a command that the programs understand."""

import re
import shlex

import pytest

from conformance.cli import parser
from conformance.core.where import parsed
from conformance.engine.options import Options, flags
from tests.installed.documented import ROOT

ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.*?) \| (exists|no) \| (?:`(.+)`)? ?\|$", re.MULTILINE)
PAGE = (ROOT / "docs/features.md").read_text()


def understood(command: str) -> None:
    """Raise SystemExit if a program would refuse the command's verb or options."""
    program, *words = shlex.split(command)
    if program == "pytest":
        ours = {f"--moe-{flag.removeprefix('--')}" for flag, _ in flags()} | {"--pyargs"}
        if unknown := {word for word in words if word.startswith("--")} - ours:
            raise SystemExit(f"{unknown}")
        return
    if program == "torchrun":
        words = words[words.index("conformance") + 1 :]
    given = parser().parse_args(words)
    if "impl" in given:
        parsed(Options.parsed(given).where, "--where")


def rows(page: str) -> list[tuple[int, str, str]]:
    """(number, state, command) of each feature."""
    return [(int(number), state, command) for number, _, _, state, command in ROW.findall(page)]


def test_the_page_has_33_features_in_order():
    assert [number for number, _, _ in rows(PAGE)] == [*range(1, 34)]
    assert len(re.findall(r"^\| \d", PAGE, re.MULTILINE)) == 33


@pytest.mark.parametrize(("number", "state", "command"), rows(PAGE), ids=lambda x: "")
def test_the_command_of_a_feature_is_understood(tmp_path, monkeypatch, number, state, command):
    monkeypatch.chdir(tmp_path)
    for name in ("known.toml", "speed.json", "verdict.json"):
        (tmp_path / name).touch()
    assert bool(command) == (state != "no")
    if command:
        understood(command)


def test_only_what_needs_a_community_is_missing():
    before, after = PAGE.split("## What needs a community")
    assert {state for _, state, _ in rows(before)} == {"exists"}
    assert {state for _, state, _ in rows(after)} == {"no"}


@pytest.mark.parametrize(
    "command",
    [
        "moe-conformance run --impl x --no-such-option",
        "moe-conformance fly",
        "pytest --pyargs conformance --moe-speed x",
        "torchrun -m conformance run --impl x --fast",
    ],
)
def test_a_command_that_is_not_understood_is_found(command):
    with pytest.raises(SystemExit):
        understood(command)
