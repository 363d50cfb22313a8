"""Defects of kernels: each changes lines of `moe_fast`, and the suite finds it."""

import json

import pytest

from conformance.mutants.substitution import Header, Hunk, Substitution
from tests.mutants.kernels.run import KILLERS, defects, score, source_of


@pytest.mark.parametrize("name", sorted(defects()))
def test_every_change_is_of_lines_that_occur_once_and_gives_python(name):
    mutant = source_of(defects()[name])
    compile(mutant.source, mutant.file, "exec")
    assert mutant.source != mutant.original


def test_a_change_of_nothing_survives_and_a_defect_does_not():
    killer_ids = json.loads(KILLERS.read_text())
    hunk = Hunk("moe_fast/permutation/_permute.py", "import triton\n", "import triton  # the same\n")
    same = Substitution(Header("nothing", ("multihot_to_indices",), "a title", "a test"), (hunk,))
    (name,) = [name for name in sorted(killer_ids) if "permute" in defects()[name].header.functions][:1]
    nothing, defect = score({"nothing": same, name: defects()[name]}, jobs=2)
    assert (nothing.killed, defect.killed) == (False, True)
