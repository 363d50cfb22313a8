"""docs/features.json: every feature has a command that the programs understand."""

import json
import shlex

import pytest

from conformance.cli import parser
from conformance.core.where import parsed
from conformance.engine.options import Options, flags
from tests.installed.documented import ROOT

FEATURES = json.loads((ROOT / "docs/features.json").read_text())
COMMANDS = [feature["command"] for feature in FEATURES if feature["command"]]


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
    arguments = parser().parse_args(words)
    if "impl" in arguments:
        parsed(Options.parsed(arguments).where, "--where")


def test_the_page_names_the_number_of_features_and_of_those_that_do_not_exist():
    page = " ".join((ROOT / "docs/commands.md").read_text().split())
    assert f"lists {len(FEATURES)} features" in page
    assert len(FEATURES) - len(COMMANDS) == 2 and "Two of them do not exist here" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_of_a_feature_is_understood(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for name in ("known.toml", "speed.json", "verdict.json"):
        (tmp_path / name).touch()
    understood(command)


def test_only_what_needs_a_community_is_missing():
    missing = [feature["feature"] for feature in FEATURES if not feature["command"]]
    assert [name.split()[0] for name in missing] == ["published", "review"]


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
