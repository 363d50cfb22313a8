"""What the distributions hold."""

import email
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

import conformance
from tests.installed.conftest import PACKAGES, ROOT

SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def contents(wheel) -> dict[str, str]:
    """The texts of the wheel by path."""
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name).decode() for name in opened.namelist()}


def one(contents: dict[str, str], ending: str) -> str:
    (text,) = (text for name, text in contents.items() if name.endswith(f".dist-info/{ending}"))
    return text


def test_no_other_pytest_run_gets_the_plugin(contents):
    assert "pytest11" not in one(contents, "entry_points.txt")
    assert "moe-conformance = conformance.cli:main" in one(contents, "entry_points.txt")


def test_the_metadata_names_licence_authors_and_the_readme(contents):
    fields = email.message_from_string(one(contents, "METADATA"))
    assert (fields["License-Expression"], fields["Author"]) == ("Apache-2.0", "The moe-conformance authors")
    assert fields.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert "Copyright 2026 The moe-conformance authors" in one(contents, "licenses/LICENSE")


def test_the_packages_are_typed_and_have_their_data(contents):
    assert all(f"{package}/py.typed" in contents for package in PACKAGES)
    kinds = ("json", "toml")
    data = {path.relative_to(ROOT).as_posix() for kind in kinds for path in (ROOT / "conformance").rglob(f"*.{kind}")}
    assert data and data <= contents.keys()
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/")) for name in contents)


def test_the_source_distribution_has_what_the_readme_links_to(source):
    done = subprocess.run(
        [sys.executable, "-c", SDIST, "sdist"], cwd=source, capture_output=True, text=True, check=True, timeout=1200
    )
    with tarfile.open(source / "sdist" / done.stdout.splitlines()[-1]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    links = re.findall(r"\]\(([^)#:\s]+?)/?(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert set(links) <= names
    assert {"LICENSE", "Makefile", "tests/conftest.py"} <= names


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert conformance.__version__ == "not installed"
