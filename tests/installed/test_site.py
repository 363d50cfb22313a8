"""The documentation site builds without a warning, and its commands exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import calls, layer_picture
from conformance.catalogue import CONTRACTS
from conformance.cli import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^ {4}(?:\$ )?(moe-conformance [a-z].*(?:\\\n.*)*)", re.MULTILINE)


def build(config: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_site_builds_and_the_reference_is_in_it(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The router's matrix product." in (tmp_path / "reference/router/index.html").read_text()
    assert "https://fonts" not in (tmp_path / "index.html").read_text()


def test_a_broken_link_is_an_error(tmp_path):
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n\n[nowhere](nowhere.md)\n")
    small = config | {"docs_dir": str(tmp_path / "docs"), "nav": [{"Home": "index.md"}], "plugins": ["search"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small))
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0


def test_every_page_of_the_documents_is_in_the_menu():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_commands(page):
    for command in COMMAND.findall(page.read_text()):
        arguments = shlex.split(command, comments=True)[1:]
        try:
            parser().parse_args(arguments)
        except SystemExit as left:
            assert left.code == 0, command


def test_a_command_with_an_unknown_option_is_found():
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--impl", "x", "--no-such-option"])


def test_the_picture_of_the_front_page_is_drawn_from_its_figures():
    record = json.loads(layer_picture.FIGURES.read_text())
    shown = (ROOT / "docs/pictures/layer-speed.svg").read_text()
    command = "python -m benchmarks.layer_picture > docs/pictures/layer-speed.svg"
    assert shown == layer_picture.picture(record), f"stale: {command}"
    record["tables"][0]["rows"][0][3] = "1 (0.00)"
    assert shown != layer_picture.picture(record)
    assert "pictures/layer-speed.svg" in (ROOT / "docs/index.md").read_text()


def test_the_page_of_calls_is_what_the_catalogue_gives():
    shown = (ROOT / "docs/reference/calls.md").read_text()
    assert shown == calls.document(), "stale: python -m benchmarks.calls > docs/reference/calls.md"
    assert [name for name in CONTRACTS if f"    {name}(" not in shown] == []
