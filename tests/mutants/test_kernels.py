"""Defects of kernels: each changes one text of `moe_fast`, and the suite finds it."""

import json

import pytest

from conformance.core.rewritten import Rewrite
from tests.mutants.kernels import KernelDefect, series
from tests.mutants.kernels.run import KILLERS, defects, score, source_of

NOTHING = Rewrite("permutation/_permute.py", "import triton\n", "import triton  # the same\n")


@pytest.mark.parametrize("name", sorted(defects()))
def test_every_change_is_of_a_text_that_occurs_once_and_gives_python(name):
    mutant = source_of(defects()[name])
    compile(mutant.source, mutant.file, "exec")


def test_a_text_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="not once"):
        source_of(KernelDefect("K", "", ("permute",), Rewrite("permutation/_permute.py", "no such text", "")))


def test_names_count_from_one():
    first, second = series("P", (("a", "permute unpermute", "f.py", "x", "y"), ("b", "permute", "f.py", "x", "z")))
    assert (first.name, second.name, first.functions) == ("KP001", "KP002", ("permute", "unpermute"))


def test_a_change_of_nothing_survives_and_a_defect_does_not():
    known = json.loads(KILLERS.read_text())
    chosen = {"nothing": KernelDefect("nothing", "", ("multihot_to_indices",), NOTHING)}
    (name,) = [name for name in sorted(known) if "permute" in defects()[name].functions][:1]
    nothing, defect = score(chosen | {name: defects()[name]}, jobs=2)
    assert (nothing.killed, defect.killed) == (False, True)
