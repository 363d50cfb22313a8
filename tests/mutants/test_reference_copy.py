"""The copy of the reference is the reference; a change in it is found, which none in both is."""

import sys
from dataclasses import replace

import pytest

from benchmarks.reference_copy import NAME, write
from conformance.engine.child.evaluate import evaluate
from conformance.families.permutation.cases import RoutingCase
from conformance.families.router.cases import LogitsCase
from conformance.interface import load

CASES = (
    RoutingCase(function="permute", tokens=5, experts=3, hidden=4, grads="tokens"),
    LogitsCase(function="topk_routing", tokens=5, experts=4, topk=2, score="sigmoid"),
)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The folder of the copy, which can be imported."""
    folder = write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_the_copy_passes_and_a_change_in_it_does_not(copy):
    changed_file = copy / "whole" / "permutation" / "rows.py"
    assert [evaluate(case, load(NAME)).status for case in CASES] == ["PASS"] * len(CASES)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    source = changed_file.read_text()
    assert "real" in source
    changed_file.write_text(source + "\n\ndef take_rows(x, rows, back=None):\n    return x[rows.clamp(min=0)]\n")
    assert evaluate(replace(CASES[0], experts=4, capacity=7), load(NAME)).status == "FAIL"


def test_no_part_of_the_copy_reads_the_reference_but_its_settings(copy):
    lines = [line for path in copy.rglob("*.py") for line in path.read_text().splitlines()]
    read = [line for line in lines if line.startswith(("from moe_ref", "import moe_ref"))]
    assert len(read) > 20
    assert [line for line in read if not line.startswith("from moe_ref.config")] == []


def test_the_copy_has_the_dispatchers_of_one_rank(copy):
    parameters = load(NAME).namespace.alltoall_dispatch.__signature__.parameters
    assert "group" in parameters
