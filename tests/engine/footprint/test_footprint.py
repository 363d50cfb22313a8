"""A change is noticed in every function that it can reach, and in no other."""

import pytest

from conformance.engine.footprint.footprint import Footprints
from conformance.engine.footprint.names import Scope
from tests.engine.footprint.kit import FILES, changes, edited, footprints_here, footprints_in, write

EVERY = {"gate", "jitter", "z_loss"}
EDITS = {
    "a helper": (edited("helpers.py", "return eps", "return eps * 1"), {"jitter"}),
    "a constant": (edited("parts.py", "FACTOR = 1.0", "FACTOR = 2.0"), {"z_loss"}),
    "a decorator, which an import calls": (
        edited("helpers.py", "return function(*args", "return +function(*args"),
        EVERY,
    ),
    "a default argument": (edited("helpers.py", "SHIFT = 0", "SHIFT = 1"), {"gate"}),
    "a registered function": (edited("helpers.py", "bias=bias", "bias=None"), {"gate"}),
    "a kernel that a kernel calls": (edited("kernels.py", "x + STEP", "x - STEP"), {"z_loss"}),
    "a constant of a kernel": (edited("kernels.py", "constexpr(4)", "constexpr(8)"), {"z_loss"}),
    "an annotation of a kernel": (edited("kernels.py", "BLOCK: tl.constexpr", "BLOCK"), {"z_loss"}),
    "an inherited method": (edited("bases.py", "scales[0]", "scales[-1]"), {"z_loss"}),
    "a lambda in a class": (edited("parts.py", "moe_ref.z_loss(*args", "-moe_ref.z_loss(*args"), {"z_loss"}),
    "a field's factory": (edited("names.py", "[1]", "[2]"), {"z_loss"}),
    "a partial function": (edited("parts.py", "times=1", "times=2"), {"z_loss"}),
    "a function found by name": (edited("names.py", "x * times", "times * x"), {"z_loss"}),
    "a conditional import": (edited("quick.py", "return eps", "return +eps"), {"jitter"}),
    "a check of one function": (edited("parts.py", "no_jitter(x, eps=None)", "no_jitter(x, eps=1)"), {"jitter"}),
    "a new name": (
        {name: FILES[name].replace("noise", "hiss") for name in ("parts.py", "helpers.py")},
        {"jitter"},
    ),
    "a data file": ({"table.json": "[2]"}, EVERY),
    "a library": ({"fast.so": "other machine code"}, EVERY),
    "a statement that an import runs": (edited("bases.py", "class Loss:", "print(end='')\n\n\nclass Loss:"), EVERY),
    "comments and layout": (edited("parts.py", "  # plain", "  # a comment,\n\n    # and another"), set()),
    "a docstring": (edited("parts.py", '"""Noise."""', '"""Other noise."""'), set()),
    "an unused constant": (edited("parts.py", "UNUSED = 3", "UNUSED = 4"), set()),
}  # fmt: skip


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Footprints:
    return footprints_in(write(tmp_path_factory.mktemp("before")))


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_is_noticed_where_it_reaches(edit, before, tmp_path):
    files, reached = EDITS[edit]
    assert set(changes(before, footprints_in(write(tmp_path, **files)))) == reached


def test_the_same_package_in_another_folder_is_unchanged(before, tmp_path):
    assert changes(before, footprints_in(write(tmp_path))) == {}


def test_a_footprint_that_ignores_globals_misses_a_constant(before, tmp_path, monkeypatch):
    lookup = Scope._name
    monkeypatch.setattr(Scope, "_name", lambda self, name: None if name == "FACTOR" else lookup(self, name))
    blind = footprints_here(write(tmp_path / "before"))
    files, reached = EDITS["a constant"]
    assert set(changes(blind, footprints_here(write(tmp_path / "after", **files)))) != reached


def test_the_reason_names_what_changed(before, tmp_path):
    files, _ = EDITS["a kernel that a kernel calls"]
    assert changes(before, footprints_in(write(tmp_path, **files))) == {"z_loss": "changed kit.kernels:inner"}


@pytest.mark.parametrize(
    "code", ["eval('noise(eps)')", "globals()['noise'](eps)", "__import__('kit.helpers').helpers.noise(eps)"]
)
def test_code_that_finds_functions_by_other_means_depends_on_the_whole_package(code, before, tmp_path):
    hidden = edited("parts.py", "eps=noise(eps)", f"eps={code}")
    first = footprints_in(write(tmp_path / "first", **hidden))
    files = hidden | EDITS["an inherited method"][0]
    assert set(changes(first, footprints_in(write(tmp_path / "second", **files)))) == {"jitter", "z_loss"}


def test_a_file_that_is_gone_is_noticed(before, tmp_path):
    folder = write(tmp_path)
    (folder / "kit" / "quick.py").unlink()
    assert "jitter" in changes(before, footprints_in(folder))


def test_a_variable_of_the_environment_is_noticed_where_it_is_read(before, tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_NAME", "twice")
    assert set(changes(before, footprints_in(write(tmp_path)))) == {"z_loss"}


def test_a_variable_that_compilers_read_concerns_every_function(before, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    found = changes(before, footprints_in(write(tmp_path)))
    assert found == dict.fromkeys(EVERY, "changed the variable TRITON_DISABLE_LINE_INFO")


def test_a_footprint_is_the_same_after_json(before):
    assert Footprints.of(before.record()) == before
