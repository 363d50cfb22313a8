"""Defects of kernels: each changes lines of `moe_fast`, and the suite finds it."""

import json

import pytest

from conformance.mutants.substitution import Header, Hunk, Substitution
from tests.mutants.kernels.run import KILLERS, defects, score, source_of

FILE = "moe_fast/permutation/_permute.py"


def changed(name: str, function: str, old: str, new: str) -> Substitution:
    return Substitution(Header(name, (function,), "a title", "a test"), (Hunk(FILE, old, new),))


@pytest.mark.parametrize("name", sorted(defects()))
def test_every_change_is_of_lines_that_occur_once_and_gives_python(name):
    mutant = source_of(defects()[name])
    compile(mutant.source, mutant.file, "exec")
    assert mutant.source != mutant.original


def test_lines_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"has no line 'import tritone'; the nearest is line .*'import triton'"):
        source_of(changed("K", "permute", "import tritone\n", ""))


def test_a_change_of_nothing_survives_and_a_defect_does_not():
    killer_ids = json.loads(KILLERS.read_text())
    same = changed("nothing", "multihot_to_indices", "import triton\n", "import triton  # the same\n")
    (name,) = [name for name in sorted(killer_ids) if "permute" in defects()[name].header.functions][:1]
    nothing, defect = score({"nothing": same, name: defects()[name]}, jobs=2)
    assert (nothing.killed, defect.killed) == (False, True)
