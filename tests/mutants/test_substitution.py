"""Defects as text: each changes lines of a copy of the reference, and nothing else."""

from pathlib import Path

import pytest
import torch

import moe_ref
from conformance.mutants import planted
from conformance.mutants.copies import COPIES, in_a_copy, of_copy
from conformance.mutants.defect import Defect
from conformance.mutants.kinds import KINDS, of_kinds
from conformance.mutants.planted import DEFECTS, EXAMPLES, FOLDER, by_name
from conformance.mutants.substitution import Hunk, Substitution, header, read, substituted

ROOT = Path(__file__).parents[2]
FILES = [EXAMPLES, *sorted(FOLDER.glob("*/reference.txt"))]
WRITTEN = {one.header.name: one for path in FILES for one in read(path)}
ROUTED = "    tokens = [t for t, wanted in enumerate(routed) if wanted]"
TEXT = f"""# a comment

ZZ01 permute, unpermute: nothing is routed: [at all] [a test]
@ moe_ref/permutation/permute.py
-{ROUTED}
+    tokens = []
"""


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_every_change_is_of_lines_that_occur_once_and_gives_python(name):
    for hunk in WRITTEN[name].hunks:
        source = (ROOT / hunk.file).read_text()
        assert substituted(source, hunk) != source
        compile(of_copy(substituted(source, hunk), "a_copy", {}), hunk.file, "exec")
        state = hunk.file == "moe_ref/config/state.py"  # functions of the interface, and no type
        assert state or not hunk.file.startswith("moe_ref/config/"), "a copy has the reference's own settings"


@pytest.mark.parametrize(
    ("source", "old", "sentence"),
    [
        ("first\nx = 2\n", "x = 1\n", r"layer.py has no line 'x = 1'; the nearest is line 2: 'x = 2'"),
        ("", "x = 1\n", "it is empty"),
        ("    x = 1\n", "x = 1\n", "has no line 'x = 1'"),  # a part of a line is no line
        *((source, "x = 1\n", "2 times, not once") for source in ("x = 1\nx = 1\n", "x = 1\ny = 1\nx = 1\n")),
        ("x = 1\ny = 1\nz = 1\n", "x = 1\nz = 1\n", "0 times, not once, these lines together"),
    ],
)
def test_lines_that_do_not_stand_there_once_and_together_are_refused(source, old, sentence):
    with pytest.raises(ValueError, match=sentence):
        substituted(source, Hunk("layer.py", old, ""))


def test_a_file_that_is_not_there_is_refused_with_the_nearest_one():
    defect = Substitution(header("ZZ01 permute: a title [a test]"), (Hunk("moe_ref/permutation/permut.py", "a\n", ""),))
    with pytest.raises(ValueError, match=r"ZZ01: there is no file .*; the nearest is moe_ref/permutation/permute.py"):
        in_a_copy(defect)


def test_lines_between_the_changed_ones_stay(tmp_path):
    (tmp_path / "one.txt").write_text("ZZ01 permute: a title [a test]\n@ f.py\n a\n-b\n+B\n c\n@ g.py\n-d\n")
    (defect,) = read(tmp_path / "one.txt")
    assert defect.hunks == (Hunk("f.py", "a\nb\nc\n", "a\nB\nc\n"), Hunk("g.py", "d\n", ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ZZ01 permute, a title [a test]\n@ f.py\n-a\n", "a defect begins"),
        ("ZZ01 permute: a title\n@ f.py\n-a\n", "a defect begins"),
        ("ZZ01 permute: a title [a test]\n@ f.py\nx = 1\n", "begins with -, .* or a space, unlike 'x = 1'"),
        ("ZZ01 permute: a title [a test]\n", "changes no line"),
    ],
)
def test_a_text_that_is_no_defect_is_refused(tmp_path, text, message):
    (tmp_path / "one.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path / "one.txt"))


def test_two_defects_of_one_name_are_refused():
    defect = Defect("ZZ01", "a title", "a test", {})
    with pytest.raises(ValueError, match="two defects are named ZZ01"):
        by_name([defect, defect])


def test_a_copy_has_the_change_and_the_reference_has_not(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text(TEXT)
    monkeypatch.setattr(COPIES, "hunks", dict(COPIES.hunks))
    defect = in_a_copy(next(read(tmp_path / "one.txt")))
    assert (defect.title, list(defect.wrappers)) == ("nothing is routed: [at all]", ["permute", "unpermute"])
    routing_map, tokens = torch.tensor([[True, False], [True, True]]), torch.arange(2.0)[:, None]
    assert len(defect.wrappers["permute"](moe_ref.permute, tokens, routing_map).rows) == 0
    assert len(moe_ref.permute(tokens, routing_map).rows) == 3


def test_a_copy_takes_its_settings_from_the_reference():
    source = "from moe_ref.config import Recipe\nfrom moe_ref.layer import x\nfrom conformance.peers.peer import y"
    expected = "from moe_ref.config import Recipe\nfrom c.layer import x\nfrom c.peer import y"
    assert of_copy(source, "c", {"peer": "c.peer"}) == expected


def test_each_kind_has_a_defect_and_an_unknown_kind_is_refused(tmp_path):
    lines = (FOLDER / "kinds.txt").read_text().splitlines()
    kinds = (line.partition(" | ")[0] for line in lines if not line.startswith("#"))
    assert {kind.partition(": ")[0].strip() for kind in kinds} == set(KINDS)
    (tmp_path / "kinds.txt").write_text("33-bit addresses | ZZ01 permute: a title [a test]\n")
    with pytest.raises(ValueError, match="there is no kind '33-bit addresses'"):
        list(of_kinds(tmp_path / "kinds.txt"))


def test_an_installed_package_has_ten_examples(monkeypatch, tmp_path):
    monkeypatch.setattr(planted, "FOLDER", tmp_path)
    monkeypatch.setattr(planted, "TABLE", tmp_path / "kinds.txt")
    planted._of_text.cache_clear()
    examples = planted._all.__wrapped__()
    planted._of_text.cache_clear()
    assert len(examples) == 10
    assert set(examples) < set(DEFECTS)


def test_a_header_names_its_functions():
    assert header("Q08q glu, gate: a: b [c #1, d]") == ("Q08q", ("glu", "gate"), "a: b", "c #1, d")
