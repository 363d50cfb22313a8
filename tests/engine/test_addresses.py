"""What a kernel touches that its launch was not given, in Triton's interpreter."""

import pytest
import torch

from conformance.core.space import Space
from conformance.engine.child.addresses import Addresses
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.poison import Poison, install
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.interface import load
from tests.honest import strays

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
N = 13


def outside(launch) -> str:
    """What is told of a launch whose output lies between guards, which it does not overwrite."""
    install()
    with Poison("zero") as memory, Addresses(memory) as addresses:
        launch(torch.empty(N, dtype=torch.int32))
    assert not memory.overrun()
    return addresses.outside


def copied(rows_before: int, behind: int, source: torch.Tensor | None = None) -> str:
    x = torch.ones(N, dtype=torch.int32) if source is None else source
    return outside(lambda y: strays.copy[(1,)](x, y, N, rows_before, behind, BLOCK=16))


def test_a_kernel_that_keeps_to_its_tensors_is_not_told_of():
    assert copied(0, 0) == ""
    assert outside(lambda y: strays.fill[(1,)](y, N, 0, BLOCK=16)) == ""
    assert outside(lambda y: strays.add[(1,)](y, N, 0, BLOCK=16)) == ""
    assert outside(lambda y: strays.swap[(1,)](y, N - 1)) == ""


@pytest.mark.parametrize("behind", [1, 3])
def test_a_read_behind_the_end_is_told(behind):
    assert "reads" in copied(0, behind) and "ends 4 bytes past the end of x_ptr" in copied(0, behind)


def test_a_read_in_front_is_told_with_its_line():
    assert copied(1, 0).startswith("kernel copy (strays.py:") and "begins 4 bytes in front of x_ptr" in copied(1, 0)


@pytest.mark.parametrize(
    "launch",
    [
        lambda y: strays.fill[(1,)](y, N, 1, BLOCK=16),
        lambda y: strays.add[(1,)](y, N, 1, BLOCK=16),
        lambda y: strays.swap[(1,)](y, N),
    ],
    ids=["store", "atomic add", "compare and swap"],
)
def test_a_write_behind_the_end_is_told_and_does_not_happen(launch):
    assert "writes an address outside" in outside(launch)


def test_a_read_beside_an_empty_tensor_is_told():
    assert "x_ptr" in copied(0, 1, torch.empty(0, dtype=torch.int32))


def test_a_view_may_be_read_around():
    storage = torch.ones(64, dtype=torch.int32)
    assert copied(3, 3, storage[8 : 8 + N]) == ""
    assert copied(3, 3, storage[1 : 1 + N]) != ""


def test_the_guards_of_fresh_memory_are_no_part_of_it():
    assert "x_ptr" in outside(lambda y: strays.copy[(1,)](torch.empty_like(y), y, N, 0, 1, BLOCK=16))


def test_a_pointer_made_of_an_integer_is_not_watched():
    x = torch.arange(N, dtype=torch.int32)
    table = torch.tensor([x.data_ptr()])
    assert outside(lambda y: strays.follow[(1,)](table, y, N, BLOCK=16)) == ""


def test_the_suite_fails_an_implementation_that_reads_too_far():
    cases = cases_of(Section("fixed", "indices_to_multihot"), PROFILES["gate"], Space(), 0)
    outcomes = [evaluate(case, load("tests.honest.strays")) for case in cases]
    messages = [outcome.finding["message"] for outcome in outcomes if outcome.status == "FAIL"]
    assert messages and all("kernel copy" in message for message in messages)
